package pglock_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgserver"
	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// TestLock_A23_FullTable: a client stops at half of the room that the server has
// for locks, so that others still work. The control, a session without a limit,
// fills the table, and then everybody is refused, by an error that says so.
func TestLock_A23_FullTable(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t, pgserver.With("max_connections", "20"), pgserver.With("max_prepared_transactions", "5"))
	pool := pgtest.PoolOn(t, server.DSN())
	const room = 64 * (20 + 5)
	c, other := newClient(t, pool), newClient(t, pool)
	var held []*pglock.Lock
	var refused error
	for i := 0; i < 20_000 && refused == nil; i++ {
		var l *pglock.Lock
		if l, refused = c.TryLock(t.Context(), pglock.KeyOf(fmt.Sprint("many/", i))); refused == nil {
			held = append(held, l)
		}
	}
	full, ok := errors.AsType[*pglock.FullError](refused)
	if !ok || !errors.Is(refused, pglock.ErrFull) || errors.Is(refused, pglock.ErrLocked) || full.Err != nil || full.Held != room/2 || full.Most != room/2 || len(held) != room/2 {
		t.Fatalf("after %d locks: %v", len(held), refused)
	}
	if !strings.Contains(refused.Error(), "max_locks_per_transaction") {
		t.Errorf("it says no remedy: %v", refused)
	}
	t.Logf("%d locks, then: %v", len(held), refused)
	if _, err := c.Lock(t.Context(), pglock.KeyOf("one more")); !errors.Is(err, pglock.ErrFull) {
		t.Errorf("Lock: %v", err)
	}
	lock(t, other, pglock.KeyOf("another client's"))
	exec(t, pool, `CREATE TABLE others (n int PRIMARY KEY); INSERT INTO others VALUES (1)`)
	release(t, held[0])
	held[0] = lock(t, c, held[0].Key())

	conn := newConn(t, pool)
	_, err := conn.Exec(t.Context(), `SELECT pg_advisory_lock(n) FROM generate_series(1, 20000) n`)
	if sqlState(err) != "53200" {
		t.Fatalf("the control was not refused: %v", err)
	}
	t.Logf("the control: %v", err)
	// A refused session lock leaves the locks that share its session as they were.
	for name, try := range map[string]func() error{
		"TryLock": func() error {
			_, err := other.TryLock(t.Context(), pglock.KeyOf("full"))
			return err
		},
		"Lock": func() error {
			_, err := other.Lock(t.Context(), pglock.KeyOf("full"))
			return err
		},
		"LockTx": func() error {
			return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return pglock.LockTx(t.Context(), tx, manyKeys(3000)...) })
		},
		"TryLockTx": func() error {
			return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return pglock.TryLockTx(t.Context(), tx, manyKeys(3000)...) })
		},
	} {
		err := try()
		if full, ok := errors.AsType[*pglock.FullError](err); !ok || !errors.Is(err, pglock.ErrFull) || full.Err == nil || sqlState(err) != "53200" {
			t.Errorf("%s with the table full: %v", name, err)
		}
	}
	exec(t, conn, `SELECT pg_advisory_unlock_all()`)
	if got := one[int](t, conn, advisoryLocks); got != len(held)+1 {
		t.Errorf("%d locks are held, want %d and another client's", got, len(held))
	}
	for _, l := range held {
		if err := l.Err(); err != nil {
			t.Fatalf("a lock was lost meanwhile: %v", err)
		}
	}
	lock(t, other, pglock.KeyOf("full"))
}

func manyKeys(n int) (keys []pglock.Key) {
	for i := range n {
		keys = append(keys, pglock.KeyPair(1, int32(i)))
	}
	return keys
}
