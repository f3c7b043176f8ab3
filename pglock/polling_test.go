package pglock_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pawl-go/pawl/internal/pgserver"
	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// The holder of a lock builds an index concurrently, which waits for every
// snapshot there is. Who polls for the lock has none; who waits in the server
// does, and then neither goes on.
func TestLock_M01_WaitersLetAnIndexBeBuilt(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		opts []pglock.Option
		wait string // that three wait
		ok   bool
	}{
		"polling":                        {[]pglock.Option{pglock.WithPolling()}, `SELECT 3 = (` + tried + `)`, true},
		"control: waiting in the server": {nil, waiters(3), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			exec(t, pool, `CREATE TABLE grown AS SELECT generate_series(1, 1000) AS n`)
			key := pglock.KeyOf("schema")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			waited := make(chan error, 3)
			err := newClient(t, pool).WithLock(t.Context(), key, func(context.Context) error {
				for range cap(waited) {
					c := newClient(t, named(t, pool.Config().ConnString(), "polling"), tt.opts...)
					go func() { waited <- c.WithLock(ctx, key, func(context.Context) error { return nil }) }()
				}
				until(t, pool, "the waiters", tt.wait)
				built := make(chan error, 1)
				go func() {
					_, err := pool.Exec(ctx, `CREATE INDEX CONCURRENTLY grown_n ON grown (n)`)
					built <- err
				}()
				if tt.ok {
					return <-built
				}
				until(t, pool, "the build wait for a waiter", `SELECT EXISTS (SELECT FROM pg_stat_activity
					WHERE query LIKE 'CREATE INDEX%' AND datname = current_database()
					  AND pg_blocking_pids(pid) && ARRAY(SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted))`)
				cancel()
				<-built
				return nil
			})
			for range cap(waited) {
				if failed := <-waited; tt.ok {
					err = errors.Join(err, failed)
				}
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// tried counts the sessions that have been refused a lock and wait for nothing.
const tried = `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'polling'
	AND query LIKE 'SELECT pg_try_advisory_lock%' AND state = 'idle'`

// A wait by polling ends like any other, and leaves nothing.
func TestLock_PollingGivenUp(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := pglock.New(named(t, pool.Config().ConnString(), "polling"), pglock.WithPolling())
	foreign := newConn(t, pool)
	key := pglock.KeyOf("foreign")
	exec(t, foreign, `SELECT pg_advisory_lock($1)`, key.Int64())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 2)
	go func() { _, err := c.Lock(ctx, key); done <- err }()
	until(t, pool, "a try", `SELECT 1 = (`+tried+`)`)
	cancel()
	if err := <-done; !errors.Is(err, pglock.ErrLocked) || !errors.Is(err, context.Canceled) {
		t.Errorf("a wait that was given up: %v", err)
	}
	own := lock(t, c, pglock.KeyOf("own"))
	go func() { _, err := c.Lock(t.Context(), key); done <- err }()
	go func() { _, err := c.Lock(t.Context(), own.Key()); done <- err }()
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := <-done; !errors.Is(err, pglock.ErrClosed) {
			t.Errorf("a wait beside Close: %v", err)
		}
	}
	if got := one[int](t, pool, advisoryLocks); got != 1 {
		t.Errorf("%d locks are held, want the stranger's", got)
	}
	gone(t, pool, "polling")
}

// More calls wait than the server has connections: those that get none poll.
func TestLock_MoreWaitersThanConnections(t *testing.T) {
	t.Parallel()
	const calls = 40
	server := pgtest.Server(t, pgserver.With("max_connections", "12"))
	pool := pgtest.PoolOn(t, server.DSN())
	conn := newConn(t, pool)
	c := newClient(t, pool)
	key := pglock.KeyOf("wanted")
	held := lock(t, c, key)
	inside := 0
	done := make(chan error, calls)
	for range calls {
		go func() {
			done <- c.WithLock(t.Context(), key, func(context.Context) error { inside++; return nil })
		}()
	}
	// The control: the server has no connection left.
	until(t, conn, "the server full", `SELECT count(*) >= 8 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted`)
	for {
		conn, err := pgconn.Connect(t.Context(), server.DSN())
		if sqlState(err) == "53300" {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.Close(t.Context())
	}
	release(t, held)
	for range calls {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if inside != calls {
		t.Errorf("%d of %d calls were granted", inside, calls)
	}
}
