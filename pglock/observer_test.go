package pglock_test

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// notes is an Observer that keeps what it is told, but for renewals.
type notes struct {
	mu     sync.Mutex
	events []pglock.Event
	then   func()
}

func (n *notes) Observe(_ context.Context, event pglock.Event) {
	if _, renewed := event.(pglock.Renewed); !renewed {
		n.mu.Lock()
		n.events = append(n.events, event)
		n.mu.Unlock()
	}
	if n.then != nil {
		n.then()
	}
}

func (n *notes) kinds() (kinds []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, event := range n.events {
		kinds = append(kinds, reflect.TypeOf(event).Name())
	}
	return kinds
}

// Each grant is followed by one Lost or one Released, whichever way it ends.
func TestObserver(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	told := &notes{}
	c := newClient(t, pool, pglock.WithObserver(told))
	expect := func(want ...string) {
		t.Helper()
		if got := told.kinds(); !slices.Equal(got, want) {
			t.Errorf("told %v, want %v", got, want)
		}
		told.mu.Lock()
		told.events = nil
		told.mu.Unlock()
	}

	l := acquire(t, c, "seen", time.Hour)
	expect("Acquired")
	if _, err := c.TryAcquire(t.Context(), "seen", time.Hour); !errors.Is(err, pglock.ErrLocked) {
		t.Fatal(err)
	}
	expect()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := c.Acquire(ctx, "seen", time.Hour)
		done <- err
	}()
	waiting(t, pool, "seen", 1)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	expect("Waited")
	for range 2 {
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	expect("Released")

	l = acquire(t, c, "seen", time.Hour)
	expire(t, pool, "seen")
	if err := l.Release(t.Context()); !errors.Is(err, pglock.ErrLost) {
		t.Fatal(err)
	}
	expect("Acquired", "Lost")

	l = acquire(t, c, "seen", 300*time.Millisecond)
	expire(t, pool, "seen")
	<-l.Context().Done()
	for len(told.kinds()) < 2 { // told just after the context has ended
		one[bool](t, pool, `SELECT true`)
	}
	if err := l.Release(t.Context()); !errors.Is(err, pglock.ErrLost) {
		t.Fatal(err)
	}
	expect("Acquired", "Lost")
}

// An observer that panics breaks nothing.
func TestObserver_Panics(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	renewed := make(chan bool, 100)
	c := newClient(t, pool, pglock.WithObserver(&notes{then: func() { renewed <- true; panic("boom") }}))
	l := acquire(t, c, "panics", time.Second)
	deadline := l.Deadline()
	for !l.Deadline().After(deadline) && l.Err() == nil {
		<-renewed
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}
