package pglock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

func TestLeases_AndWaiters(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool, pglock.WithOwner("holder"))
	l, err := c.TryAcquire(t.Context(), "b", time.Hour, pglock.WithMetadata(map[string]string{"k": "v"}))
	if err != nil {
		t.Fatal(err)
	}
	acquire(t, c, "a", time.Minute)
	if err := acquire(t, c, "released", time.Minute).Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	waiter := newClient(t, pool, pglock.WithOwner("waiter"))
	go func() {
		_, err := waiter.Acquire(ctx, "b", time.Hour)
		done <- err
	}()
	waiting(t, pool, "b", 1)

	infos, err := c.Leases(t.Context())
	if err != nil || len(infos) != 2 || infos[0].Name != "a" {
		t.Fatalf("leases: %+v, %v", infos, err)
	}
	b := infos[1]
	if b.Name != "b" || b.Token != l.Token() || b.Owner != "holder" || b.Role != "postgres" || b.TTL != time.Hour ||
		b.Metadata["k"] != "v" || b.Waiters != 1 || b.Remaining <= 0 || b.Remaining > time.Hour ||
		!b.ExpiresAt.Equal(b.AcquiredAt.Add(time.Hour)) {
		t.Errorf("lease: %+v", b)
	}
	waiters, err := c.Waiters(t.Context())
	if err != nil || len(waiters) != 1 {
		t.Fatalf("waiters: %+v, %v", waiters, err)
	}
	if w := waiters[0]; w.Name != "b" || w.Ticket <= 0 || w.Owner != "waiter" || w.Role != "postgres" || !w.ExpiresAt.After(w.QueuedAt) {
		t.Errorf("waiter: %+v", w)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// Whatever only shows something takes no row lock: it works in a transaction
// that may take none, and beside one that has locked every row.
func TestLeases_R04_TakeNoRowLocks(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	l := acquire(t, c, "a", time.Hour)
	accept(t, pool, "r", 5)
	exec(t, pool, `CREATE TABLE accounts (id int); SELECT pglock.protect('accounts', '%')`)
	exec(t, pool, `SELECT pglock.enqueue('a', '1 h', gen_random_uuid(), 'nobody listens')`)
	locker := newConn(t, pool)
	exec(t, locker, `BEGIN; SELECT FROM pglock.leases FOR UPDATE; SELECT FROM pglock.waiters FOR UPDATE; SELECT FROM pglock.fences FOR UPDATE`)
	reader := newConn(t, pool)
	exec(t, reader, `SET default_transaction_read_only = on; SET lock_timeout = '10 s'`)
	for _, sql := range []string{
		`SELECT count(*) FROM pglock.list_leases()`, `SELECT count(*) FROM pglock.list_waiters()`, `SELECT count(*) FROM pglock.list_fences()`,
		`SELECT count(*) FROM pglock.protected_tables`, `SELECT count(pglock.schema_version())`,
	} {
		if n := one[int64](t, reader, sql); n != 1 {
			t.Errorf("%s: %d, want 1", sql, n)
		}
	}
	for _, sql := range []string{`SELECT pglock.guard('a', $1)`, `SELECT pglock.fence('r', $1 * 0 + 5)`} {
		if _, err := reader.Exec(t.Context(), sql, int64(l.Token())); sqlState(err) != "25006" {
			t.Errorf("%s, which locks a row: %v: this test shows nothing", sql, err)
		}
	}
	if infos, err := c.Leases(t.Context()); err != nil || len(infos) != 1 {
		t.Errorf("Leases beside locked rows: %v, %v", infos, err)
	}
	if infos, err := c.Waiters(t.Context()); err != nil || len(infos) != 1 {
		t.Errorf("Waiters beside locked rows: %v, %v", infos, err)
	}
}

// The holder's guard fails at once, its lease ends with its next renewal, and
// the next token is higher.
func TestForceRelease(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c, admin := newClient(t, pool), newClient(t, pool)
	l := acquire(t, c, "stuck", time.Second)
	if err := admin.ForceRelease(t.Context(), "stuck", l.Token()+1); !errors.Is(err, pglock.ErrLost) {
		t.Errorf("with another token: %v, want ErrLost", err)
	}
	if err := l.Err(); err != nil {
		t.Fatalf("after that the lease says %v", err)
	}
	granted := make(chan *pglock.Lease, 1)
	go func() {
		next, err := admin.Acquire(t.Context(), "stuck", time.Minute)
		if err != nil {
			t.Error(err)
		}
		granted <- next
	}()
	waiting(t, pool, "stuck", 1)
	if err := admin.ForceRelease(t.Context(), "stuck", l.Token()); err != nil {
		t.Fatal(err)
	}
	if next := <-granted; next.Token() <= l.Token() {
		t.Errorf("token %d after %d", next.Token(), l.Token())
	}
	inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
		if err := l.Guard(t.Context(), tx); !errors.Is(err, pglock.ErrLost) {
			t.Errorf("the old holder's Guard says %v, want ErrLost", err)
		}
	})
	<-l.Context().Done()
	if lost, ok := errors.AsType[*pglock.LostError](l.Err()); !ok || lost.Cause != pglock.Taken {
		t.Errorf("the old holder's lease says %v, want a loss: taken", l.Err())
	}
}

// Purge deletes idle rows only, and never lets a token come back.
func TestPurge(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	acquire(t, c, "held", time.Hour)
	idle := acquire(t, c, "idle", time.Hour)
	if err := idle.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := one[int64](t, pool, `SELECT pglock.purge('1 day')`); n != 0 {
		t.Errorf("%d rows purged that were used just now", n)
	}
	if n := one[int64](t, pool, `SELECT pglock.purge('0')`); n != 1 {
		t.Errorf("%d rows purged, want the idle one", n)
	}
	if again := acquire(t, c, "idle", time.Hour); again.Token() <= idle.Token() {
		t.Errorf("token %d after %d", again.Token(), idle.Token())
	}
	if _, err := pool.Exec(t.Context(), `SELECT pglock.purge('-1 day')`); sqlState(err) != "22023" {
		t.Errorf("a negative time says %v", err)
	}
}
