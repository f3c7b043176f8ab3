package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// A thousand locks of one client, taken by many goroutines at once, share a
// connection, which has neither a transaction nor a snapshot. Without a lock the
// client has no connection.
func TestLock_ManyOnFewConnections(t *testing.T) {
	t.Parallel()
	const locks, workers = 1000, 50
	pool := pgtest.Pool(t)
	c := newClient(t, named(t, pool.Config().ConnString(), "many"))
	held := make([]*pglock.Lock, locks)
	begun := time.Now()
	var g errgroup.Group
	for w := range workers {
		g.Go(func() (err error) {
			for i := w; i < locks && err == nil; i += workers {
				take := c.Lock
				if i%2 == 0 {
					take = c.TryLock
				}
				held[i], err = take(t.Context(), pglock.KeyOf(fmt.Sprint("many/", i)))
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	took := time.Since(begun)
	connections := one[int](t, pool, sessions, "many")
	t.Logf("%d locks are held on %d connections, taken in %v", locks, connections, took)
	if connections > 4 {
		t.Errorf("%d connections, want 4 at most", connections)
	}
	if got := one[int](t, pool, advisoryLocks); got != locks {
		t.Errorf("%d locks are held", got)
	}
	until(t, pool, "the sessions idle", `SELECT bool_and(state = 'idle' AND backend_xid IS NULL AND backend_xmin IS NULL AND xact_start IS NULL)
		FROM pg_stat_activity WHERE application_name = 'many' AND datname = current_database()`)

	begun = time.Now()
	for w := range workers {
		g.Go(func() (err error) {
			for i := w; i < locks && err == nil; i += workers {
				err = held[i].Release(t.Context())
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	t.Logf("released in %v", time.Since(begun))
	if got := one[int](t, pool, advisoryLocks); got != 0 {
		t.Errorf("%d locks are held after the last release", got)
	}
	gone(t, pool, "many")
}

// While calls wait, locks of the same client are taken and released.
func TestLock_NothingIsBehindAWait(t *testing.T) {
	t.Parallel()
	const n = 8
	pool := pgtest.Pool(t)
	c := newClient(t, named(t, pool.Config().ConnString(), "busy"))
	foreign := newConn(t, pool)
	key := pglock.KeyOf("foreign")
	exec(t, foreign, `SELECT pg_advisory_lock($1)`, key.Int64())
	other := lock(t, c, pglock.KeyOf("other"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	waits := make(chan error, n)
	for range n {
		go func() {
			l, err := c.Lock(ctx, key)
			if err == nil {
				err = l.Release(ctx)
			}
			waits <- err
		}()
	}
	until(t, pool, "the waiters in line", waiters(n))
	release(t, other)
	for i := range 100 {
		release(t, lock(t, c, pglock.KeyInt64(int64(i))))
	}
	if !one[bool](t, pool, waiters(n)) {
		t.Error("the waiters are gone: this test shows nothing")
	}
	t.Logf("%d waiters and the rest on %d connections", n, one[int](t, pool, sessions, "busy"))
	exec(t, foreign, `SELECT pg_advisory_unlock($1)`, key.Int64())
	for range n {
		if err := <-waits; err != nil {
			t.Error(err)
		}
	}
	gone(t, pool, "busy")

	// The control: one session for both.
	conn := newConn(t, pool)
	exec(t, foreign, `SELECT pg_advisory_lock($1)`, key.Int64())
	exec(t, conn, `SELECT pg_advisory_lock(1)`)
	batch := make(chan error, 1)
	go func() {
		_, err := conn.Exec(ctx, fmt.Sprintf(`SELECT pg_advisory_lock(%d); SELECT pg_advisory_unlock(1)`, key.Int64()))
		batch <- err
	}()
	until(t, pool, "the control in line", waiters(1))
	if got := one[int](t, pool, advisoryLocks); got != 2 {
		t.Errorf("%d locks are held beside a wait in the same session, want 2: this test shows nothing", got)
	}
	cancel()
	<-batch
}

// What was waited for is held where it was granted, and lost without the others.
func TestLock_LossIsTheSessions(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, named(t, pool.Config().ConnString(), "losing"))
	var shared []*pglock.Lock
	for i := range 100 {
		shared = append(shared, lock(t, c, pglock.KeyInt64(int64(i))))
	}
	foreign := newConn(t, pool)
	key := pglock.KeyOf("waited for")
	exec(t, foreign, `SELECT pg_advisory_lock($1)`, key.Int64())
	granted := make(chan *pglock.Lock, 1)
	go func() {
		l, err := c.Lock(t.Context(), key)
		if err != nil {
			t.Error(err)
		}
		granted <- l
	}()
	until(t, pool, "the waiter in line", waiters(1))
	exec(t, foreign, `SELECT pg_advisory_unlock($1)`, key.Int64())
	waited := <-granted
	if waited == nil {
		return
	}
	exec(t, pool, `SELECT pg_terminate_backend($1)`, one[int32](t, pool, `SELECT DISTINCT pid FROM pg_locks WHERE locktype = 'advisory' AND classid = 0
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`))
	for _, l := range shared {
		if err := ended(t, l.Context()); !errors.Is(err, pglock.ErrLost) || sqlState(err) != "57P01" {
			t.Errorf("%v was lost with %v", l.Key(), err)
		}
	}
	if err := waited.Err(); err != nil {
		t.Errorf("a lock of another session: %v", err)
	}
	for i, l := range shared {
		again := lock(t, c, pglock.KeyInt64(int64(i)))
		if err := l.Release(t.Context()); !errors.Is(err, pglock.ErrLost) {
			t.Errorf("the release of a lost lock: %v", err)
		}
		if err := again.Err(); err != nil {
			t.Errorf("the lock that was taken since: %v", err)
		}
		release(t, again)
	}
	release(t, waited)
	gone(t, pool, "losing")
}

// A session that died as a spare is nobody's error.
func TestLock_DeadSpare(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, named(t, pool.Config().ConnString(), "spare"))
	foreign := newConn(t, pool)
	key := pglock.KeyOf("foreign")
	for range scale(20, 5) {
		release(t, lock(t, c, pglock.KeyInt64(1)))
		exec(t, pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'spare' AND datname = current_database()`)
		release(t, lock(t, c, pglock.KeyInt64(2)))

		exec(t, foreign, `SELECT pg_advisory_lock($1)`, key.Int64())
		exec(t, pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'spare' AND datname = current_database()`)
		waited := make(chan error, 1)
		go func() {
			l, err := c.Lock(t.Context(), key)
			if err == nil {
				err = l.Release(t.Context())
			}
			waited <- err
		}()
		until(t, pool, "the waiter in line", waiters(1))
		exec(t, foreign, `SELECT pg_advisory_unlock($1)`, key.Int64())
		if err := <-waited; err != nil {
			t.Error(err)
		}
	}
}

// Locks that share a key take one connection, keep an exclusive one out until
// the last is gone, and let one that waits go first.
func TestLock_SharedByOneClient(t *testing.T) {
	t.Parallel()
	const n = 50
	pool := pgtest.Pool(t)
	c, other := newClient(t, named(t, pool.Config().ConnString(), "sharing")), newClient(t, pool)
	key := pglock.KeyOf("report")
	var held []*pglock.Lock
	for range n {
		held = append(held, lock(t, c, key.Shared()))
	}
	if connections, locks := one[int](t, pool, sessions, "sharing"), one[int](t, pool, advisoryLocks); connections != 1 || locks != 1 {
		t.Errorf("%d shared locks are %d in the server, on %d connections", n, locks, connections)
	}
	for _, who := range []*pglock.Client{c, other} {
		_, err := who.TryLock(t.Context(), key)
		if blocked, ok := errors.AsType[*pglock.BlockedError](err); !ok || !slices.Equal(blocked.Pids, []int32{holder(t, pool, key)}) {
			t.Errorf("an exclusive lock beside them: %v", err)
		}
	}
	granted := make(chan *pglock.Lock, 1)
	go func() {
		l, err := other.Lock(t.Context(), key)
		if err != nil {
			t.Error(err)
		}
		granted <- l
	}()
	until(t, pool, "the waiter in line", waiters(1))
	if _, err := c.TryLock(t.Context(), key.Shared()); !errors.Is(err, pglock.ErrLocked) {
		t.Errorf("one more beside an exclusive that waits: %v", err)
	}
	last := make(chan error, 1)
	go func() {
		l, err := c.Lock(t.Context(), key.Shared())
		if err == nil {
			err = l.Release(t.Context())
		}
		last <- err
	}()
	until(t, pool, "both in line", waiters(2))
	for _, l := range held[1:] {
		release(t, l)
	}
	if !one[bool](t, pool, waiters(2)) || held[0].Err() != nil {
		t.Error("the last shared lock went with the others")
	}
	release(t, held[0])
	l := <-granted
	if l == nil {
		return
	}
	if !one[bool](t, pool, waiters(1)) {
		t.Error("the shared one that came later does not wait")
	}
	release(t, l)
	if err := <-last; err != nil {
		t.Error(err)
	}

	// The control: a session that holds it shared overtakes whoever waits.
	conn, writer := newConn(t, pool), newConn(t, pool)
	exec(t, conn, `SELECT pg_advisory_lock_shared(1)`)
	served := make(chan error, 1)
	go func() { _, err := writer.Exec(context.Background(), `SELECT pg_advisory_lock(1)`); served <- err }()
	until(t, pool, "the writer in line", waiters(1))
	if !one[bool](t, conn, `SELECT pg_try_advisory_lock_shared(1)`) {
		t.Error("a session waited for its own lock: this test shows nothing")
	}
	exec(t, conn, `SELECT pg_advisory_unlock_all()`)
	if err := <-served; err != nil {
		t.Error(err)
	}
}

// A name and its number are one key, also for the client that holds it.
func TestLock_A20_NumberOfAName(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	held := lock(t, c, pglock.KeyOf("a"))
	_, err := c.TryLock(t.Context(), pglock.KeyInt64(pglock.KeyOf("a").Int64()))
	if blocked, ok := errors.AsType[*pglock.BlockedError](err); !ok || len(blocked.Pids) != 1 {
		t.Errorf("by its number: %v", err)
	}
	release(t, held)
}

// A caller who gives up while a try is under way holds nothing, and the locks
// beside it stay.
func TestLock_GivenUpTry(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	direct := pgtest.PoolOn(t, dsn)
	try := func(t *testing.T, c *pglock.Client) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		begun := time.Now()
		_, err := c.TryLock(ctx, pglock.KeyOf("tried"))
		if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, pglock.ErrLocked) {
			t.Errorf("a try that was given up: %v", err)
		}
		if took := time.Since(begun); took > limit/2 {
			t.Errorf("it took %v to give up", took)
		}
	}
	t.Run("answered late", func(t *testing.T) {
		wire := pgtest.Proxy(t, dsn)
		c := newClient(t, pgtest.PoolOn(t, wire.DSN()))
		held := lock(t, c, pglock.KeyOf("held"))
		wire.Delay(1800 * time.Millisecond)
		try(t, c)
		until(t, direct, "the grant undone", `SELECT 1 = (`+advisoryLocks+`)`)
		wire.Heal()
		if held.Err() != nil || holder(t, direct, held.Key()) == 0 {
			t.Errorf("the lock beside it: %v", held.Err())
		}
		release(t, held)
	})
	t.Run("never answered", func(t *testing.T) {
		wire := pgtest.Proxy(t, dsn)
		c := newClient(t, pgtest.PoolOn(t, wire.DSN()))
		held := lock(t, c, pglock.KeyOf("held"))
		wire.DropReplies()
		try(t, c)
		if err := ended(t, held.Context()); !errors.Is(err, pglock.ErrLost) {
			t.Errorf("the lock beside it: %v", err)
		}
		wire.Heal()
		until(t, direct, "the locks gone", `SELECT 0 = (`+advisoryLocks+`)`)
	})
}

func TestLockAll(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c, other := newClient(t, pool), newClient(t, pool)
	a, b, d := pglock.KeyInt64(-5), pglock.KeyInt64(7), pglock.KeyPair(1, 2)
	locks, err := c.LockAll(t.Context(), d, b.Shared(), a, b)
	if err != nil {
		t.Fatal(err)
	}
	var keys []pglock.Key
	for _, l := range locks {
		keys = append(keys, l.Key())
	}
	if !slices.Equal(keys, []pglock.Key{a, b, d}) {
		t.Errorf("locked %v", keys)
	}
	release(t, locks[0])
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { _, err := other.LockAll(ctx, b, a); done <- err }()
	until(t, pool, "the waiter in line", waiters(1))
	cancel()
	if err := <-done; !errors.Is(err, pglock.ErrLocked) || !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if got := one[int](t, pool, advisoryLocks); got != 2 {
		t.Errorf("%d locks are held, want the 2 of the first caller", got)
	}
	for why, key := range badKeys {
		if _, err := c.LockAll(t.Context(), pglock.KeyInt64(1), key); err == nil {
			t.Errorf("a key that is bad (%s) was accepted", why)
		}
	}
	if _, err := c.LockAll(t.Context()); err == nil {
		t.Error("no keys: no error")
	}

	// Two callers with opposite orders never wait for each other.
	for _, l := range locks[1:] {
		release(t, l)
	}
	var g errgroup.Group
	for _, keys := range [][]pglock.Key{{a, b, d}, {d, b, a}} {
		for range 2 {
			g.Go(func() error {
				for range scale(50, 10) {
					locks, err := c.LockAll(t.Context(), keys...)
					if err != nil {
						return err
					}
					for _, l := range locks {
						if err := l.Release(t.Context()); err != nil {
							return err
						}
					}
				}
				return nil
			})
		}
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}
