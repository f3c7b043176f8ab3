package pglock_test

import (
	"context"
	"fmt"
	"runtime"
	"runtime/pprof"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// renewals is an Observer that counts renewal statements and what they renew.
type renewals struct {
	mu         sync.Mutex
	statements int
	leases     int
	failed     int
}

func (r *renewals) Observe(_ context.Context, event pglock.Event) {
	if e, ok := event.(pglock.Renewed); ok {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.statements++
		r.leases += e.Leases
		if e.Err != nil {
			r.failed++
		}
	}
}

func (r *renewals) counts() (statements, leases, failed int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.statements, r.leases, r.failed
}

// routines counts the goroutines with a label.
func routines(t testing.TB, label string) (n int) {
	t.Helper()
	var profile strings.Builder
	if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
		t.Fatal(err)
	}
	for _, stack := range strings.Split(profile.String(), "\n\n") {
		if strings.Contains(stack, label) {
			var same int
			if _, err := fmt.Sscanf(stack[strings.LastIndex(stack[:strings.Index(stack, " @")], "\n")+1:], "%d @", &same); err != nil {
				t.Fatalf("%q: %v", stack, err)
			}
			n += same
		}
	}
	return n
}

// Held leases cost one statement for each 1,000 a heartbeat, and neither a
// goroutine nor a connection each.
func TestLease_L10_Cost(t *testing.T) {
	t.Parallel()
	n := scale(10_000, 2_000)
	pool := pgtest.Pool(t)
	told := &renewals{}
	pprof.SetGoroutineLabels(pprof.WithLabels(t.Context(), pprof.Labels("test", "holds many"))) // those that it starts have them too
	c := newClient(t, reopen(t, pool), pglock.WithObserver(told))
	backends := func() int64 {
		return one[int64](t, pool, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()`)
	}
	const ttl = 30 * time.Second
	beats := pgtest.Lasting(6, 2, 2)
	hold := func(names []string) []*pglock.Lease {
		leases, err := c.TryAcquireAll(t.Context(), names, ttl)
		if err != nil {
			t.Fatal(err)
		}
		return leases
	}
	leases := hold([]string{"first"})
	few, fewRoutines := backends(), routines(t, "holds many")
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	for chunk := range n / 1000 {
		names := make([]string, 1000-max(0, 1-chunk)) // n with the first
		for i := range names {
			names[i] = fmt.Sprintf("held/%d/%d", chunk, i)
		}
		leases = append(leases, hold(names)...)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	many, manyRoutines := backends(), routines(t, "holds many")

	s0, l0, _ := told.counts()
	for {
		statements, renewed, failed := told.counts()
		if renewed-l0 >= beats*n {
			t.Logf("%d leases for %d heartbeats of %v: %.1f statements a heartbeat (%d failed), %d connections (with one lease %d), %d goroutines (%d), %d bytes of heap a lease",
				n, beats, ttl/3, float64(statements-s0)/float64(renewed-l0)*float64(n), failed, many, few, manyRoutines, fewRoutines, (after.HeapAlloc-before.HeapAlloc)/uint64(n))
			// A chunk may be split where the leases were acquired across a point of
			// the grid; those of a full second heartbeat are not.
			if most := (beats + 1) * (n/1000 + 1); statements-s0 > most {
				t.Errorf("%d statements for %d heartbeats of %d leases, want %d at most", statements-s0, beats, n, most)
			}
			break
		}
		one[bool](t, pool, `SELECT pg_sleep(0.05) IS NOT NULL`)
	}
	if many > few+1 {
		t.Errorf("%d connections with %d leases, %d with one", many, n, few)
	}
	if manyRoutines > fewRoutines+2*4 { // a pool has two for each of its four connections
		t.Errorf("%d goroutines with %d leases, %d with one", manyRoutines, n, fewRoutines)
	}
	for _, l := range leases {
		if err := l.Err(); err != nil {
			t.Fatal(err)
		}
	}
}

// One row that a stranger has locked delays no other lease's renewal.
func TestLease_L10_AStrangersRowDelaysNobody(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	names := make([]string, 100)
	for i := range names {
		names[i] = fmt.Sprint("many/", i)
	}
	leases, err := c.TryAcquireAll(t.Context(), names, 2*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	stranger := newConn(t, pool)
	exec(t, stranger, `BEGIN; SELECT FROM pglock.leases WHERE name = 'many/42' FOR UPDATE`)
	<-leases[42].Context().Done()
	for i, l := range leases {
		if err := l.Err(); (err == nil) != (i != 42) {
			t.Errorf("lease %d says %v", i, err)
		}
	}
	exec(t, stranger, `ROLLBACK`)
}
