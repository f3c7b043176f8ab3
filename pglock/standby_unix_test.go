//go:build unix

package pglock_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgserver"
	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
	"github.com/pawl-go/pawl/pglock"
)

// While the synchronous standby is away a commit waits for it, and a cancelled
// wait comes back as success with a warning. It is no grant: neither to whoever
// acquired, nor to the waiter to whom a release handed the lease on.
func TestLease_R09_CancelledWaitForTheStandbyIsNoGrant(t *testing.T) {
	t.Parallel()
	primary := pgtest.Server(t, pgserver.Fast(), pgserver.With("wal_level", "replica"), pgserver.With("max_wal_senders", "8"))
	pool := pgtest.PoolOn(t, primary.DSN())
	if err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	follower := newStandby(t, primary, "follower")
	until(t, pool, "the standby", `SELECT EXISTS (SELECT FROM pg_stat_replication WHERE state = 'streaming')`)
	exec(t, pool, `ALTER SYSTEM SET synchronous_standby_names = '*'`)
	exec(t, pool, `SELECT pg_reload_conf()`)
	until(t, pool, "synchronous replication", `SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sync_state = 'sync')`)
	admin := localOnly(t, pool) // whose own commits wait for nobody
	c := newClient(t, reopen(t, pool))
	holder := acquire(t, c, "handed on", time.Hour)
	type outcome struct {
		lease *pglock.Lease
		err   error
	}
	call := func(name string) <-chan outcome {
		done := make(chan outcome, 1)
		go func() {
			l, err := c.Acquire(context.Background(), name, time.Hour)
			done <- outcome{l, err}
		}()
		return done
	}
	waiter := call("handed on")
	waiting(t, admin, "handed on", 1)
	// refused cancels whatever waits for the standby until the call returns.
	refused := func(what string, done <-chan outcome) {
		t.Helper()
		for end := time.Now().Add(limit); time.Now().Before(end); {
			exec(t, admin, `SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`)
			select {
			case o := <-done:
				if o.err == nil {
					t.Errorf("%s: token %d was granted although no standby has it", what, o.lease.Token())
				}
				t.Logf("%s: %v", what, o.err)
				return
			default:
			}
		}
		t.Errorf("%s: the call never returned", what)
	}

	if err := follower.stop(); err != nil {
		t.Log(err)
	}
	until(t, admin, "the standby gone", `SELECT NOT EXISTS (SELECT FROM pg_stat_replication)`)
	refused("acquired", call("tried"))
	released := make(chan outcome, 1)
	go func() { released <- outcome{err: holder.Release(context.Background())} }()
	refused("handed on", waiter)
	refused("released", released)
	exec(t, admin, `ALTER SYSTEM RESET synchronous_standby_names`)
	exec(t, admin, `SELECT pg_reload_conf()`)
}

// localOnly returns a pool whose commits wait for no standby.
func localOnly(t *testing.T, pool *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	config := pool.Config()
	config.ConnConfig.RuntimeParams["synchronous_commit"] = "local"
	local, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(local.Close)
	return local
}
