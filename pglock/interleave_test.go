package pglock_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// The shapes of the queue that lose a wake-up or serve out of order.
const (
	// Draws its ticket without the lease row.
	enqueueUnlocked = `CREATE FUNCTION mutant.enqueue(name text, ttl interval, claim uuid, channel text)
		RETURNS TABLE (granted boolean, token bigint, holder text, remaining interval, expires_at timestamptz, ticket bigint)
		LANGUAGE plpgsql AS $$
		#variable_conflict use_column
		BEGIN
			INSERT INTO pglock.waiters AS w (name, claim, channel, role, expires_at, ttl)
			VALUES (enqueue.name, enqueue.claim, enqueue.channel, session_user, clock_timestamp() + enqueue.ttl, enqueue.ttl);
			PERFORM FROM pglock.leases l WHERE l.name = enqueue.name AND l.expires_at <= clock_timestamp() FOR UPDATE SKIP LOCKED;
			IF FOUND THEN PERFORM pglock.hand_on(enqueue.name); END IF;
			RETURN QUERY SELECT false, NULL::bigint, NULL::text, NULL::interval, NULL::timestamptz, w.ticket
				FROM pglock.waiters w WHERE w.claim = enqueue.claim;
		END $$`

	// Looks for waiters with the snapshot from before it had the row.
	releaseAtOnce = `CREATE FUNCTION mutant.release(names text[], tokens bigint[]) RETURNS void
		LANGUAGE sql AS $$
			WITH head AS MATERIALIZED (SELECT min(w.ticket) AS ticket FROM pglock.waiters w WHERE w.name = names[1]),
			freed AS (UPDATE pglock.leases l SET claim = NULL, expires_at = '-infinity'
				WHERE l.name = names[1] AND l.token = tokens[1] RETURNING l.name)
			SELECT pglock.hand_on(f.name) FROM freed f, head h WHERE h.ticket IS NOT NULL $$`
)

// act is what one session does in a transaction of its own.
type act struct {
	name string
	sql  string // with the name and the token of the tenure at the start, or with the name and a claim
}

func enqueueAct(schema string) act {
	return act{"enqueue", `SELECT ticket FROM ` + schema + `.enqueue($1, '1 h', $2, 'nobody')`}
}

func releaseAct(schema string) act {
	return act{"release", `SELECT ` + schema + `.release(ARRAY[$1::text], ARRAY[$2::bigint])`}
}

// TestQueue_Interleavings runs the calls of two and three sessions in every
// order of their steps: a step is a call or the commit after it, and one that
// has to wait goes on when it can. Afterwards no lease is free while somebody
// waits, and nobody was granted it before a lower ticket (fact 19).
func TestQueue_Interleavings(t *testing.T) {
	t.Parallel()
	take := act{"take", `SELECT token FROM pglock.acquire(ARRAY[$1::text], '1 h') WHERE $2::uuid IS NOT NULL`}
	takeOne := act{"take one", `SELECT token FROM pglock.acquire_one($1, '1 h', $2, NULL, NULL)`}
	releaseOne := act{"release", `SELECT pglock.release_one($1, $2, '5 s')`}
	refresh := act{"refresh", `SELECT pglock.refresh(ARRAY[$1::text], ARRAY[$2::uuid])`}
	for _, tt := range []struct {
		name    string
		acts    []act
		expired bool
		mutant  string
	}{
		{"a waiter comes", []act{releaseAct("pglock"), enqueueAct("pglock")}, false, ""},
		{"a waiter comes at expiry", []act{take, enqueueAct("pglock")}, true, ""},
		{"two waiters come", []act{releaseAct("pglock"), enqueueAct("pglock"), enqueueAct("pglock")}, false, ""},
		{"two waiters come at expiry", []act{enqueueAct("pglock"), enqueueAct("pglock"), take}, true, ""},
		{"a waiter and a try", []act{releaseAct("pglock"), enqueueAct("pglock"), take}, false, ""},
		{"a waiter comes as one is released", []act{releaseOne, enqueueAct("pglock")}, false, ""},
		{"a waiter comes at expiry as one is taken", []act{takeOne, enqueueAct("pglock")}, true, ""},
		{"two waiters come as one is released", []act{releaseOne, enqueueAct("pglock"), enqueueAct("pglock")}, false, ""},
		{"a waiter and a try of one", []act{releaseOne, enqueueAct("pglock"), takeOne}, false, ""},
		{"a waiter and a refresh at expiry", []act{enqueueAct("pglock"), enqueueAct("pglock"), refresh}, true, ""},
		{"mutant: a ticket without the row", []act{releaseAct("pglock"), enqueueAct("mutant")}, false, enqueueUnlocked},
		{"mutant: tickets without the row", []act{releaseAct("pglock"), enqueueAct("mutant"), enqueueAct("mutant")}, false, enqueueUnlocked},
		{"mutant: a release in one statement", []act{releaseAct("mutant"), enqueueAct("pglock")}, false, releaseAtOnce},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			if tt.mutant != "" {
				mutate(t, pool, tt.mutant)
			}
			conns := make([]*pgx.Conn, len(tt.acts))
			for i := range conns {
				conns[i] = newConn(t, pool)
			}
			faults := map[string]int{}
			orders := orders(len(tt.acts))
			for _, order := range orders {
				name := fmt.Sprint(order)
				for _, fault := range interleave(t, pool, conns, tt.acts, order, tt.expired) {
					faults[fault]++
					if tt.mutant == "" {
						t.Errorf("in the order %s: %s", name, fault)
					}
				}
			}
			t.Logf("%d orders: %v", len(orders), faults)
			if tt.mutant != "" && len(faults) == 0 {
				t.Error("no fault seen: this test shows nothing")
			}
		})
	}
}

// orders returns every order of the two steps of n sessions.
func orders(n int) (all [][]int) {
	var extend func(order []int, done []int)
	extend = func(order []int, done []int) {
		if len(order) == 2*n {
			all = append(all, append([]int(nil), order...))
			return
		}
		for i := range n {
			if done[i] < 2 {
				done[i]++
				extend(append(order, i), done)
				done[i]--
			}
		}
	}
	extend(nil, make([]int, n))
	return all
}

// interleave runs one order and returns what went wrong.
func interleave(t *testing.T, pool *pgxpool.Pool, conns []*pgx.Conn, acts []act, order []int, expired bool) (faults []string) {
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	name := "order/" + strings.Trim(fmt.Sprint(order), "[]")
	token := one[int64](t, pool, `SELECT token FROM pglock.acquire(ARRAY[$1], '1 h')`, name)
	if expired {
		expire(t, pool, name)
	}
	tickets := make([]*int64, len(acts))
	claims := make([]string, len(acts))
	pending := make([]chan error, len(acts)) // a step that is under way
	var steps [][]func() error
	for i, a := range acts {
		claims[i] = one[string](t, pool, `SELECT gen_random_uuid()::text`)
		conn := conns[i]
		args := []any{name, claims[i]}
		if a.name == "release" {
			args[1] = token
		}
		steps = append(steps, []func() error{
			func() error {
				if _, err := conn.Exec(ctx, `BEGIN`); err != nil {
					return err
				}
				rows, err := conn.Query(ctx, a.sql, args...)
				if err != nil {
					return err
				}
				defer rows.Close()
				if rows.Next() && a.name == "enqueue" {
					return rows.Scan(&tickets[i])
				}
				rows.Close()
				return rows.Err()
			},
			func() error { _, err := conn.Exec(ctx, `COMMIT`); return err },
		})
	}
	// settle waits until a session's step is done, or waits for another session.
	settle := func(i int) {
		if pending[i] == nil {
			return
		}
		pid := int32(conns[i].PgConn().PID())
		for {
			select {
			case err := <-pending[i]:
				pending[i] = nil
				if err != nil {
					t.Errorf("%s in the order %v: %v", acts[i].name, order, err)
				}
				return
			default:
			}
			if one[bool](t, pool, `SELECT cardinality(pg_blocking_pids($1)) > 0`, pid) {
				return
			}
		}
	}
	begin := func(i int) {
		step := steps[i][0]
		steps[i] = steps[i][1:]
		pending[i] = make(chan error, 1)
		go func(done chan<- error) { done <- step() }(pending[i])
		settle(i)
	}
	var left []int
	for _, i := range order {
		settle(i)
		if pending[i] != nil {
			left = append(left, i) // its call still waits: the commit comes when it can
			continue
		}
		begin(i)
	}
	for end := time.Now().Add(limit); len(left) > 0; {
		if time.Now().After(end) {
			t.Fatalf("in the order %v the sessions wait for each other", order)
		}
		i := left[0]
		left = left[1:]
		if settle(i); pending[i] != nil {
			left = append(left, i)
			continue
		}
		begin(i)
	}
	for i := range conns {
		for pending[i] != nil {
			settle(i)
		}
	}

	if one[bool](t, pool, `SELECT expires_at <= clock_timestamp() AND EXISTS (SELECT FROM pglock.waiters w WHERE w.name = l.name)
		FROM pglock.leases l WHERE name = $1`, name) {
		faults = append(faults, "the lease is free and somebody waits")
	}
	for i := range acts {
		if tickets[i] == nil {
			continue
		}
		granted := one[bool](t, pool, `SELECT claim IS NOT DISTINCT FROM $2::uuid FROM pglock.leases WHERE name = $1`, name, claims[i])
		if granted && one[bool](t, pool, `SELECT EXISTS (SELECT FROM pglock.waiters WHERE name = $1 AND ticket < $2)`, name, *tickets[i]) {
			faults = append(faults, "a lower ticket was passed over")
		}
	}
	return faults
}
