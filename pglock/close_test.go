package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// named returns a pool whose connections, and those of the clients made from
// it, bear a name in pg_stat_activity.
func named(t testing.TB, dsn, name string) *pgxpool.Pool {
	t.Helper()
	return poolBy(t, dsn, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["application_name"] = name })
}

const (
	sessions = `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = $1`
	heldRows = `SELECT count(*) FROM pglock.leases WHERE claim IS NOT NULL`
)

// gone waits until no session of that name is left.
func gone(t testing.TB, db querier, name string) {
	t.Helper()
	until(t, db, "the end of "+name+"'s sessions", `SELECT (`+sessions+`) = 0`, name)
}

func TestClose_ReleasesInOneStatement(t *testing.T) {
	t.Parallel()
	pool, spy := spied(t, pgtest.DSN(t))
	c := pglock.New(pool)
	var held []*pglock.Lease
	for i := range 50 {
		held = append(held, acquire(t, c, fmt.Sprint("lease ", i), time.Hour))
	}
	early := held[7]
	if err := early.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := len(spy.heard("pglock.release"))
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := len(spy.heard("pglock.release")) - before; n != 1 {
		t.Errorf("Close sent %d releases, want 1", n)
	}
	if n := one[int64](t, pool, heldRows); n != 0 {
		t.Errorf("%d leases are still held", n)
	}
	for _, l := range held {
		if l.Err() != pglock.ErrReleased || context.Cause(l.Context()) != pglock.ErrReleased {
			t.Errorf("%s says %v after Close, want ErrReleased", l.Name(), l.Err())
		}
		if err := l.Release(t.Context()); err != nil {
			t.Errorf("%s: Release after Close says %v", l.Name(), err)
		}
	}
	if err := c.Close(t.Context()); err != nil {
		t.Errorf("a second Close says %v", err)
	}
	if n := len(spy.heard("pglock.release")) - before; n != 1 {
		t.Errorf("after Close %d more releases were sent", n-1)
	}
}

// A client that was never used has nothing to close, and asks no server.
func TestClose_Unused(t *testing.T) {
	t.Parallel()
	pool, spy := spied(t, pgtest.DSN(t))
	if err := pglock.New(pool).Close(t.Context()); err != nil {
		t.Error(err)
	}
	if connects, statements := spy.used(); connects != 0 || statements != 0 {
		t.Errorf("New and Close opened %d connections and sent %d statements", connects, statements)
	}
}

// Calls that wait end with ErrClosed, and what they might have been granted in
// the same moment is not left behind.
func TestClose_EndsWaits(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	mine := named(t, pool.Config().ConnString(), "closing")
	holder, c := newClient(t, pool), pglock.New(mine)
	l := acquire(t, holder, "wanted", time.Hour)
	waits := make(chan error, 3)
	go func() { _, err := c.Acquire(t.Context(), "wanted", time.Minute); waits <- err }()
	go func() {
		waits <- c.WithLease(t.Context(), "wanted", time.Minute, func(context.Context, *pglock.Lease) error {
			return errors.New("it ran its function")
		})
	}()
	held, err := c.Lock(t.Context(), pglock.KeyOf("wanted"))
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, err := c.Lock(t.Context(), pglock.KeyOf("wanted")); waits <- err }()
	until(t, pool, "a wait for the advisory lock", `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)`)
	waiting(t, pool, "wanted", 2)
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	for range 3 {
		if err := <-waits; !errors.Is(err, pglock.ErrClosed) {
			t.Errorf("a wait ended with %v, want ErrClosed", err)
		}
	}
	if !errors.Is(held.Err(), pglock.ErrReleased) {
		t.Errorf("the advisory lock says %v", held.Err())
	}
	gone(t, pool, "closing")
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
	acquire(t, holder, "wanted", time.Minute)
}

func TestClose_OutlivesItsContext(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := pglock.New(pool)
	acquire(t, c, "a", time.Hour)
	if _, err := c.Lock(t.Context(), pglock.KeyOf("a")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := c.Close(ctx); err != nil {
		t.Error(err)
	}
	if n := one[int64](t, pool, heldRows); n != 0 {
		t.Error("the lease is still held")
	}
	until(t, pool, "the advisory lock free", `SELECT NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))`)
}

// Beside an open guard Close frees the others at once, waits no longer than the
// guarded lease lasts, says who is in the way, and gives up that lease.
func TestClose_BesideAnOpenGuard(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := pglock.New(pool)
	guarded := acquire(t, c, "guarded", time.Second)
	acquire(t, c, "other", time.Hour)
	conn := newConn(t, pool)
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := pglock.SetHoldTimeout(t.Context(), tx, limit); err != nil {
		t.Fatal(err)
	}
	if err := guarded.Guard(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	begun := time.Now()
	go func() { closed <- c.Close(t.Context()) }()
	until(t, pool, "the other lease freed", `SELECT claim IS NULL FROM pglock.leases WHERE name = 'other'`)
	select {
	case err := <-closed:
		t.Fatalf("Close did not wait for the guard: %v", err)
	default:
	}
	err = <-closed
	blocked, _ := errors.AsType[*pglock.BlockedError](err)
	if blocked == nil || len(blocked.Pids) != 1 || blocked.Pids[0] != int32(conn.PgConn().PID()) {
		t.Errorf("Close says %v, want that backend %d is in the way", err, conn.PgConn().PID())
	}
	if took := time.Since(begun); took > limit/2 {
		t.Errorf("Close took %v", took)
	}
	if guarded.Err() == nil {
		t.Error("the guarded lease says that it is held: nobody renews it")
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Errorf("the guarded transaction: %v", err)
	}
	until(t, pool, "the guarded lease expire", `SELECT expires_at <= clock_timestamp() FROM pglock.leases WHERE name = 'guarded'`)
}

// Not parallel: it looks at every goroutine of the process.
func TestClose_LeavesNothing(t *testing.T) {
	pool := pgtest.Pool(t)
	mine := named(t, pool.Config().ConnString(), "leaving")
	// What the pools start at their first use is theirs.
	one[bool](t, mine, `SELECT true`)
	one[bool](t, pool, `SELECT true`)
	before := goleak.IgnoreCurrent()

	c := pglock.New(mine)
	acquire(t, c, "held", time.Hour)
	released := acquire(t, c, "released", time.Hour)
	if err := released.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	lost := acquire(t, c, "lost", 300*time.Millisecond)
	expire(t, pool, "lost")
	<-lost.Context().Done()
	if err := c.WithLease(t.Context(), "run", time.Minute, func(ctx context.Context, l *pglock.Lease) error {
		return l.InTx(ctx, mine, func(context.Context, pgx.Tx) error { return nil })
	}); err != nil {
		t.Error(err)
	}
	waiting, cancel := context.WithCancel(t.Context())
	cancelled := make(chan error, 1)
	go func() { _, err := c.Acquire(waiting, "held", time.Minute); cancelled <- err }()
	cancel()
	if err := <-cancelled; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if _, err := c.Lock(t.Context(), pglock.KeyOf("held")); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'leaving' AND query LIKE '%pglock.renew%'`)
	acquire(t, c, "after", time.Hour)

	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := goleak.Find(before); err != nil {
		t.Error(err)
	}
	if err := mine.Ping(t.Context()); err != nil {
		t.Errorf("the caller's pool: %v", err)
	}
	mine.Close()
	gone(t, pool, "leaving")
	if n := one[int64](t, pool, heldRows+` AND expires_at > clock_timestamp()`); n != 0 {
		t.Errorf("%d leases are still held", n)
	}
}
