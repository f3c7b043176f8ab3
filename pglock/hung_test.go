package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// A connection that goes silent is given up in time for a renewal on another.
func TestFault_L05_AHungConnectionIsReplaced(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	direct := pgtest.PoolOn(t, dsn)
	c, silence := silenced(t, dsn)
	l := acquire(t, c, "held", 3*time.Second)
	renewed(t, direct, "held")
	silence()
	for range 4 {
		renewed(t, direct, "held")
	}
	if l.Err() != nil {
		t.Errorf("lost: %v", l.Err())
	}
}

// A call whose connection has gone silent goes over another, in seconds, also where
// its context sets no time. The control is a query by hand, which waits on.
func TestFault_ACallThatNobodyAnswers(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(context.Context, *pglock.Client, *pglock.Lease) error{
		"TryAcquire": func(ctx context.Context, c *pglock.Client, _ *pglock.Lease) error {
			_, err := c.TryAcquire(ctx, "other", time.Hour)
			return err
		},
		"TryAcquireAll": func(ctx context.Context, c *pglock.Client, _ *pglock.Lease) error {
			_, err := c.TryAcquireAll(ctx, []string{"a", "b"}, time.Hour)
			return err
		},
		"Acquire": func(ctx context.Context, c *pglock.Client, _ *pglock.Lease) error {
			_, err := c.Acquire(ctx, "other", time.Hour)
			return err
		},
		"Release": func(ctx context.Context, _ *pglock.Client, l *pglock.Lease) error { return l.Release(ctx) },
		"Observe": func(ctx context.Context, c *pglock.Client, _ *pglock.Lease) error {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			<-c.Observe(ctx, "held")
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.DSN(t)
			c, silence := silenced(t, dsn)
			wire := pgtest.Proxy(t, dsn)
			hand, err := pgx.Connect(t.Context(), wire.DSN())
			if err != nil {
				t.Fatal(err)
			}
			l := acquire(t, c, "held", time.Hour)
			silence()
			wire.Silence()
			waits := make(chan error, 1)
			ctx, cancel := context.WithCancel(context.Background())
			go func() {
				_, err := hand.Exec(ctx, "SELECT 1")
				waits <- err
			}()
			if err := call(context.Background(), c, l); err != nil {
				t.Error(err)
			}
			cancel()
			if err := <-waits; !errors.Is(err, context.Canceled) {
				t.Errorf("the query by hand ended with %v", err)
			}
		})
	}
}

// Where nothing answers on any connection a call ends all the same, and says why.
func TestFault_NothingAnswers(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(*pglock.Client, *pglock.Lease) error{
		"Acquire": func(c *pglock.Client, _ *pglock.Lease) error {
			_, err := c.Acquire(context.Background(), "other", time.Hour)
			return err
		},
		"Release": func(_ *pglock.Client, l *pglock.Lease) error {
			err := l.Release(context.Background())
			if lost, ok := errors.AsType[*pglock.LostError](err); !ok || lost.Cause != pglock.Unreachable {
				return fmt.Errorf("%v is not that nobody could be reached", err)
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			err := call(cutOff(t))
			var timeout interface{ Timeout() bool }
			if !errors.As(err, &timeout) || !timeout.Timeout() || errors.Is(err, pglock.ErrLocked) || errors.Is(err, context.Canceled) {
				t.Errorf("got %v, want that nobody answered", err)
			}
		})
	}
}

// A server that came back leaves a client with connections that are dead, as many as
// it has. One dead connection is enough to tell.
func TestFault_EveryConnectionIsDead(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, poolBy(t, pool.Config().ConnString(), func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["application_name"] = "mine"
	}))
	l := acquire(t, c, "held", time.Hour)
	const mine = ` FROM pg_stat_activity WHERE application_name = 'mine' AND datname = current_database()`
	for round := range scale(10, 3) {
		// As many calls at a time as there are connections: they all wait for the table.
		table := newConn(t, pool)
		exec(t, table, `BEGIN; LOCK TABLE pglock.leases IN ACCESS EXCLUSIVE MODE`)
		looks := make(chan error)
		for range 4 {
			go func() {
				_, err := c.Leases(t.Context())
				looks <- err
			}()
		}
		until(t, pool, "four connections wait", `SELECT count(*) >= 4`+mine+` AND wait_event_type = 'Lock'`)
		exec(t, table, `COMMIT`)
		for range 4 {
			if err := <-looks; err != nil {
				t.Fatal(err)
			}
		}
		exec(t, pool, `SELECT pg_terminate_backend(pid)`+mine)
		until(t, pool, "them gone", `SELECT count(*) = 0`+mine)
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		l = acquire(t, c, fmt.Sprint("held/", round), time.Hour)
	}
}

// TryAcquireAll gives back what it may have been granted, all at the same time, when
// its context ends: one after the other they would take a second each.
func TestFault_ManyGivenUp(t *testing.T) {
	t.Parallel()
	c, _ := cutOff(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	begun := time.Now()
	if _, err := c.TryAcquireAll(ctx, numbered("n", 60), time.Hour); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the context's end", err)
	}
	if took := time.Since(begun); took > 30*time.Second {
		t.Errorf("it took %v", took)
	}
}

// cutOff returns a client that holds a lease and that nothing answers any more, until
// the test ends and it releases the lease, if it still has it.
func cutOff(t *testing.T) (*pglock.Client, *pglock.Lease) {
	t.Helper()
	wire := pgtest.Proxy(t, pgtest.DSN(t))
	c := newClient(t, pgtest.PoolOn(t, wire.DSN()))
	l := acquire(t, c, "held", time.Hour)
	wire.Silence()
	t.Cleanup(wire.Heal)
	return c, l
}

// silenced returns a client, and a function after which nothing comes through its
// connections, but through those that it makes then.
func silenced(t *testing.T, dsn string) (c *pglock.Client, silence func()) {
	t.Helper()
	wire := pgtest.Proxy(t, dsn)
	far, err := pgx.ParseConfig(wire.DSN())
	if err != nil {
		t.Fatal(err)
	}
	var broken atomic.Bool
	return newClient(t, poolBy(t, dsn, func(config *pgxpool.Config) {
			config.BeforeConnect = func(_ context.Context, conn *pgx.ConnConfig) error {
				if !broken.Load() {
					conn.Host, conn.Port = far.Host, far.Port
				}
				return nil
			}
		})), func() {
			broken.Store(true)
			wire.Silence()
		}
}
