package pglock_test

import (
	"context"
	"errors"
	"testing"

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
