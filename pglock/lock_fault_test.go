package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// TestLock_A12_Restart: a holder knows of the loss when the server crashes, so
// before anybody can be granted the lock by the one that comes up again.
func TestLock_A12_Restart(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t)
	pool := pgtest.PoolOn(t, server.DSN())
	c := newClient(t, pool)
	key := pglock.KeyOf("leader")
	old := lock(t, c, key)
	if err := server.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	err := ended(t, old.Context())
	if !errors.Is(err, pglock.ErrLost) {
		t.Errorf("the crash ended it with %v", err)
	}
	if _, err := c.TryLock(t.Context(), key); err == nil || errors.Is(err, pglock.ErrLocked) {
		t.Errorf("no server: %v", err)
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	l, err := c.TryLock(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	if err := old.Release(context.Background()); !errors.Is(err, pglock.ErrLost) {
		t.Errorf("the old holder's release: %v", err)
	}
	if l.Err() != nil || holder(t, pool, key) == 0 {
		t.Error("the old holder's release freed the new lock")
	}
	release(t, l)
}

// A network that goes silent is noticed within a heartbeat, by every way out.
func TestLock_Silence(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	direct := pgtest.PoolOn(t, dsn)
	wire := pgtest.Proxy(t, dsn)
	c := newClient(t, pgtest.PoolOn(t, wire.DSN()))
	held, released := lock(t, c, pglock.KeyOf("held")), lock(t, c, pglock.KeyOf("released"))
	foreign := newConn(t, direct)
	exec(t, foreign, `SELECT pg_advisory_lock($1)`, pglock.KeyOf("foreign").Int64())
	ctx, cancel := context.WithCancel(t.Context())
	waited := make(chan error, 1)
	go func() {
		_, err := c.Lock(ctx, pglock.KeyOf("foreign"))
		waited <- err
	}()
	until(t, direct, "the waiter in line", waiters(1))

	wire.Silence()
	start := time.Now()
	var g errgroup.Group
	g.Go(func() error {
		err := released.Release(context.Background())
		t.Logf("Release returned after %v: %v", time.Since(start), err)
		if !errors.Is(err, pglock.ErrLost) {
			return fmt.Errorf("Release on a silent network: %w", err)
		}
		return nil
	})
	g.Go(func() error {
		cancel()
		err := <-waited
		t.Logf("Lock returned after %v: %v", time.Since(start), err)
		if !errors.Is(err, pglock.ErrLocked) || !errors.Is(err, context.Canceled) {
			return fmt.Errorf("a wait on a silent network: %w", err)
		}
		return nil
	})
	g.Go(func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err := c.Lock(ctx, pglock.KeyOf("new"))
		t.Logf("a new Lock returned after %v: %v", time.Since(start), err)
		if !errors.Is(err, context.DeadlineExceeded) {
			return fmt.Errorf("a call on a silent network: %w", err)
		}
		return nil
	})
	err := ended(t, held.Context())
	t.Logf("the lock was lost after %v", time.Since(start))
	var lost *pglock.LostError
	if !errors.As(err, &lost) || lost.Cause != pglock.Unreachable || lost.Err == nil {
		t.Errorf("lost with %v", err)
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

// TestLock_A01_Pooler: behind a pooler in transaction mode a session lock
// excludes nobody. It is refused before anything is locked.
func TestLock_A01_Pooler(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	direct := pgtest.PoolOn(t, dsn)
	pooled := pgtest.PoolOn(t, pgtest.PgBouncer(t, dsn))
	key := pglock.KeyOf("leader")
	refused(t, direct, newClient(t, pooled), key, scale(100, 20))

	// The control: two clients hold one lock at once.
	a, b := newConn(t, pooled), newConn(t, pooled)
	const sql = `SELECT pg_try_advisory_lock(1)`
	if !one[bool](t, a, sql) || !one[bool](t, b, sql) {
		t.Error("the pooler kept two clients apart, so that the test shows nothing")
	}

	t.Run("LockTx works", func(t *testing.T) {
		lost := lostUpdates(t, direct, func(ctx context.Context, name string, fn func(context.Context) error) error {
			return pgx.BeginFunc(ctx, pooled, func(tx pgx.Tx) error {
				if err := pglock.LockTx(ctx, tx, pglock.KeyOf(name)); err != nil {
					return err
				}
				return fn(ctx)
			})
		})
		if lost != 0 {
			t.Errorf("%d updates were lost", lost)
		}
	})
	t.Run("TryLockTx works", func(t *testing.T) {
		holder, tx := begin(t, pooled), begin(t, pooled)
		if err := pglock.TryLockTx(t.Context(), holder, key); err != nil {
			t.Fatal(err)
		}
		if err := pglock.TryLockTx(t.Context(), tx, pglock.KeyOf("other"), key); !errors.Is(err, pglock.ErrLocked) {
			t.Error(err)
		}
		usable(t, tx)
	})
}

// TestLock_A02_SessionPooler: a pooler that keeps a backend for a client is
// refused too. Whether it frees what a killed client held is its configuration's
// to say, and nothing that a probe could see.
func TestLock_A02_SessionPooler(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pooled := pgtest.PoolOn(t, pgtest.PgBouncer(t, dsn, "pool_mode = session"))
	refused(t, pgtest.PoolOn(t, dsn), newClient(t, pooled), pglock.KeyOf("leader"), 1)
}

func refused(t *testing.T, direct querier, c *pglock.Client, key pglock.Key, times int) {
	t.Helper()
	for range times {
		for name, call := range map[string]func() error{
			"Lock":     func() error { _, err := c.Lock(t.Context(), key); return err },
			"TryLock":  func() error { _, err := c.TryLock(t.Context(), key); return err },
			"WithLock": func() error { return c.WithLock(t.Context(), key, nil) },
		} {
			if err := call(); err == nil || !strings.Contains(err.Error(), "a pooler stands between") {
				t.Fatalf("%s: %v", name, err)
			}
			if got := one[int](t, direct, advisoryLocks); got != 0 {
				t.Fatalf("%d locks are held after a refused %s", got, name)
			}
		}
	}
}
