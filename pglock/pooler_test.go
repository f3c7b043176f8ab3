package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// Leases, guards and fences work through a pooler in transaction mode, which
// gives each transaction another session and hears no notifications, in the
// modes in which pgx prepares no statements by name.
func TestPooler_Leases(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.DSN(t)
			direct := pgtest.PoolOn(t, dsn)
			pool := poolBy(t, pgtest.PgBouncer(t, dsn), func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
			a := newClient(t, pool, pglock.WithOwner("a"))
			b := newClient(t, pool, pglock.WithOwner("b"))
			sharesSessions(t, pool)

			l, err := a.TryAcquire(t.Context(), "pooled", 6*time.Second, pglock.WithMetadata(map[string]string{"k": "v"}))
			if err != nil {
				t.Fatal(err)
			}
			_, err = b.TryAcquire(t.Context(), "pooled", time.Minute)
			if held, ok := errors.AsType[*pglock.HeldError](err); !ok || held.Owner != "a" || held.Token != l.Token() {
				t.Errorf("a try on a held lease says %v", err)
			}
			for range 2 {
				renewed(t, direct, "pooled")
			}
			if err := l.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
				return pglock.Fence(ctx, tx, "pooled", l.Token())
			}); err != nil {
				t.Error(err)
			}

			granted := make(chan *pglock.Lease, 1)
			go func() {
				second, err := b.Acquire(t.Context(), "pooled", time.Minute)
				if err != nil {
					t.Error(err)
				}
				granted <- second
			}()
			waiting(t, direct, "pooled", 1)
			if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
			second := <-granted
			if second == nil || second.Token() <= l.Token() {
				t.Fatalf("after token %d: %+v", l.Token(), second)
			}
			inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
				if err := l.Guard(t.Context(), tx); !errors.Is(err, pglock.ErrLost) {
					t.Errorf("Guard of a lease that was released says %v", err)
				}
			})
			inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
				if err := pglock.Fence(t.Context(), tx, "pooled", second.Token()); err != nil {
					t.Error(err)
				}
				err := pglock.Fence(t.Context(), tx, "pooled", l.Token())
				if fenced, ok := errors.AsType[*pglock.FencedError](err); !ok || fenced.Highest != second.Token() {
					t.Errorf("Fence of the earlier token says %v", err)
				}
			})
			if err := a.WithLease(t.Context(), "run", time.Minute, func(ctx context.Context, l *pglock.Lease) error {
				return l.InTx(ctx, pool, func(context.Context, pgx.Tx) error { return nil })
			}); err != nil {
				t.Error(err)
			}
			if err := errors.Join(a.Close(t.Context()), b.Close(t.Context())); err != nil {
				t.Error(err)
			}
			if n := one[int64](t, direct, heldRows); n != 0 {
				t.Errorf("%d leases are still held", n)
			}
		})
	}
}

// sharesSessions fails the test unless the pooler has fewer sessions than it has
// clients.
func sharesSessions(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	pids := map[int32]bool{}
	const clients = 3
	for range clients {
		pids[one[int32](t, newConn(t, pool), `SELECT pg_backend_pid()`)] = true
	}
	if len(pids) == clients {
		t.Error("each client has a session of its own: this test shows nothing")
	}
}

// More leases than the pooler has sessions are all renewed.
func TestPooler_ManyLeases(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	direct, pool := pgtest.PoolOn(t, dsn), pgtest.PoolOn(t, pgtest.PgBouncer(t, dsn))
	var wg sync.WaitGroup
	for i := range 4 {
		c := newClient(t, pool)
		wg.Go(func() {
			for n := range 10 {
				if _, err := c.TryAcquire(t.Context(), fmt.Sprint(i, "/", n), 6*time.Second); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	until(t, direct, "all renewed", `SELECT count(*) = 40 FROM pglock.leases WHERE expires_at > acquired_at + ttl * 1.5`)
	if n := one[int64](t, direct, heldRows+` AND expires_at > clock_timestamp()`); n != 40 {
		t.Errorf("%d of 40 are held", n)
	}
}

// What lives in a transaction holds through a pooler in transaction mode: row
// locks, advisory locks, time limits and fences.
func TestPooler_Transactions(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.DSN(t)
			pool := poolBy(t, pgtest.PgBouncer(t, dsn), func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
			exec(t, pgtest.PoolOn(t, dsn), `CREATE TABLE accounts (id bigint PRIMARY KEY, balance int); INSERT INTO accounts VALUES (1, 10), (2, 20)`)
			const row, rows = `SELECT balance FROM accounts WHERE id = $1`, `SELECT balance FROM accounts ORDER BY id`
			key := pglock.KeyOf("pooled")
			ctx := t.Context()
			try := func(fn func(pgx.Tx) error) error { return pgx.BeginFunc(ctx, pool, fn) }

			inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
				if err := pglock.LockTx(ctx, tx, key); err != nil {
					t.Fatal(err)
				}
				if got, err := pglock.LockRow(ctx, tx, pglock.ForNoKeyUpdate, pgx.RowTo[int], row, 1); err != nil || got != 10 {
					t.Fatalf("got %d, %v", got, err)
				}
				if err := pglock.Fence(ctx, tx, "pooled", 7); err != nil {
					t.Fatal(err)
				}
				for what, refused := range map[string]func(pgx.Tx) error{
					"TryLockTx": func(other pgx.Tx) error { return pglock.TryLockTx(ctx, other, key) },
					"NoWait": func(other pgx.Tx) error {
						_, err := pglock.LockRow(ctx, other, pglock.ForNoKeyUpdate.NoWait(), pgx.RowTo[int], row, 1)
						return err
					},
					"SetLockTimeout": func(other pgx.Tx) error {
						if err := pglock.SetLockTimeout(ctx, other, 20*time.Millisecond); err != nil {
							return err
						}
						return pglock.LockTx(ctx, other, key)
					},
				} {
					if err := try(refused); !errors.Is(err, pglock.ErrLocked) {
						t.Errorf("%s beside a holder says %v", what, err)
					}
				}
				if err := try(func(other pgx.Tx) error {
					left, err := pglock.LockRows(ctx, other, pglock.ForNoKeyUpdate.SkipLocked(), pgx.RowTo[int], rows)
					if len(left) != 1 || left[0] != 20 {
						t.Errorf("SkipLocked left %v", left)
					}
					return err
				}); err != nil {
					t.Error(err)
				}
			})
			// Rolled back: all of it is free, for whoever comes by whichever backend.
			for range 4 {
				if err := try(func(other pgx.Tx) error {
					_, err := pglock.LockRows(ctx, other, pglock.ForUpdate.NoWait(), pgx.RowTo[int], rows)
					return errors.Join(err, pglock.TryLockTx(ctx, other, key), pglock.Fence(ctx, other, "pooled", 6))
				}); err != nil {
					t.Error(err)
				}
			}
			if err := try(func(tx pgx.Tx) error { return pglock.Fence(ctx, tx, "pooled", 5) }); !errors.Is(err, pglock.ErrFenced) {
				t.Errorf("a lower token says %v", err)
			}
		})
	}
}
