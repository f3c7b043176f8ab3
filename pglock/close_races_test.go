package pglock_test

import (
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// Acquires, releases and Close at once: nothing stays held, and nobody gets a
// handle that nobody renews.
func TestClose_AmongOtherCalls(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for range scale(20, 5) {
		c := pglock.New(pool)
		under := make(chan struct{})
		begin := sync.OnceFunc(func() { close(under) })
		var wg sync.WaitGroup
		for i := range 4 {
			wg.Go(func() {
				for n := 0; ; n++ {
					l, err := c.TryAcquire(t.Context(), fmt.Sprint(i, "/", n), time.Hour)
					if err != nil {
						if !errors.Is(err, pglock.ErrClosed) {
							t.Errorf("TryAcquire beside Close says %v", err)
						}
						return
					}
					if n == 3 {
						begin()
					}
					if n%2 == 0 {
						if err := l.Release(t.Context()); err != nil {
							t.Errorf("Release beside Close says %v", err)
						}
					}
				}
			})
		}
		for range 2 {
			wg.Go(func() {
				<-under
				if err := c.Close(t.Context()); err != nil {
					t.Errorf("Close says %v", err)
				}
			})
		}
		wg.Wait()
		// An acquire that Close cut short may have left a grant that nobody got.
		if n := one[int64](t, pool, heldRows); n > 4 {
			t.Errorf("%d leases are still held", n)
		}
		exec(t, pool, `DELETE FROM pglock.leases`)
	}
}

// A release that has begun when Close does is part of it.
func TestClose_WaitsForReleases(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for range scale(50, 10) {
		c := pglock.New(pool)
		l := acquire(t, c, "first", time.Hour)
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := l.Release(t.Context()); err != nil {
				t.Errorf("Release beside Close says %v", err)
			}
		})
		wg.Go(func() {
			if err := c.Close(t.Context()); err != nil {
				t.Errorf("Close says %v", err)
			}
			if n := one[int64](t, pool, heldRows); n != 0 {
				t.Errorf("%d leases are held after Close", n)
			}
		})
		wg.Wait()
		exec(t, pool, `DELETE FROM pglock.leases`)
	}
}
