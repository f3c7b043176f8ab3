package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

const (
	// A fence that compares before it locks: two look at once, and the lower
	// one may write last.
	fenceEarly = `CREATE FUNCTION mutant.fence(resource text, token bigint) RETURNS void LANGUAGE plpgsql AS $$
		DECLARE
			accepted bigint := (SELECT f.token FROM pglock.fences f WHERE f.resource = fence.resource);
		BEGIN
			IF accepted > fence.token THEN
				RAISE EXCEPTION 'resource "%" is fenced', fence.resource
					USING ERRCODE = 'PW001', DETAIL = format('presented %s, accepted %s', fence.token, accepted);
			END IF;
			INSERT INTO pglock.fences AS f (resource, token) VALUES (fence.resource, fence.token)
			ON CONFLICT ON CONSTRAINT fences_pkey DO UPDATE SET token = EXCLUDED.token;
		END $$`

	// A fence that writes an equal token again.
	fenceWriting = `CREATE FUNCTION mutant.fence(resource text, token bigint) RETURNS void LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO pglock.fences AS f (resource, token) VALUES (fence.resource, fence.token)
			ON CONFLICT ON CONSTRAINT fences_pkey DO UPDATE SET token = EXCLUDED.token WHERE f.token <= EXCLUDED.token;
			IF NOT FOUND THEN
				RAISE EXCEPTION 'resource "%" is fenced', fence.resource USING ERRCODE = 'PW001';
			END IF;
		END $$`
)

// fence is a fence of ours or of a mutant's.
type fence func(ctx context.Context, tx pgx.Tx, resource string, token pglock.Token) error

func mutantFence(ctx context.Context, tx pgx.Tx, resource string, token pglock.Token) error {
	_, err := tx.Exec(ctx, `SELECT mutant.fence($1, $2)`, resource, token)
	return err
}

// accept has a resource accept a token in a transaction of its own.
func accept(t testing.TB, pool *pgxpool.Pool, resource string, token pglock.Token) {
	t.Helper()
	err := pgx.BeginFunc(context.Background(), pool, func(tx pgx.Tx) error {
		return pglock.Fence(context.Background(), tx, resource, token)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// highest returns the token that a resource remembers; 0 if none.
func highest(t testing.TB, db querier, resource string) pglock.Token {
	t.Helper()
	return one[pglock.Token](t, db, `SELECT coalesce((SELECT token FROM pglock.fences WHERE resource = $1), 0)`, resource)
}

// fenced fails the test unless the error says, in every way it can, that a
// token came too late.
func fenced(t testing.TB, err error, resource string, token, highest pglock.Token) {
	t.Helper()
	f, ok := errors.AsType[*pglock.FencedError](err)
	if !ok {
		t.Errorf("Fence said %v, want a FencedError", err)
		return
	}
	if !errors.Is(err, pglock.ErrFenced) || errors.Is(err, pglock.ErrLost) || errors.Is(err, pglock.ErrLocked) || sqlState(err) != "PW001" {
		t.Errorf("Fence said %v (SQLSTATE %s), want ErrFenced with the server's error in it", err, sqlState(err))
	}
	if f.Resource != resource || f.Token != token || f.Highest != highest {
		t.Errorf("it names %q, %d and %d, want %q, %d and %d", f.Resource, f.Token, f.Highest, resource, token, highest)
	}
}

func TestFence_F1_RemembersTheHighest(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE written (token bigint)`)
	for _, level := range levels {
		resource := string(level)
		for _, tt := range []struct {
			what     string
			token    pglock.Token
			rollback bool
			refused  bool
			then     pglock.Token // what it remembers
		}{
			{"first, rolled back", 7, true, false, 0},
			{"first", 5, false, false, 5},
			{"equal", 5, false, false, 5},
			{"lower", 4, false, true, 5},
			{"higher, rolled back", 9, true, false, 5},
			{"between that and the highest", 6, false, false, 6},
			{"higher", 9, false, false, 9},
			{"the one before", 6, false, true, 9},
			{"the lowest", 1, false, true, 9},
			{"the highest there is", math.MaxInt64, false, false, math.MaxInt64},
			{"the one below", math.MaxInt64 - 1, false, true, math.MaxInt64},
		} {
			what := resource + ", " + tt.what
			before := highest(t, pool, resource)
			written := one[int](t, pool, `SELECT count(*) FROM written`)
			inTx(t, pool, level, func(tx pgx.Tx) {
				err := pglock.Fence(t.Context(), tx, resource, tt.token)
				if tt.refused {
					fenced(t, err, resource, tt.token, before)
				} else if err != nil {
					t.Errorf("%s: %v", what, err)
				}
				// A writer that doesn't look at the answer.
				_, _ = tx.Exec(t.Context(), `INSERT INTO written VALUES ($1)`, tt.token)
				if tt.rollback {
					return
				}
				if err := tx.Commit(t.Context()); (err != nil) != tt.refused {
					t.Errorf("%s: COMMIT said %v", what, err)
				}
			})
			if got := highest(t, pool, resource); got != tt.then {
				t.Errorf("%s: it remembers %d, want %d", what, got, tt.then)
			}
			passed := one[int](t, pool, `SELECT count(*) FROM written`) > written
			if want := !tt.refused && !tt.rollback; passed != want {
				t.Errorf("%s: the write is in: %v, want %v", what, passed, want)
			}
		}
	}
}

// An equal token writes no new version of the row; a higher one and the mutant's
// do.
func TestFence_F1_AnEqualTokenWritesNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	mutate(t, pool, fenceWriting)
	accept(t, pool, "r", 5)
	version := func() string {
		return one[string](t, pool, `SELECT ctid::text || ' ' || xmin::text FROM pglock.fences`)
	}
	for _, level := range levels {
		for _, tt := range []struct {
			what   string
			fence  fence
			higher pglock.Token
			writes bool
		}{
			{"equal", pglock.Fence, 0, false},
			{"higher", pglock.Fence, 1, true},
			{"mutant, equal", mutantFence, 0, true},
		} {
			before := version()
			inTx(t, pool, level, func(tx pgx.Tx) {
				if err := tt.fence(t.Context(), tx, "r", highest(t, pool, "r")+tt.higher); err != nil {
					t.Fatal(err)
				}
				// Either lock is held until the transaction ends: an equal one
				// lets its like pass, a higher one nobody.
				for how, free := range map[string]bool{"FOR SHARE": !tt.writes, "FOR NO KEY UPDATE": false} {
					inTx(t, newConn(t, pool), pgx.ReadCommitted, func(other pgx.Tx) {
						_, err := other.Exec(t.Context(), `SELECT FROM pglock.fences WHERE resource = 'r' `+how+` NOWAIT`)
						if (err == nil) != free || err != nil && sqlState(err) != "55P03" {
							t.Errorf("%s, %s: %s beside it said %v", level, tt.what, how, err)
						}
					})
				}
				if err := tx.Commit(t.Context()); err != nil {
					t.Fatal(err)
				}
			})
			if wrote := version() != before; wrote != tt.writes {
				t.Errorf("%s, %s: a new version of the row: %v, want %v", level, tt.what, wrote, tt.writes)
			}
		}
	}
}

// Two at once: the second one waits for the first's transaction where the two
// can't both be right, and is judged by how that one ended.
func TestFence_F1_TwoAtOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	mutate(t, pool, fenceEarly)
	conn, other := newConn(t, pool), newConn(t, pool)
	const (
		refused = "PW001"
		retry   = "40001" // above READ COMMITTED, where the snapshot is older than the wait
	)
	for _, tt := range []struct {
		what          string
		before        pglock.Token // what the resource had accepted; 0: nothing
		first, second pglock.Token
		waits         bool
		committed     string // what the second is told when the first has committed, at READ COMMITTED
		above         string // and above that
	}{
		{"lower than the first, equal to the one before", 5, 9, 5, true, refused, retry},
		{"lower than the first, higher than the one before", 5, 9, 7, true, refused, retry},
		{"both new and the second lower", 0, 9, 7, true, refused, retry},
		{"both new and equal", 0, 9, 9, true, "", retry},
		{"both new and the second higher", 0, 9, 11, true, "", retry},
		{"both higher than the one before and equal", 5, 9, 9, true, "", retry},
		{"the second is higher", 5, 9, 11, true, "", retry},
		{"the first is equal to the one before, the second higher", 5, 5, 9, true, "", ""},
		{"both are equal to the one before", 5, 5, 5, false, "", ""},
		{"lower than the one before, while an equal one is open", 5, 5, 4, false, refused, refused},
		{"lower than the one before, while a higher one is open", 5, 9, 4, true, refused, retry},
	} {
		for _, level := range levels {
			for _, commits := range []bool{true, false} {
				what := fmt.Sprintf("%s, at %s, the first commits: %v", tt.what, level, commits)
				if tt.before > 0 {
					accept(t, pool, what, tt.before)
				}
				want := tt.committed
				switch {
				case !commits && tt.second >= tt.before:
					want = ""
				case !commits:
					want = refused
				case level != pgx.ReadCommitted:
					want = tt.above
				}
				inTx(t, conn, pgx.ReadCommitted, func(first pgx.Tx) {
					if err := pglock.Fence(t.Context(), first, what, tt.first); err != nil {
						t.Fatal(err)
					}
					inTx(t, other, level, func(second pgx.Tx) {
						done := make(chan error, 1)
						go func() { done <- pglock.Fence(context.Background(), second, what, tt.second) }()
						var err error
						if tt.waits {
							blockedBy(t, pool, conn.PgConn().PID())
						} else {
							err = <-done // with the first still open
						}
						if commits {
							err = errors.Join(err, first.Commit(t.Context()))
						} else {
							err = errors.Join(err, first.Rollback(t.Context()))
						}
						if tt.waits {
							err = errors.Join(err, <-done)
						}
						if sqlState(err) != want || (err == nil) != (want == "") {
							t.Errorf("%s: the second was told %v, want SQLSTATE %q", what, err, want)
						}
						if want == refused {
							before := tt.before
							if commits {
								before = max(before, tt.first)
							}
							fenced(t, err, what, tt.second, before)
						}
						if commit := second.Commit(t.Context()); (commit == nil) != (want == "") {
							t.Errorf("%s: the second's COMMIT said %v", what, commit)
						}
					})
				})
				now := tt.before
				if commits {
					now = max(now, tt.first)
				}
				if want == "" {
					now = max(now, tt.second)
				}
				if got := highest(t, pool, what); got != now {
					t.Errorf("%s: it remembers %d, want %d", what, got, now)
				}
			}
		}
	}

	// The mutant has looked before it waits, and takes back what was accepted.
	accept(t, pool, "control", 5)
	inTx(t, conn, pgx.ReadCommitted, func(first pgx.Tx) {
		if err := pglock.Fence(t.Context(), first, "control", 9); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			done <- pgx.BeginFunc(context.Background(), other, func(second pgx.Tx) error {
				return mutantFence(context.Background(), second, "control", 7)
			})
		}()
		blockedBy(t, pool, conn.PgConn().PID())
		if err := errors.Join(first.Commit(t.Context()), <-done); err != nil {
			t.Fatalf("the mutant refuses too: %v: this test shows nothing", err)
		}
	})
	if got := highest(t, pool, "control"); got != 7 {
		t.Errorf("the mutant left %d: this test shows nothing", got)
	}
}

// Fence comes before the read that the write depends on: what was accepted
// before is in what the transaction reads, and what is lower comes too late.
// The control reads first.
func TestFence_F1_WhatWasAcceptedIsInWhatIsRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE counters (name text PRIMARY KEY, n int NOT NULL)`)
	for _, tt := range []struct {
		name       string
		fenceFirst bool
	}{{"fence, then read", true}, {"control: read, then fence", false}} {
		exec(t, pool, `INSERT INTO counters VALUES ($1, 0)`, tt.name)
		accept(t, pool, tt.name, 1)
		old, next := newConn(t, pool), newConn(t, pool)
		add := func(tx pgx.Tx, token pglock.Token, fenceFirst bool) (err error) {
			fence := func() error { return pglock.Fence(context.Background(), tx, tt.name, token) }
			if fenceFirst {
				err = fence()
			}
			var n int
			err = errors.Join(err, tx.QueryRow(context.Background(), `SELECT n FROM counters WHERE name = $1`, tt.name).Scan(&n))
			if !fenceFirst {
				err = errors.Join(err, fence())
			}
			_, updated := tx.Exec(context.Background(), `UPDATE counters SET n = $2 WHERE name = $1`, tt.name, n+1)
			return errors.Join(err, updated)
		}
		inTx(t, old, pgx.ReadCommitted, func(tx pgx.Tx) {
			// The old holder's write is on its way when the next one comes.
			if err := add(tx, 1, true); err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() {
				done <- pgx.BeginFunc(context.Background(), next, func(tx pgx.Tx) error { return add(tx, 2, tt.fenceFirst) })
			}()
			blockedBy(t, pool, old.PgConn().PID())
			if err := errors.Join(tx.Commit(t.Context()), <-done); err != nil {
				t.Fatal(err)
			}
		})
		n := one[int](t, pool, `SELECT n FROM counters WHERE name = $1`, tt.name)
		if tt.fenceFirst && n != 2 {
			t.Errorf("%s: two added one each, and there are %d", tt.name, n)
		}
		if !tt.fenceFirst && n != 1 {
			t.Errorf("%s: there are %d: this test shows nothing", tt.name, n)
		}
	}
}

// Whatever order tokens come in, on however many connections: no transaction
// commits with one below what another had committed with before. The table
// that is protected records it: an entry is numbered while its transaction
// holds the resource.
func TestFence_F1_NoneBelowACommittedOne(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		fence  fence
		mutant string
	}{
		{"Fence", pglock.Fence, ""},
		{"mutant: compares before it locks", mutantFence, fenceEarly},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			if tt.mutant != "" {
				mutate(t, pool, tt.mutant)
			}
			exec(t, pool, `CREATE TABLE entries (nth bigserial PRIMARY KEY, resource text, token bigint)`)
			const workers = 8
			var last atomic.Int64 // the token handed out last; several share one
			var mu sync.Mutex
			outcomes := map[string]int{}
			var g errgroup.Group
			for range workers {
				conn := newConn(t, pool)
				g.Go(func() error {
					for range scale(600, 100) {
						resources := slices.Sorted(slices.Values([]string{"a", "b", "c"}[:1+rand.N(3)]))
						token := pglock.Token(last.Add(rand.N[int64](3)) - rand.N[int64](3))
						outcome, err := enter(conn, tt.fence, resources, max(token, 1))
						if err != nil {
							return err
						}
						mu.Lock()
						outcomes[outcome]++
						mu.Unlock()
					}
					return nil
				})
			}
			if err := g.Wait(); err != nil {
				t.Fatal(err)
			}
			inverted := one[int](t, pool, `SELECT count(*) FROM (
				SELECT token < max(token) OVER (PARTITION BY resource ORDER BY nth) AS low FROM entries) e WHERE low`)
			t.Logf("%v; entries below one before: %d", outcomes, inverted)
			switch {
			case tt.mutant == "" && inverted != 0:
				t.Errorf("%d entries have a token below one that had committed before", inverted)
			case tt.mutant != "" && inverted == 0:
				t.Error("no such entry: this test shows nothing")
			}
			if outcomes["committed"] == 0 || outcomes["fenced"] == 0 {
				t.Errorf("%v: some should have been accepted and some refused", outcomes)
			}
		})
	}
}

// enter fences resources and writes an entry for each, at some level.
func enter(conn *pgx.Conn, fence fence, resources []string, token pglock.Token) (outcome string, err error) {
	ctx := context.Background()
	level := levels[rand.N(len(levels))]
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
		for _, resource := range resources {
			if err := fence(ctx, tx, resource, token); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, `INSERT INTO entries (resource, token) VALUES ($1, $2)`, resource, token); err != nil {
				return err
			}
		}
		return nil
	})
	switch state := sqlState(err); {
	case err == nil:
		return "committed", nil
	case state == "PW001":
		if f, ok := errors.AsType[*pglock.FencedError](err); ok && f.Highest <= f.Token {
			return "", fmt.Errorf("token %d was refused though only %d was accepted", f.Token, f.Highest)
		}
		return "fenced", nil
	case state == "40001" && level != pgx.ReadCommitted:
		return "to be retried", nil
	default:
		return "", err // a deadlock too: they fence in name order
	}
}

// Tokens of other lock services are numbers that go up, as they are (F4).
func TestFence_F4_TokensFromElsewhere(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for resource, tokens := range map[string][]pglock.Token{
		"an etcd revision":      {2, 3, 41_007},
		"a ZooKeeper zxid":      {0x1_0000_0003, 0x2_0000_0001, 0x7fff_ffff_0000_0001},
		"a counter in Redis":    {1, 2, 3},
		"a clock, microseconds": {1_764_374_400_000_000, 1_764_374_400_000_001},
	} {
		for i, token := range tokens {
			accept(t, pool, resource, token)
			if i == 0 {
				continue
			}
			inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
				fenced(t, pglock.Fence(t.Context(), tx, resource, tokens[i-1]), resource, tokens[i-1], token)
			})
		}
	}
	if n := one[int](t, pool, `SELECT count(*) FROM pglock.fences`); n != 4 {
		t.Errorf("4 resources have %d memories", n)
	}
}
