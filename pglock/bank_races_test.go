package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// TestLock_RandomKeys: many goroutines of one client, and of a second, lock and
// release random keys in every manner, and give up at random. Nobody is inside
// beside somebody that the key keeps out, and nothing is left.
func TestLock_RandomKeys(t *testing.T) {
	t.Parallel()
	const workers, keys = 200, 60
	pool := pgtest.Pool(t)
	a := newClient(t, named(t, pool.Config().ConnString(), "random"))
	b := newClient(t, named(t, pool.Config().ConnString(), "random"), pglock.WithPolling())
	end := time.Now().Add(pgtest.Lasting(30*time.Second, 6*time.Second, 2*time.Second))
	var inside [keys]atomic.Int64 // 1 for each that shares, and much for one that doesn't
	const exclusive = 1_000_000
	// stay goes in and out, and says whether it met somebody that it mustn't.
	stay := func(i int, weight int64) (met bool) {
		now := inside[i].Add(weight)
		if rand.N(2) == 0 {
			time.Sleep(rand.N(2 * time.Millisecond))
		}
		inside[i].Add(-weight)
		return weight == exclusive && now != exclusive || now > exclusive
	}
	var waited, tried, refused, gaveUp atomic.Int64
	work := func(n int) error {
		c := a
		if n%20 == 0 {
			c = b
		}
		for time.Now().Before(end) {
			i := rand.N(keys)
			key, weight := pglock.KeyOf(fmt.Sprint("random/", i)), int64(exclusive)
			if rand.N(3) == 0 {
				key, weight = key.Shared(), 1
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			take := c.Lock
			switch rand.N(4) {
			case 0:
				take = c.TryLock
				tried.Add(1)
			case 1:
				cancel()
				ctx, cancel = context.WithTimeout(t.Context(), rand.N(20*time.Millisecond))
			default:
				waited.Add(1)
			}
			l, err := take(ctx, key)
			switch {
			case errors.Is(err, context.DeadlineExceeded):
				gaveUp.Add(1)
			case errors.Is(err, pglock.ErrLocked):
				refused.Add(1)
			case err != nil:
				cancel()
				return err
			}
			cancel()
			if l == nil {
				continue
			}
			if stay(i, weight) {
				t.Errorf("%v: somebody else is inside", key)
			}
			if err := l.Release(t.Context()); err != nil {
				return err
			}
		}
		return nil
	}
	var g errgroup.Group
	for n := range workers {
		g.Go(func() error { return work(n) })
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d waited, %d tried, %d were refused, %d gave up, on up to %d keys", waited.Load(), tried.Load(), refused.Load(), gaveUp.Load(), keys)
	if got := one[int](t, pool, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`); got != 0 {
		t.Errorf("%d locks are held or waited for after the last release", got)
	}
	gone(t, pool, "random")

	// The control: without locks they meet.
	var meetings atomic.Int64
	for range workers {
		g.Go(func() error {
			for begun := time.Now(); meetings.Load() == 0 && time.Since(begun) < limit; {
				if stay(rand.N(keys), exclusive) {
					meetings.Add(1)
				}
			}
			return nil
		})
	}
	_ = g.Wait()
	if meetings.Load() == 0 {
		t.Error("without locks nobody met anybody: this test shows nothing")
	}
}

// Statements that somebody cancels, anywhere between a try and an unlock, leave
// nothing held, and cost no lock that shares the session.
func TestLock_CancelledByTheServer(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, named(t, pool.Config().ConnString(), "cancelled"))
	kept := lock(t, c, pglock.KeyOf("kept"))
	session := holder(t, pool, kept.Key())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var g, canceller errgroup.Group
	canceller.Go(func() error {
		for ctx.Err() == nil {
			if _, err := pool.Exec(t.Context(), `SELECT pg_cancel_backend($1)`, session); err != nil {
				return err
			}
		}
		return nil
	})
	var failed atomic.Int64
	for w := range 4 {
		g.Go(func() error {
			for begun := time.Now(); failed.Load() < 5 && time.Since(begun) < limit; {
				l, err := c.TryLock(t.Context(), pglock.KeyInt64(int64(w)))
				if sqlState(err) == "57014" {
					failed.Add(1)
					continue
				}
				if err != nil {
					return err
				}
				if err := l.Release(t.Context()); err != nil {
					return err
				}
			}
			return nil
		})
	}
	err := g.Wait()
	cancel()
	if err := errors.Join(err, canceller.Wait()); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d tries were cancelled", failed.Load())
	if failed.Load() == 0 {
		t.Error("no try was cancelled: this test shows nothing")
	}
	if kept.Err() != nil || holder(t, pool, kept.Key()) != session {
		t.Errorf("the lock beside them: %v", kept.Err())
	}
	if got := one[int](t, pool, advisoryLocks); got != 1 {
		t.Errorf("%d locks are held, want 1", got)
	}
}
