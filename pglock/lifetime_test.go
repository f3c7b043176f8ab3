package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// Close ends the context of a function that runs under a lease or a lock, and
// waits for it before it releases.
func TestClose_WaitsForFunctions(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for name, run := range map[string]func(c *pglock.Client, fn func(context.Context) error) error{
		"lease": func(c *pglock.Client, fn func(context.Context) error) error {
			return c.WithLease(t.Context(), "lease", time.Minute, func(ctx context.Context, _ *pglock.Lease) error { return fn(ctx) })
		},
		"elect": func(c *pglock.Client, fn func(context.Context) error) error {
			return c.Elect(t.Context(), "elect", time.Minute, func(ctx context.Context, _ *pglock.Lease) error { return fn(ctx) })
		},
		"lock": func(c *pglock.Client, fn func(context.Context) error) error {
			return c.WithLock(t.Context(), pglock.KeyOf("lock"), fn)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newClient(t, pool)
			other := newClient(t, pool)
			inside := make(chan struct{})
			done := make(chan error, 1)
			go func() {
				done <- run(c, func(ctx context.Context) error {
					close(inside)
					<-ctx.Done()
					if cause := context.Cause(ctx); !errors.Is(cause, pglock.ErrClosed) {
						t.Errorf("the context ended with %v, want ErrClosed", cause)
					}
					var err error
					if name == "lock" {
						_, err = other.TryLock(context.Background(), pglock.KeyOf("lock"))
					} else {
						_, err = other.TryAcquire(context.Background(), name, time.Minute)
					}
					if !errors.Is(err, pglock.ErrLocked) {
						t.Errorf("while the function runs, a try says %v, want ErrLocked", err)
					}
					return nil
				})
			}()
			<-inside
			if err := c.Close(t.Context()); err != nil {
				t.Error(err)
			}
			if err := <-done; name == "elect" && !errors.Is(err, pglock.ErrClosed) || name != "elect" && err != nil {
				t.Errorf("it returned %v", err)
			}
		})
	}
}

// Observe of what can't be a name ends at once and keeps nothing open.
func TestObserve_BadName(t *testing.T) {
	t.Parallel()
	c := pglock.New(pgtest.Pool(t))
	for range c.Observe(t.Context(), "") {
		t.Error("it observed something")
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// A handle that its holder has released says so, and not that somebody else did it.
func TestGuard_AfterItsOwnRelease(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	l := acquire(t, newClient(t, pool), "given back", time.Minute)
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	err := l.InTx(t.Context(), pool, func(context.Context, pgx.Tx) error { return nil })
	if lost, ok := errors.AsType[*pglock.LostError](err); !ok || lost.Cause != pglock.GivenBack || !errors.Is(err, pglock.ErrReleased) {
		t.Errorf("InTx after Release says %v", err)
	} else if want := fmt.Sprintf("pglock: lease \"given back\" with token %d lost: released by its holder", l.Token()); err.Error() != want {
		t.Errorf("InTx after Release says %q, want %q", err, want)
	}
}

// Above READ COMMITTED a tenure may be younger than the snapshot. The
// transaction starts over; the lease is held all the same.
func TestGuard_OlderSnapshot(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	exec(t, pool, `CREATE TABLE protected (n int); SELECT pglock.protect('protected', '%')`)
	for _, level := range levels[1:] {
		for _, name := range []string{"new", "taken before"} {
			name += "/" + string(level)
			if len(name) > 16 {
				if err := acquire(t, c, name, time.Minute).Release(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			conn := newConn(t, pool)
			inTx(t, conn, level, func(tx pgx.Tx) {
				one[int64](t, tx, `SELECT count(*) FROM pg_class`)
				l := acquire(t, c, name, time.Minute)
				sp, err := tx.Begin(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if err := l.Guard(t.Context(), sp); sqlState(err) != "40001" {
					t.Errorf("%s: Guard says %v, want SQLSTATE 40001", name, err)
				}
				if err := sp.Rollback(t.Context()); err != nil {
					t.Fatal(err)
				}
				exec(t, tx, `SELECT set_config('pglock.presented', jsonb_build_array(jsonb_build_array($1::text, $2::bigint))::text, true)`, name, int64(l.Token()))
				if _, err := tx.Exec(t.Context(), `INSERT INTO protected VALUES (1)`); sqlState(err) != "40001" {
					t.Errorf("%s: a protected table says %v, want SQLSTATE 40001", name, err)
				}
				if err := l.Err(); err != nil {
					t.Errorf("%s: the lease says %v", name, err)
				}
			})
		}
	}
}

// What a server was told to commit lazily is committed all the same, or a crash
// would bring a token back.
func TestLease_L1_CommitsReachTheDisk(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `SELECT pglock.create_names('{lazy}')`)
	lazily := func(sql string) string {
		var setting string
		inTx(t, newConn(t, pool), pgx.ReadCommitted, func(tx pgx.Tx) {
			exec(t, tx, `SET LOCAL synchronous_commit = off`)
			exec(t, tx, sql)
			setting = one[string](t, tx, `SHOW synchronous_commit`)
		})
		return setting
	}
	for sql, want := range map[string]string{
		`SELECT pglock.acquire('{lazy}', '1 h')`: "local",
		`SELECT pglock.renew('{lazy}', '{1}')`:   "local",
		`SELECT 1`:                               "off",
	} {
		if got := lazily(sql); got != want {
			t.Errorf("%s commits with synchronous_commit %s, want %s", sql, got, want)
		}
	}
}

// A repeat of enqueue extends the ticket: the client counts from its answer.
func TestQueue_ARepeatExtendsTheTicket(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `SELECT pglock.acquire('{held}', '1 h')`)
	const enqueue = `SELECT ticket FROM pglock.enqueue('held', '1 h', '00000000-0000-4000-8000-000000000001', 'nobody')`
	ticket := one[int64](t, pool, enqueue)
	before := one[time.Time](t, pool, `SELECT expires_at FROM pglock.waiters`)
	if again := one[int64](t, pool, enqueue); again != ticket {
		t.Errorf("the repeat drew ticket %d beside %d", again, ticket)
	}
	if after := one[time.Time](t, pool, `SELECT expires_at FROM pglock.waiters`); !after.After(before) {
		t.Error("the repeat did not extend the ticket")
	}
}

// A grant that its waiter gives back is free at once, although another session
// is just joining the queue and has the row.
func TestQueue_CancelBesideAnEnqueue(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	const claim = "00000000-0000-4000-8000-000000000001"
	exec(t, pool, `SELECT pglock.acquire('{hot}', '1 h', claim => $1::uuid)`, claim)
	joining, cancel := newConn(t, pool), newConn(t, pool)
	exec(t, joining, `BEGIN; SELECT FROM pglock.leases WHERE name = 'hot' FOR NO KEY UPDATE`)
	done := make(chan error, 1)
	go func() {
		_, err := cancel.Exec(context.Background(), `SELECT pglock.cancel('hot', $1::uuid)`, claim)
		done <- err
	}()
	blockedBy(t, pool, joining.PgConn().PID())
	exec(t, joining, `COMMIT`)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if !one[bool](t, pool, `SELECT claim IS NULL FROM pglock.leases WHERE name = 'hot'`) {
		t.Error("the lease is still held")
	}
}
