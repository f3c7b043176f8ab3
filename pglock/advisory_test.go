package pglock_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// advisoryLocks counts the advisory locks of this database that are held.
const advisoryLocks = `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted
	AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`

func begin(t *testing.T, db interface {
	Begin(context.Context) (pgx.Tx, error)
}) pgx.Tx {
	t.Helper()
	tx, err := db.Begin(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// usable fails the test unless the transaction goes on.
func usable(t *testing.T, tx pgx.Tx) {
	t.Helper()
	if _, err := tx.Exec(context.Background(), "SELECT 1"); err != nil {
		t.Errorf("the transaction is not usable: %v", err)
	}
}

// aborted fails the test if the transaction goes on.
func aborted(t *testing.T, tx pgx.Tx) {
	t.Helper()
	if _, err := tx.Exec(context.Background(), "SELECT 1"); err == nil {
		t.Error("the transaction is still usable")
	}
}

func pid(tx pgx.Tx) int32 { return int32(tx.Conn().PgConn().PID()) }

func TestLockTx_WaitsUntilTheTransactionEnds(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	key := pglock.KeyOf("accounts/42")
	holder, waiter := begin(t, pool), begin(t, pool)
	if err := pglock.LockTx(t.Context(), holder, key); err != nil {
		t.Fatal(err)
	}
	locked := make(chan error, 1)
	go func() { locked <- pglock.LockTx(t.Context(), waiter, key) }()
	blockedBy(t, pool, uint32(pid(holder)))
	select {
	case err := <-locked:
		t.Fatalf("it did not wait: %v", err)
	default:
	}
	if err := holder.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-locked; err != nil {
		t.Fatal(err)
	}
}

func TestTryLockTx_Refused(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	a, b, c := pglock.KeyInt64(1), pglock.KeyInt64(2), pglock.KeyPair(0, 3)
	holder := begin(t, pool)
	if err := pglock.TryLockTx(t.Context(), holder, b); err != nil {
		t.Fatal(err)
	}
	for _, keys := range [][]pglock.Key{{b}, {b.Shared()}, {a, b, c}, {c, b.Shared()}} {
		tx := begin(t, pool)
		if err := pglock.TryLockTx(t.Context(), tx, pglock.KeyInt64(9)); err != nil {
			t.Fatal(err)
		}
		err := pglock.TryLockTx(t.Context(), tx, keys...)
		var blocked *pglock.BlockedError
		if !errors.Is(err, pglock.ErrLocked) || !errors.As(err, &blocked) {
			t.Fatalf("%v: %v", keys, err)
		}
		if diff := cmp.Diff([]int32{pid(holder)}, blocked.Pids); diff != "" {
			t.Errorf("%v: blocking backends: %s", keys, diff)
		}
		if age := time.Since(blocked.Since); age < 0 || age > limit {
			t.Errorf("%v: blocked since %v", keys, blocked.Since)
		}
		if !strings.Contains(err.Error(), `"2`) {
			t.Errorf("%v: %v doesn't name the key", keys, err)
		}
		usable(t, tx)
		// None of the keys is left, and what was held before still is.
		if got := one[int64](t, tx, `SELECT sum(objid::bigint) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()`); got != 9 {
			t.Errorf("%v: left locked: keys with a sum of %d, want 9", keys, got)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// What stays behind where a try of several keys runs without a savepoint.
func TestTryLockTx_Mutant_NoSavepoint(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	holder, tx := begin(t, pool), begin(t, pool)
	if err := pglock.TryLockTx(t.Context(), holder, pglock.KeyInt64(2)); err != nil {
		t.Fatal(err)
	}
	exec(t, tx, `SELECT pg_try_advisory_xact_lock(k) FROM unnest('{1,2}'::bigint[]) k`)
	if got := one[int](t, pool, advisoryLocks); got != 2 {
		t.Errorf("%d locks are held, want the holder's and one left by the refused", got)
	}
}

func TestLockTx_Shared(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	key := pglock.KeyOf("report")
	a, b, writer := begin(t, pool), begin(t, pool), begin(t, pool)
	for _, tx := range []pgx.Tx{a, b} {
		if err := pglock.TryLockTx(t.Context(), tx, key.Shared()); err != nil {
			t.Fatal(err)
		}
	}
	var blocked *pglock.BlockedError
	if err := pglock.TryLockTx(t.Context(), writer, key); !errors.As(err, &blocked) || len(blocked.Pids) != 2 {
		t.Fatalf("an exclusive lock beside two shared ones: %v", err)
	}
	_ = a.Rollback(t.Context())
	_ = b.Rollback(t.Context())
	// Asked for in both modes, a key is locked in the stronger one.
	if err := pglock.LockTx(t.Context(), writer, key.Shared(), key, key.Shared()); err != nil {
		t.Fatal(err)
	}
	if mode := one[string](t, pool, `SELECT string_agg(mode, ',') FROM pg_locks WHERE locktype = 'advisory' AND pid = $1`, pid(writer)); mode != "ExclusiveLock" {
		t.Errorf("locked in %s", mode)
	}
}

// Two callers who name the same keys in opposite orders: locked as named they
// wait for each other, locked in order of value they don't.
func TestLockTx_Order(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	keys := []pglock.Key{pglock.KeyOf("a"), pglock.KeyOf("b"), pglock.KeyPair(1, 2), pglock.KeyInt64(-5)}
	reversed := []pglock.Key{keys[3], keys[2], keys[1], keys[0]}
	pair := func(lock func(pgx.Tx, []pglock.Key) error) (deadlocks int) {
		done := make(chan error, 2)
		for _, order := range [][]pglock.Key{keys, reversed} {
			go func() {
				done <- pgx.BeginFunc(context.Background(), pool, func(tx pgx.Tx) error { return lock(tx, order) })
			}()
		}
		for range 2 {
			if err := <-done; err != nil {
				if sqlState(err) != "40P01" {
					t.Error(err)
				} else if !strings.Contains(err.Error(), "deadlock, which aborts this transaction; Process") {
					t.Errorf("a deadlock is called %v", err)
				}
				deadlocks++
			}
		}
		return deadlocks
	}
	for range scale(100, 20) {
		if pair(func(tx pgx.Tx, keys []pglock.Key) error { return pglock.LockTx(context.Background(), tx, keys...) }) > 0 {
			t.Fatal("a deadlock though the keys were locked in one call")
		}
	}
	// The control locks the first of them, meets the other, and goes on.
	var both sync.WaitGroup
	both.Add(2)
	meet := func(tx pgx.Tx, keys []pglock.Key) error {
		if err := pglock.LockTx(context.Background(), tx, keys[0]); err != nil {
			return err
		}
		both.Done()
		both.Wait()
		return pglock.LockTx(context.Background(), tx, keys[3])
	}
	if pair(meet) != 1 {
		t.Error("locked key by key in opposite orders, there was no deadlock")
	}
}

// TestLockTx_A14_HeldIsClaimed: as many locks are held as keys were asked for,
// each key once, whatever the server's plans.
func TestLockTx_A14_HeldIsClaimed(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for _, try := range []bool{false, true} {
		tx := begin(t, pool)
		claimed := map[int64]bool{}
		var keys []pglock.Key
		for range 200 {
			k := pglock.KeyInt64(rand.Int64N(150))
			claimed[k.Int64()] = true
			keys = append(keys, k)
		}
		call := pglock.LockTx
		if try {
			call = pglock.TryLockTx
		}
		if err := call(t.Context(), tx, keys...); err != nil {
			t.Fatal(err)
		}
		if got := one[int](t, pool, advisoryLocks); got != len(claimed) {
			t.Errorf("%d locks are held, %d were asked for", got, len(claimed))
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := one[int](t, pool, advisoryLocks); got != 0 {
			t.Errorf("%d locks are held after the transaction", got)
		}
	}
	// The control: a plan that calls the function for rows that the query does
	// not return.
	tx := begin(t, pool)
	exec(t, tx, `SELECT FROM generate_series(1, 10) k WHERE pg_try_advisory_xact_lock(k) ORDER BY k LIMIT 1`)
	if got := one[int](t, pool, advisoryLocks); got != 10 {
		t.Errorf("%d locks are held by a function in WHERE, want 10", got)
	}
}

func TestLockTx_Timeout(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	key := pglock.KeyOf("busy")
	holder, tx := begin(t, pool), begin(t, pool)
	if err := pglock.LockTx(t.Context(), holder, key); err != nil {
		t.Fatal(err)
	}
	if err := pglock.SetLockTimeout(t.Context(), tx, time.Millisecond); err != nil {
		t.Fatal(err)
	}
	err := pglock.LockTx(t.Context(), tx, key)
	var blocked *pglock.BlockedError
	if !errors.As(err, &blocked) || !errors.Is(err, pglock.ErrLocked) || sqlState(err) != "55P03" {
		t.Fatal(err)
	}
	aborted(t, tx)
	_ = tx.Rollback(t.Context())
	if got := one[int](t, pool, advisoryLocks); got != 1 {
		t.Errorf("%d locks are held, want only the holder's", got)
	}
}

func TestLockTx_Cancelled(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	key := pglock.KeyOf("busy")
	holder, tx := begin(t, pool), begin(t, pool)
	if err := pglock.LockTx(t.Context(), holder, key); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- pglock.LockTx(ctx, tx, key) }()
	blockedBy(t, pool, uint32(pid(holder)))
	cancel()
	if err := <-done; !errors.Is(err, pglock.ErrLocked) || !errors.Is(err, context.Canceled) {
		t.Errorf("a wait that was given up: %v", err)
	}
	until(t, pool, "the cancelled session end", `SELECT NOT EXISTS (SELECT FROM pg_locks WHERE pid = $1)`, pid(tx))

	tx = begin(t, pool)
	for name, call := range map[string]func(context.Context, pgx.Tx, ...pglock.Key) error{"LockTx": pglock.LockTx, "TryLockTx": pglock.TryLockTx} {
		if err := call(ctx, tx, pglock.KeyOf("free")); !errors.Is(err, context.Canceled) || errors.Is(err, pglock.ErrLocked) {
			t.Errorf("%s with a context that ended before: %v", name, err)
		}
		usable(t, tx)
	}
}

func TestLockTx_BadKeys(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(context.Context, pgx.Tx, ...pglock.Key) error{"LockTx": pglock.LockTx, "TryLockTx": pglock.TryLockTx} {
		for why, key := range badKeys {
			// The transaction would panic at any use.
			err := call(t.Context(), &recorder{}, pglock.KeyOf("good"), key)
			if err == nil || !strings.Contains(err.Error(), why) {
				t.Errorf("%s(%q): %v, want one about %s", name, key, err, why)
			}
		}
		if err := call(t.Context(), &recorder{}); err == nil {
			t.Errorf("%s with no keys: no error", name)
		}
	}
}
