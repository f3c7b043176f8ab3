//go:build unix

package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// Whether an Acquire is granted is judged when the server has the row locked,
// not when the client made the statement (L33): here it is stopped in between.
// The mutant goes by the client's time.
func TestLease_L33_PausedBeforeAcquireIsSent(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	next := newClient(t, pool)
	child := spawn(t, dsn)
	halted := func(name string) (stopped time.Time) {
		child.send(order{Name: name, TTL: pausedTTL, Steps: []string{"halting acquire", "ask"}})
		if !child.hear().Built {
			t.Fatal("the acquire was not halted")
		}
		child.stop()
		return one[time.Time](t, pool, `SELECT clock_timestamp()`)
	}
	pause := func(stopped time.Time) (woken time.Time) {
		exec(t, pool, `SELECT pg_sleep_until($1)`, stopped.Add(2*pausedTTL))
		return one[time.Time](t, pool, `SELECT clock_timestamp()`)
	}
	goOn := func() report {
		child.send(order{}) // lets the halted statement go
		child.wake()
		return child.hear()
	}

	stopped := halted("taken")
	l := acquire(t, next, "taken", time.Minute)
	pause(stopped)
	if r := goOn(); r.Fates[0] != "locked" {
		t.Errorf("an acquire that comes after another's was told %q, want locked", r.Fates[0])
	}
	if err := l.Release(t.Context()); err != nil {
		t.Errorf("the winner's release: %v", err)
	}

	// Granted by the server's time when it arrived. The client counts from before
	// the pause: for itself the grant is over, and it gives it back.
	woken := pause(halted("free"))
	if diff := cmp.Diff([]string{"lost: expired ", "no lease"}, goOn().Fates); diff != "" {
		t.Errorf("a late acquire of a free lease (-want +got):\n%s", diff)
	}
	if !one[bool](t, pool, `SELECT acquired_at >= $1 AND claim IS NULL FROM pglock.leases WHERE name = 'free'`, woken) {
		t.Error("the late grant was not made by the server's time, or not given back")
	}

	mutate(t, pool, `CREATE FUNCTION mutant.acquire(name text, ttl interval, client_time timestamptz) RETURNS bigint LANGUAGE sql AS $$
		UPDATE pglock.leases AS l SET token = nextval('pglock.leases_token_seq'), claim = gen_random_uuid(), role = session_user,
			expires_at = client_time + acquire.ttl, ttl = acquire.ttl
		WHERE l.name = acquire.name AND l.expires_at <= clock_timestamp() RETURNING token $$`)
	exec(t, pool, `SELECT pglock.create_names('{mutant}')`)
	made := one[time.Time](t, pool, `SELECT clock_timestamp()`)
	pause(made)
	one[int64](t, pool, `SELECT mutant.acquire('mutant', $1, $2)`, pausedTTL, made) // a winner,
	acquire(t, next, "mutant", time.Minute)                                         // and a second one
}

// A holder that is killed, with a guarded transaction open, leaves nothing that
// somebody has to clear away (L45). The control is a lease without an expiry.
func TestLease_L45_KilledHolder(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	next := newClient(t, pool)
	const ttl = time.Second
	for name, steps := range map[string][]string{
		"killed":               {"acquire"},
		"killed while guarded": {"acquire", "begin", "guard"},
	} {
		child := spawn(t, dsn)
		report := child.ask(order{Name: name, TTL: ttl, Steps: steps})
		if failed := slices.ContainsFunc(report.Fates, func(fate string) bool { return fate != "ok" }); failed {
			t.Fatalf("%s: %v", name, report.Fates)
		}
		killed := one[time.Time](t, pool, `SELECT clock_timestamp()`)
		if err := child.cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		// Once its sessions are gone nothing of it moves the expiry any more.
		until(t, pool, "the sessions of the dead end", `SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1)`,
			childName(child.cmd.Process.Pid))
		expires := one[time.Time](t, pool, `SELECT expires_at FROM pglock.leases WHERE name = $1`, name)
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		l, err := next.Acquire(ctx, name, ttl)
		if err != nil {
			t.Fatal(err)
		}
		acquired := one[time.Time](t, pool, `SELECT acquired_at FROM pglock.leases WHERE name = $1 AND token = $2`, name, l.Token())
		if acquired.Before(expires) || acquired.Sub(killed) > 10*(ttl+50*time.Millisecond) {
			t.Errorf("%s: the next holder had the lease %v after the kill, which is %v after it expired", name, acquired.Sub(killed), acquired.Sub(expires))
		}
	}
	exec(t, pool, `SELECT pglock.acquire('{for ever}', '100 ms'); UPDATE pglock.leases SET expires_at = now() + interval '1 year' WHERE name = 'for ever'`)
	if _, err := next.TryAcquire(t.Context(), "for ever", ttl); !errors.Is(err, pglock.ErrLocked) {
		t.Errorf("a try on a lease without an expiry said %v: this test shows nothing", err)
	}
}

// Whoever waits for the lease of a process that is killed is granted it at the
// expiry, and has sent no more than its heartbeats until then (L7, L08). Times
// are the database's own.
func TestLease_L7_TakeoverAfterAKill(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := roomy(t, pgtest.PoolOn(t, dsn), 20)
	ttl := pgtest.Lasting(5*time.Second, 2*time.Second, 2*time.Second)
	runs, lanes := pgtest.Lasting(50, 5, 2), 5
	late := make([]time.Duration, runs)
	statements := make([]int, runs) // that a waiter sent
	var next atomic.Int64
	var wg sync.WaitGroup
	for range lanes {
		wg.Go(func() {
			for run := int(next.Add(1)) - 1; run < runs; run = int(next.Add(1)) - 1 {
				name := fmt.Sprint("killed/", run)
				child := spawn(t, dsn)
				if report := child.ask(order{Name: name, TTL: ttl, Steps: []string{"acquire"}}); report.Fates[0] != "ok" {
					t.Error(report.Fates)
					return
				}
				told := &renewals{}
				waiter := newClient(t, pool, pglock.WithObserver(told))
				granted := make(chan *pglock.Lease, 1)
				go func() {
					l, _ := waiter.Acquire(t.Context(), name, ttl)
					granted <- l
				}()
				waiting(t, pool, name, 1)
				began, _, _ := told.counts()
				if err := child.cmd.Process.Kill(); err != nil {
					t.Error(err)
					return
				}
				until(t, pool, "the sessions of the dead end", `SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1)`,
					childName(child.cmd.Process.Pid))
				expires := one[time.Time](t, pool, `SELECT expires_at FROM pglock.leases WHERE name = $1`, name)
				l := <-granted
				if l == nil {
					t.Errorf("%s was not granted", name)
					return
				}
				late[run] = one[time.Time](t, pool, `SELECT acquired_at FROM pglock.leases WHERE name = $1 AND token = $2`, name, l.Token()).Sub(expires)
				ended, _, _ := told.counts()
				statements[run] = ended - began
			}
		})
	}
	wg.Wait()
	slices.Sort(late)
	t.Logf("%d holders killed, TTL %v: granted %v to %v after the expiry, median %v; statements of a waiter: %d at most",
		runs, ttl, late[0], late[runs-1], late[runs/2], slices.Max(statements))
	if late[0] < 0 || late[runs-1] > 10*50*time.Millisecond {
		t.Errorf("granted %v to %v after the expiry", late[0], late[runs-1])
	}
	if most := slices.Max(statements); most > 5 {
		t.Errorf("a waiter sent %d statements in one TTL, want no more than its heartbeats", most)
	}
}
