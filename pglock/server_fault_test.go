package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgserver"
	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
	"github.com/pawl-go/pawl/pglock"
)

// ownServer returns a server of the test's own that has the migrations, and a
// pool on it.
func ownServer(t *testing.T) (*pgserver.Server, *pgxpool.Pool) {
	t.Helper()
	server := pgtest.Server(t)
	pool := pgtest.PoolOn(t, server.DSN())
	if err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	return server, pool
}

// A server that crashes and comes back within the TTL costs no lease, and tokens
// go on rising.
func TestServer_BackWithinTheTTL(t *testing.T) {
	t.Parallel()
	server, pool := ownServer(t)
	c := newClient(t, pool)
	l := acquire(t, c, "kept", 12*time.Second)
	if err := server.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if other := acquire(t, c, "other", time.Minute); other.Token() <= l.Token() {
		t.Errorf("token %d after the crash, want more than %d", other.Token(), l.Token())
	}
	renewed(t, newConn(t, pool), "kept")
	if l.Err() != nil {
		t.Errorf("lost: %v", l.Err())
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// One that stays away costs it at the deadline. Calls say that it can't be
// reached, Close ends in bounded time and says what it could not release, and
// after the restart the client goes on.
func TestServer_Away(t *testing.T) {
	t.Parallel()
	server, pool := ownServer(t)
	c, closing := newClient(t, pool), pglock.New(pool)
	l := acquire(t, c, "lost", 1500*time.Millisecond)
	acquire(t, closing, "closed", time.Hour)
	lost := lossOf(l)
	if err := server.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{
		func() error { _, err := c.TryAcquire(t.Context(), "other", time.Minute); return err }(),
		func() error { _, err := c.Acquire(t.Context(), "other", time.Minute); return err }(),
	} {
		if err == nil || errors.Is(err, pglock.ErrLocked) || errors.Is(err, pglock.ErrNoSchema) {
			t.Errorf("without a server a call says %v", err)
		}
	}
	begun := time.Now()
	if err := closing.Close(t.Context()); !unreachable(err) {
		t.Errorf("Close says %v, want that a lease is lost: %s", err, pglock.Unreachable)
	}
	if took := time.Since(begun); took > limit {
		t.Errorf("Close took %v", took)
	}
	if at := <-lost; at.Before(l.Deadline()) {
		t.Errorf("lost %v before its deadline", l.Deadline().Sub(at))
	}
	if !unreachable(l.Err()) {
		t.Errorf("lost by %v, want %s", l.Err(), pglock.Unreachable)
	}
	if err := l.Release(t.Context()); !errors.Is(err, pglock.ErrLost) {
		t.Errorf("Release after the loss says %v", err)
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	again, err := c.Acquire(t.Context(), "lost", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if again.Token() <= l.Token() {
		t.Errorf("token %d after the restart, want more than %d", again.Token(), l.Token())
	}
}

// A server that turns read-only under a live client is named, leases are lost
// within their TTL, no connection sticks to it, and once it takes writes again
// the same client works.
func TestServer_L42_ReadOnly(t *testing.T) {
	t.Parallel()
	server, pool := ownServer(t)
	mine := named(t, server.DSN(), "readonly")
	c := newClient(t, mine)
	l := acquire(t, c, "before", 1500*time.Millisecond)
	lost := lossOf(l)
	begun := time.Now()
	exec(t, pool, `ALTER SYSTEM SET default_transaction_read_only = on`)
	exec(t, pool, `SELECT pg_reload_conf()`)
	until(t, newConn(t, pool), "the setting", `SELECT current_setting('default_transaction_read_only')::bool`)
	for range 3 {
		_, err := c.TryAcquire(t.Context(), "meanwhile", time.Minute)
		if err == nil || errors.Is(err, pglock.ErrLocked) || !strings.Contains(err.Error(), "default_transaction_read_only") {
			t.Errorf("TryAcquire says %v, want what is wrong with the server", err)
		}
	}
	at := <-lost
	if took := at.Sub(begun); took > limit/2 {
		t.Errorf("it took %v to lose a lease of 1.5 s", took)
	}
	if err := l.Err(); !unreachable(err) || !strings.Contains(err.Error(), "default_transaction_read_only") {
		t.Errorf("lost by %v", err)
	}
	gone(t, pool, "readonly")
	exec(t, pool, `ALTER SYSTEM RESET default_transaction_read_only`)
	exec(t, pool, `SELECT pg_reload_conf()`)
	until(t, newConn(t, pool), "the setting", `SELECT NOT current_setting('default_transaction_read_only')::bool`)
	again, err := c.Acquire(t.Context(), "before", time.Minute)
	if err != nil {
		t.Fatalf("once it takes writes again: %v", err)
	}
	if again.Token() <= l.Token() {
		t.Errorf("token %d after %d", again.Token(), l.Token())
	}
}

// Renewals that raise an error, whatever it is, lose the lease at its deadline
// and not before; and the error is in the loss.
func TestServer_L48_RenewalsThatRaise(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ what, spoil, state string }{
		{"renamed", `ALTER FUNCTION pglock.renew(text[], bigint[]) RENAME TO renews`, "42883"},
		{"no privilege", `REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock FROM ROLE`, "42501"},
		{"its own error", `ALTER TABLE pglock.leases ADD CHECK (expires_at < 'today') NOT VALID`, "23514"},
	} {
		t.Run(tt.what, func(t *testing.T) {
			t.Parallel()
			owner := pgtest.Pool(t)
			pool := asRole(t, owner, `GRANT USAGE ON SCHEMA pglock TO ROLE; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock TO ROLE`)
			role := one[string](t, pool, `SELECT session_user::text`)
			l := acquire(t, newClient(t, pool), "failing", 3*time.Second)
			lost := lossOf(l)
			exec(t, owner, strings.ReplaceAll(tt.spoil, "ROLE", role))
			at := <-lost
			if at.Before(l.Deadline()) {
				t.Errorf("lost %v before its deadline", l.Deadline().Sub(at))
			}
			if late := at.Sub(l.Deadline()); late > limit/4 {
				t.Errorf("lost %v after its deadline", late)
			}
			err := l.Err()
			cut := errors.Is(err, context.DeadlineExceeded) // the last renewal, on a busy machine
			if !unreachable(err) || sqlState(err) != tt.state && !cut {
				t.Errorf("lost by %v, want SQLSTATE %s", err, tt.state)
			}
		})
	}
}

// Of two hosts in the DSN, one that goes away costs a reconnect and no lease.
func TestServer_L31_OneOfTwoHosts(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	direct, first, second := pgtest.PoolOn(t, dsn), pgtest.Proxy(t, dsn), pgtest.Proxy(t, dsn)
	mine := poolBy(t, dsn, func(config *pgxpool.Config) {
		var hosts []*pgconn.FallbackConfig
		for _, wire := range []*pgtest.Wire{first, second} {
			through, err := pgx.ParseConfig(wire.DSN())
			if err != nil {
				t.Fatal(err)
			}
			hosts = append(hosts, &pgconn.FallbackConfig{Host: through.Host, Port: through.Port})
		}
		config.ConnConfig.Host, config.ConnConfig.Port = hosts[0].Host, hosts[0].Port
		config.ConnConfig.Fallbacks = hosts[1:]
		config.ConnConfig.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsReadWrite
	})
	c := newClient(t, mine)
	l := acquire(t, c, "kept", 6*time.Second)
	for _, wire := range []*pgtest.Wire{first, second} {
		renewed(t, direct, "kept")
		wire.Cut()
		renewed(t, direct, "kept")
		acquire(t, c, fmt.Sprint("meanwhile ", wire.DSN()), time.Minute)
		wire.Heal()
	}
	if l.Err() != nil {
		t.Errorf("lost: %v", l.Err())
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}
