package pglock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// Renewals end with Close. Closing the pool that the client was made with ends
// nothing, as documented, and neither does forgetting the handle.
func TestRenewal_L24_EndsWithTheClient(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	direct := pgtest.PoolOn(t, dsn)
	mine, spy := spied(t, dsn)
	c := pglock.New(mine)
	acquire(t, c, "forgotten", 6*time.Second)
	mine.Close()
	renewed(t, direct, "forgotten")
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	n := len(spy.heard("pglock.renew"))
	l, err := newClient(t, direct).Acquire(t.Context(), "forgotten", 6*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	renewed(t, direct, l.Name())
	if more := len(spy.heard("pglock.renew")) - n; more != 0 {
		t.Errorf("%d renewals after Close", more)
	}
}

// User code that has taken every connection of its pool starves no renewal.
func TestRenewal_L43_AnExhaustedPool(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	direct := pgtest.PoolOn(t, dsn)
	mine := poolBy(t, dsn, func(config *pgxpool.Config) { config.MaxConns = 1 })
	c := newClient(t, mine)
	tx, err := mine.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	one[bool](t, tx, `SELECT true`)
	l := acquire(t, c, "reserved", 6*time.Second)
	for range 2 {
		renewed(t, direct, "reserved")
	}
	if err := l.Guard(t.Context(), tx); err != nil {
		t.Error(err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Error(err)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// A tenure that expired and that somebody else had since is not extended, and
// its holder is told that it was taken (L10, L19 of the hazards).
func TestRenewal_L19_NoRenewalAfterATakeover(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	a, b := newClient(t, pool), newClient(t, pool)
	l := acquire(t, a, "over", 3*time.Second)
	expire(t, pool, "over")
	if err := acquire(t, b, "over", time.Minute).Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	row := func() string {
		return one[string](t, pool, `SELECT l::text FROM pglock.leases l WHERE name = 'over'`)
	}
	before := row()
	for what, err := range map[string]error{
		"the context": ended(t, l.Context()), "Err": l.Err(), "Release": l.Release(t.Context()), "Release again": l.Release(t.Context()),
	} {
		if lost, ok := errors.AsType[*pglock.LostError](err); !ok || lost.Cause != pglock.Taken {
			t.Errorf("%s says %v, want a loss: taken", what, err)
		}
	}
	if after := row(); after != before {
		t.Errorf("the row was %s and is %s", before, after)
	}
}

// What goes wrong with a lease that a client waits for costs it none that it
// holds.
func TestRenewal_WaitingCostsNoLease(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		what  string
		spoil func(*testing.T, *pgxpool.Pool)
	}{
		{"token regression", func(t *testing.T, pool *pgxpool.Pool) {
			exec(t, pool, `SELECT setval('pglock.leases_token_seq', 1)`)
		}},
		{"a ticket that somebody has locked", func(t *testing.T, pool *pgxpool.Pool) {
			tx, err := newConn(t, pool).Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			exec(t, tx, `SELECT FROM pglock.waiters FOR UPDATE`)
		}},
	} {
		t.Run(tt.what, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			other, c := newClient(t, pool), newClient(t, pool)
			exec(t, pool, `SELECT setval('pglock.leases_token_seq', 1000)`)
			acquire(t, other, "theirs", time.Hour)
			mine := acquire(t, c, "mine", 1500*time.Millisecond)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { _, err := c.Acquire(ctx, "theirs", 1500*time.Millisecond); done <- err }()
			waiting(t, pool, "theirs", 1)
			tt.spoil(t, pool)
			expire(t, pool, "theirs")
			until(t, pool, "some time", `SELECT clock_timestamp() > acquired_at + 4 * ttl FROM pglock.leases WHERE name = 'mine'`)
			if err := mine.Err(); err != nil {
				t.Errorf("lost: %v", err)
			}
			cancel()
			if err := <-done; err == nil {
				t.Error("the wait went well: this test shows nothing")
			}
		})
	}
}
