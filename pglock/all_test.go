package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

func TestTryAcquireAll(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	taken := acquire(t, newClient(t, pool, pglock.WithOwner("other")), "b", time.Hour)
	_, err := c.TryAcquireAll(t.Context(), []string{"c", "b", "a"}, time.Hour)
	if held, ok := errors.AsType[*pglock.HeldError](err); !ok || held.Name != "b" || held.Owner != "other" {
		t.Errorf("with one of three held: %v, want a HeldError of b", err)
	}
	if n := one[int64](t, pool, `SELECT count(*) FROM pglock.leases WHERE claim IS NOT NULL`); n != 1 {
		t.Errorf("%d leases are held after a try that got none, want 1", n)
	}
	if err := taken.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	leases, err := c.TryAcquireAll(t.Context(), []string{"c", "b", "a"}, time.Hour)
	if err != nil || len(leases) != 3 {
		t.Fatalf("%d leases: %v", len(leases), err)
	}
	for i, name := range []string{"c", "b", "a"} {
		if l := leases[i]; l.Name() != name || l.Err() != nil {
			t.Errorf("lease %d is %q: %v, want %q", i, l.Name(), l.Err(), name)
		}
		if err := leases[i].Release(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if _, err := c.TryAcquireAll(t.Context(), []string{"a", "b", "a"}, time.Hour); err == nil {
		t.Error("a name that stands twice was taken")
	}
	if leases, err := c.TryAcquireAll(t.Context(), nil, time.Hour); err != nil || len(leases) != 0 {
		t.Errorf("no names: %v, %v", leases, err)
	}
}

// A try for several that fails writes nothing where one is held.
func TestTryAcquireAll_ALosingTryWritesNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `SELECT pglock.create_names('{a,b,c}'); SELECT pglock.acquire('{b}', '1 h')`)
	conn := newConn(t, pool)
	exec(t, conn, `BEGIN`)
	exec(t, conn, `SELECT pglock.acquire('{a,b,c}', '1 h', whole => true)`)
	if one[bool](t, conn, `SELECT pg_current_xact_id_if_assigned() IS NOT NULL`) {
		t.Error("it wrote")
	}
}

// Callers that want overlapping sets in any order never wait for each other in
// a circle.
func TestAcquireAll_NoDeadlock(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	const workers = 6
	rounds := scale(20, 5)
	inside := map[string]int{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for range workers {
		c := newClient(t, pool)
		wg.Go(func() {
			for range rounds {
				var names []string
				for _, i := range rand.Perm(5)[:3] {
					names = append(names, fmt.Sprint("set/", i))
				}
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				leases, err := c.AcquireAll(ctx, names, time.Minute)
				cancel()
				if err != nil {
					t.Errorf("%v: %v", names, err)
					return
				}
				mu.Lock()
				for i, l := range leases {
					if l.Name() != names[i] {
						t.Errorf("lease %d is %q, want %q", i, l.Name(), names[i])
					}
					if inside[l.Name()]++; inside[l.Name()] > 1 {
						t.Errorf("%q has two holders", l.Name())
					}
				}
				mu.Unlock()
				for _, l := range leases {
					mu.Lock()
					inside[l.Name()]--
					mu.Unlock()
					if err := l.Release(t.Context()); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
}

// What AcquireAll had is free again when it gives up, by one statement.
func TestAcquireAll_GivesBackWhatItHad(t *testing.T) {
	t.Parallel()
	pool, spy := spied(t, pgtest.DSN(t))
	c := newClient(t, pool)
	acquire(t, newClient(t, pool), "z", time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := c.AcquireAll(ctx, []string{"z", "b", "a"}, time.Hour)
		done <- err
	}()
	waiting(t, pool, "z", 1)
	if one[bool](t, pool, `SELECT claim IS NULL FROM pglock.leases WHERE name = 'a'`) {
		t.Error("it waits for z without holding a: not in the order of names")
	}
	cancel()
	if err := <-done; !errors.Is(err, pglock.ErrLocked) || !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want ErrLocked and Canceled", err)
	}
	acquire(t, c, "a", time.Hour)
	acquire(t, c, "b", time.Hour)
	if all, alone := len(spy.heard("pglock.release($1")), len(spy.heard("pglock.release_one($1")); all != 1 || alone != 0 {
		t.Errorf("%d statements for all and %d for one released two leases", all, alone)
	}
}
