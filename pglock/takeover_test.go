package pglock_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// A dead holder's lease is granted at its expiry to whoever waits, who has sent
// no more than its heartbeats until then. Times are the database's own.
func TestLease_L7_TakeoverAtExpiry(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	const ttl = 3 * time.Second
	n := scale(50, 10)
	late := make([]time.Duration, n)
	statements := make([]int, n) // that a waiter sent
	var wg sync.WaitGroup
	for i := range n {
		told := &renewals{}
		c := newClient(t, pool, pglock.WithObserver(told))
		name := fmt.Sprint("dead/", i)
		until := one[time.Time](t, pool, `SELECT expires_at FROM pglock.acquire(ARRAY[$1], $2)`, name, ttl)
		wg.Go(func() {
			l, err := c.Acquire(t.Context(), name, ttl)
			if err != nil {
				t.Error(err)
				return
			}
			late[i] = one[time.Time](t, pool, `SELECT acquired_at FROM pglock.leases WHERE name = $1`, name).Sub(until)
			statements[i], _, _ = told.counts()
			if l.Err() != nil {
				t.Error(l.Err())
			}
		})
	}
	wg.Wait()
	slices.Sort(late)
	t.Logf("granted %v to %v after the expiry, median %v; statements of a waiter: %d at most", late[0], late[n-1], late[n/2], slices.Max(statements))
	if late[0] < 0 || late[n-1] > 10*50*time.Millisecond {
		t.Errorf("granted %v to %v after the expiry", late[0], late[n-1])
	}
	// Three heartbeats in the holder's TTL, one look at its expiry, and one at
	// which the row was locked or the clock was not yet there.
	if most := slices.Max(statements); most > 5 {
		t.Errorf("a waiter sent %d statements in one TTL, want no more than its heartbeats", most)
	}
}
