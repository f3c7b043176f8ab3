package pglock_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// with runs fn under some lock on name.
type with func(ctx context.Context, name string, fn func(context.Context) error) error

// lostUpdates is the contract of everything that claims exclusion: workers add
// to one counter by a read and a later write, each in a transaction of its own
// and on another connection than the lock's. It returns how many of the
// additions are not in the counter.
func lostUpdates(t *testing.T, pool *pgxpool.Pool, with with) (lost int) {
	t.Helper()
	const workers = 8
	rounds := scale(40, 10)
	pool = roomy(t, pool, workers)
	exec(t, pool, `CREATE TABLE IF NOT EXISTS counters (name text PRIMARY KEY, n int NOT NULL)`)
	exec(t, pool, `INSERT INTO counters VALUES ($1, 0) ON CONFLICT (name) DO UPDATE SET n = 0`, t.Name())
	g, ctx := errgroup.WithContext(t.Context())
	for range workers {
		g.Go(func() error {
			for range rounds {
				if err := with(ctx, t.Name(), func(ctx context.Context) error {
					var n int
					if err := pool.QueryRow(ctx, `SELECT n FROM counters WHERE name = $1`, t.Name()).Scan(&n); err != nil {
						return err
					}
					_, err := pool.Exec(ctx, `UPDATE counters SET n = $2 WHERE name = $1`, t.Name(), n+1)
					return err
				}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	return workers*rounds - one[int](t, pool, `SELECT n FROM counters WHERE name = $1`, t.Name())
}

// roomy returns a pool on the same database with room for n.
func roomy(t *testing.T, pool *pgxpool.Pool, n int) *pgxpool.Pool {
	t.Helper()
	config := pool.Config()
	config.MaxConns = int32(n)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func TestExclusion(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	locks := roomy(t, pool, 8)
	exec(t, pool, `CREATE TABLE accounts (name text PRIMARY KEY)`)
	exec(t, pool, `INSERT INTO accounts VALUES ('one')`)
	client, other := newClient(t, pool), newClient(t, pool)
	polling := newClient(t, pool, pglock.WithPolling())
	var turn atomic.Int64
	row := func(how pglock.RowLock) with {
		return func(ctx context.Context, _ string, fn func(context.Context) error) error {
			return pgx.BeginFunc(ctx, locks, func(tx pgx.Tx) error {
				if _, err := pglock.LockRow(ctx, tx, how, pgx.RowTo[string], `SELECT name FROM accounts`); err != nil {
					return err
				}
				return fn(ctx)
			})
		}
	}
	advisory := func(form func(pglock.Key) pglock.Key) with {
		return func(ctx context.Context, name string, fn func(context.Context) error) error {
			return pgx.BeginFunc(ctx, locks, func(tx pgx.Tx) error {
				if err := pglock.LockTx(ctx, tx, form(pglock.KeyOf(name))); err != nil {
					return err
				}
				return fn(ctx)
			})
		}
	}
	exclusive := func(k pglock.Key) pglock.Key { return k }
	for _, tt := range []struct {
		name     string
		with     with
		excludes bool
	}{
		{"LockRow ForNoKeyUpdate", row(pglock.ForNoKeyUpdate), true},
		{"LockRow ForUpdate", row(pglock.ForUpdate), true},
		{"LockTx", advisory(exclusive), true},
		{"WithLock", func(ctx context.Context, name string, fn func(context.Context) error) error {
			return client.WithLock(ctx, pglock.KeyOf(name), fn)
		}, true},
		{"WithLock of two clients", func(ctx context.Context, name string, fn func(context.Context) error) error {
			c := client
			if turn.Add(1)%2 == 0 {
				c = other
			}
			return c.WithLock(ctx, pglock.KeyOf(name), fn)
		}, true},
		{"WithLock of a client that polls and one that waits", func(ctx context.Context, name string, fn func(context.Context) error) error {
			c := client
			if turn.Add(1)%2 == 0 {
				c = polling
			}
			return c.WithLock(ctx, pglock.KeyOf(name), fn)
		}, true},
		{"LockAll", func(ctx context.Context, name string, fn func(context.Context) error) (err error) {
			locks, err := client.LockAll(ctx, pglock.KeyOf(name), pglock.KeyOf(name+"/other"))
			if err != nil {
				return err
			}
			defer func() {
				for _, l := range locks {
					err = errors.Join(err, l.Release(ctx))
				}
			}()
			return fn(ctx)
		}, true},
		{"WithLock Shared", func(ctx context.Context, name string, fn func(context.Context) error) error {
			return client.WithLock(ctx, pglock.KeyOf(name).Shared(), fn)
		}, false},
		{"nothing", func(ctx context.Context, _ string, fn func(context.Context) error) error { return fn(ctx) }, false},
		{"LockRow ForShare", row(pglock.ForShare), false},
		{"LockTx Shared", advisory(pglock.Key.Shared), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			lost := lostUpdates(t, pool, tt.with)
			// Without a lock the workers may by chance have come one by one.
			for try := 0; !tt.excludes && lost == 0 && try < 20; try++ {
				lost = lostUpdates(t, pool, tt.with)
			}
			switch {
			case tt.excludes && lost != 0:
				t.Errorf("%d updates were lost", lost)
			case !tt.excludes && lost == 0:
				t.Error("no update was lost, so that the test shows nothing")
			}
		})
	}
}
