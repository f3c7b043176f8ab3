package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// oldClient is a client of the first release, as simple as one may be written
// in any language: one connection, and the statements that are frozen.
type oldClient struct {
	conn    *pgx.Conn
	channel string
	woken   *atomic.Int64 // waits that a notification ended
	tickets *atomic.Int64
}

func newOldClient(t testing.TB, pool *pgxpool.Pool, id int, woken, tickets *atomic.Int64) *oldClient {
	t.Helper()
	conn := newConn(t, pool)
	if changed, err := prepareFrozen(t, conn); err != nil {
		t.Fatalf("%s: %v", changed, err)
	}
	c := &oldClient{conn, fmt.Sprintf("old_%d", id), woken, tickets}
	exec(t, conn, `LISTEN `+c.channel)
	var standby bool
	var version int64
	if err := conn.QueryRow(t.Context(), "greet").Scan(&standby, &version); err != nil || standby || version < 7 {
		t.Fatalf("greeted by version %d, standby %t: %v", version, standby, err)
	}
	exec(t, conn, "check_epoch")
	return c
}

const oldTTL = time.Minute

// take acquires a lease, and waits for it in line, or gives up and returns 0.
func (c *oldClient) take(ctx context.Context, name string) (token int64, err error) {
	claim := newUUID()
	var granted bool
	var shown, ticket *int64
	if rand.N(2) == 0 {
		err = c.conn.QueryRow(ctx, "acquire_one", name, oldTTL, claim, "old", nil).Scan(&granted, &shown, nil, nil, nil)
		if err != nil || granted {
			return deref(shown), err
		}
		claim = newUUID()
	}
	for {
		err = c.conn.QueryRow(ctx, "enqueue", name, oldTTL, claim, c.channel, "old", `{"is":"old"}`).Scan(&granted, &shown, nil, nil, nil, &ticket)
		if err != nil || granted {
			return deref(shown), err
		}
		if ticket != nil {
			break
		}
	}
	c.tickets.Add(1)
	if rand.N(6) == 0 {
		_, err := c.conn.Exec(ctx, "cancel", name, claim)
		return 0, err
	}
	for {
		short, cancel := context.WithTimeout(ctx, oldTTL/3)
		n, err := c.conn.WaitForNotification(short)
		cancel()
		if err == nil {
			var about string
			if _, err := fmt.Sscanf(n.Payload, "%36s %d", &about, &token); err != nil || n.Channel != c.channel {
				return 0, fmt.Errorf("a notification on %q says %q: %w", n.Channel, n.Payload, err)
			}
			if about != uuid(claim) { // of a wait that was given up
				continue
			}
			c.woken.Add(1)
			return token, nil
		} else if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			return 0, err
		}
		var state string
		err = c.conn.QueryRow(ctx, "refresh", []string{name}, [][16]byte{claim}).Scan(&shown, &state, nil, nil)
		switch {
		case err != nil:
			return 0, err
		case state == "granted":
			return deref(shown), nil
		case state != "waiting" && state != "busy":
			return 0, fmt.Errorf("a ticket that is refreshed in time is %s", state)
		}
	}
}

// add reads a counter and writes it back, one higher, and an entry with it. In
// between it calls pause.
func (c *oldClient) add(ctx context.Context, prove, name string, token int64, pause func()) error {
	return pgx.BeginFunc(ctx, c.conn, func(tx pgx.Tx) error {
		if prove != "" {
			if _, err := tx.Exec(ctx, prove, name, token); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, "fence", name, token); err != nil {
				return err
			}
		}
		var n int
		if err := tx.QueryRow(ctx, `SELECT n FROM counters WHERE name = $1`, name).Scan(&n); err != nil {
			return err
		}
		pause()
		if _, err := tx.Exec(ctx, `INSERT INTO entries (name, token) VALUES ($1, $2)`, name, token); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `UPDATE counters SET n = $2 WHERE name = $1`, name, n+1)
		return err
	})
}

// tenure is one lease from its grant to its release, with what others may be
// told of it meanwhile.
func (c *oldClient) tenure(ctx context.Context, name string, token int64) error {
	names, tokens := []string{name}, []int64{token}
	var state string
	if err := c.conn.QueryRow(ctx, "renew", names, tokens).Scan(nil, &state, nil); err != nil || state != "held" && state != "busy" {
		return fmt.Errorf("renew says %q: %w", state, err)
	}
	if err := c.conn.QueryRow(ctx, "renew", names, []int64{token + 1<<40}).Scan(nil, &state, nil); err != nil || state != "taken" {
		return fmt.Errorf("renew of a token that is none says %q: %w", state, err)
	}
	err := pgx.BeginFunc(ctx, c.conn, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "guard", name, token-1)
		return err
	})
	if sqlState(err) != "PW002" {
		return fmt.Errorf("guard of the token before says %w", err)
	}
	if err := c.add(ctx, "present", name, token, func() {}); err != nil {
		return err
	}
	if err := c.conn.QueryRow(ctx, "release", names, tokens, 30*time.Second).Scan(nil, &state, nil, nil); err != nil || state != "released" {
		return fmt.Errorf("release says %q: %w", state, err)
	}
	if err := c.conn.QueryRow(ctx, "release", names, tokens, time.Duration(0)).Scan(nil, &state, nil, nil); err != nil || state != "idle" && state != "taken" {
		return fmt.Errorf("a second release says %q: %w", state, err)
	}
	return nil
}

// Many clients of the first release share a few leases of this schema, and of
// one that has grown meanwhile, and hold them as they did.
func TestFrozen_UnderLoad(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name, change string
		unlocked     bool
	}{
		{"as it is", `SELECT pglock.protect('entries', '%')`, false},
		{"grown", `SELECT pglock.protect('entries', '%');
			CREATE FUNCTION pglock.later(name text) RETURNS void LANGUAGE sql AS '';
			ALTER TABLE pglock.leases ADD COLUMN later text; ALTER TABLE pglock.waiters ADD COLUMN later text;
			INSERT INTO pglock.goose_db_version (version_id, is_applied) VALUES (9000, true)`, false},
		{"control: without the lease", `SELECT`, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			names := []string{"a", "b"}
			exec(t, pool, `CREATE TABLE counters (name text PRIMARY KEY, n int NOT NULL); INSERT INTO counters VALUES ('a', 0), ('b', 0);
				CREATE TABLE entries (nth bigserial, name text, token bigint)`)
			exec(t, pool, tt.change)
			var g errgroup.Group
			var woken, tickets, added atomic.Int64
			const clients = 8
			var readers atomic.Int64 // in the control: more of them than counters
			allHaveRead := make(chan struct{})
			for id := range clients {
				c := newOldClient(t, pool, id, &woken, &tickets)
				g.Go(func() error {
					ctx, cancel := context.WithTimeout(context.Background(), 2*limit)
					defer cancel()
					for range scale(60, 15) {
						name := names[rand.N(len(names))]
						if tt.unlocked {
							return c.add(ctx, "", name, added.Add(1), func() {
								if readers.Add(1) == clients {
									close(allHaveRead)
								}
								select {
								case <-allHaveRead:
								case <-ctx.Done():
								}
							})
						}
						token, err := c.take(ctx, name)
						if err != nil {
							return err
						}
						if token == 0 {
							continue
						}
						added.Add(1)
						if err := c.tenure(ctx, name, token); err != nil {
							return err
						}
						for _, look := range []string{"list_leases_by_hand", "list_waiters", "list_fences", "protected_tables"} {
							if _, err := c.conn.Exec(ctx, look); err != nil {
								return err
							}
						}
					}
					return nil
				})
			}
			if err := g.Wait(); err != nil {
				t.Fatal(err)
			}
			counted := one[int64](t, pool, `SELECT sum(n) FROM counters`)
			fell := one[int64](t, pool, `SELECT count(*) FROM (
				SELECT token <= lag(token) OVER (PARTITION BY name ORDER BY nth) AS fell FROM entries) e WHERE fell`)
			t.Logf("%d tenures; %d tickets, %d of them woken", added.Load(), tickets.Load(), woken.Load())
			if tt.unlocked {
				if counted == added.Load() {
					t.Error("nothing is lost without a lease: this test shows nothing")
				}
				return
			}
			if counted != added.Load() || fell > 0 {
				t.Errorf("%d were counted of %d, and %d tokens were no higher than the one before", counted, added.Load(), fell)
			}
			if woken.Load() == 0 {
				t.Error("nobody was woken by a notification")
			}
			if left := one[int64](t, pool, `SELECT (SELECT count(*) FROM pglock.list_leases()) + (SELECT count(*) FROM pglock.list_waiters())`); left != 0 {
				t.Errorf("%d leases and tickets are left", left)
			}
		})
	}
}

// What an administrator of the first release does, on this schema.
func TestFrozen_Administration(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE accounts (balance int); INSERT INTO accounts VALUES (100)`)
	conn := newConn(t, pool)
	if changed, err := prepareFrozen(t, conn); err != nil {
		t.Fatalf("%s: %v", changed, err)
	}
	exec(t, conn, "protect", "accounts", "accounts/%")
	exec(t, conn, "guard_version", "accounts")
	if pattern := one[string](t, conn, `SELECT pattern FROM pglock.protected_tables`); pattern != "accounts/%" {
		t.Errorf("protected by %q", pattern)
	}
	var tokens []int64
	rows, err := conn.Query(t.Context(), "acquire_all", []string{"accounts/1", "accounts/2"}, time.Hour, newUUID(), "dba", nil)
	if err != nil {
		t.Fatal(err)
	}
	for rows.Next() {
		var granted bool
		var token int64
		if err := rows.Scan(nil, &granted, &token, nil, nil, nil); err != nil || !granted {
			t.Errorf("acquire_all: %t, %v", granted, err)
		}
		tokens = append(tokens, token)
	}
	if rows.Err() != nil || len(tokens) != 2 {
		t.Fatalf("tokens %v: %v", tokens, rows.Err())
	}
	inTx(t, conn, pgx.ReadCommitted, func(tx pgx.Tx) {
		exec(t, tx, "present", "accounts/1", tokens[0])
		exec(t, tx, `UPDATE accounts SET balance = 0`)
		if version := one[int64](t, tx, `SELECT version FROM accounts`); version != 2 {
			t.Errorf("the version is %d, want 2", version)
		}
	})
	inTx(t, conn, pgx.ReadCommitted, func(tx pgx.Tx) {
		exec(t, tx, "fence", "r", int64(17))
		if was := one[int64](t, tx, "reset_fence", "r", int64(16)); was != 17 {
			t.Errorf("reset_fence says %d", was)
		}
		if was := one[int64](t, tx, "forget_fence", "r"); was != 16 {
			t.Errorf("forget_fence says %d", was)
		}
	})
	for i, want := range []string{"released", "idle"} {
		var state string
		if err := conn.QueryRow(t.Context(), "force_release", "accounts/1", tokens[0]).Scan(&state, nil, nil); err != nil || state != want {
			t.Errorf("force_release, %d before: %q, %v", i, state, err)
		}
	}
	if purged := one[int64](t, conn, "purge", time.Duration(0)); purged != 1 {
		t.Errorf("%d names were purged, want 1", purged)
	}
	exec(t, conn, "new_epoch")
	if next := one[int64](t, conn, `SELECT token FROM pglock.acquire('{accounts/1}', '1 h')`); next < tokens[1]+1000 {
		t.Errorf("after a new epoch the token is %d", next)
	}
	exec(t, conn, "unprotect", "accounts")
	exec(t, conn, `UPDATE accounts SET balance = 0`)
}

// newUUID is a claim that nobody had before.
func newUUID() (claim [16]byte) {
	for i := range claim {
		claim[i] = byte(rand.N(256))
	}
	return claim
}

func uuid(b [16]byte) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

func deref(n *int64) int64 {
	if n == nil {
		return 0
	}
	return *n
}
