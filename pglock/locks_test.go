package pglock_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgserver"
	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// Locks shows every lock of the database, with the names of the client's own,
// and needs no schema (A02: what the dead left behind has its backend's pid).
func TestLocks(t *testing.T) {
	t.Parallel()
	pool := pgtest.PoolOn(t, pgtest.EmptyDSN(t))
	c := newClient(t, named(t, pool.Config().ConnString(), "ours"))
	elsewhere := newClient(t, pgtest.Pool(t)) // another database
	lock(t, elsewhere, pglock.KeyOf("elsewhere"))

	begun := time.Now()
	name, pair, minus := pglock.KeyOf("accounts/42"), pglock.KeyPair(math.MinInt32, -1), pglock.KeyInt64(-1)
	for _, key := range []pglock.Key{name, pair, minus.Shared()} {
		lock(t, c, key)
	}
	foreign := newConn(t, pool)
	number := pglock.KeyInt64(math.MinInt64)
	exec(t, foreign, `SELECT pg_advisory_lock($1::bigint)`, number.Int64())
	exec(t, foreign, `SELECT pg_advisory_lock_shared(7, -7)`)
	tx := begin(t, pool)
	if err := pglock.LockTx(t.Context(), tx, pglock.KeyOf("theirs")); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 2)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	waits := pglock.KeyOf("theirs")
	go func() { _, err := c.Lock(ctx, waits); done <- err }()
	until(t, pool, "the waiter in line", waiters(1))
	stranger := newConn(t, pool)
	go func() {
		_, err := stranger.Exec(ctx, `SELECT pg_advisory_lock($1)`, name.Int64())
		done <- err
	}()
	until(t, pool, "the stranger in line", waiters(2))

	infos, err := c.Locks(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ours := holder(t, pool, pglock.KeyInt64(minus.Int64()))
	role := one[string](t, pool, `SELECT current_user::text`)
	nameless := func(k pglock.Key) pglock.Key { return pglock.KeyInt64(k.Int64()) }
	var waiter int32
	for _, info := range infos {
		if info.Own && !info.Granted {
			waiter = info.Pid
		}
		switch early := info.Since.Before(begun.Add(-time.Second)); {
		case info.Pid == int32(foreign.PgConn().PID()):
			if !info.Since.IsZero() {
				t.Errorf("since %v: nobody can know", info.Since)
			}
		case early || info.Since.After(time.Now().Add(time.Second)):
			t.Errorf("%v since %v", info.Key, info.Since)
		}
	}
	want := []pglock.LockInfo{
		{Key: number, Granted: true, Pid: int32(foreign.PgConn().PID())},
		{Key: name, Name: "accounts/42", Own: true, Granted: true, Pid: ours, Program: "ours"},
		{Key: nameless(name), Pid: int32(stranger.PgConn().PID())},
		{Key: nameless(waits), Granted: true, Pid: pid(tx)},
		{Key: waits, Name: "theirs", Own: true, Pid: waiter, Program: "ours"},
		{Key: minus.Shared(), Own: true, Shared: true, Granted: true, Pid: ours, Program: "ours"},
		{Key: pglock.KeyPair(7, -7).Shared(), Shared: true, Granted: true, Pid: int32(foreign.PgConn().PID())},
		{Key: pair, Own: true, Granted: true, Pid: ours, Program: "ours"},
	}
	for i := range want {
		want[i].Role = role
	}
	byKey := cmpopts.SortSlices(func(a, b pglock.LockInfo) bool {
		return a.Key.Int64() < b.Key.Int64() || a.Key.Int64() == b.Key.Int64() && a.Granted && !b.Granted
	})
	if diff := cmp.Diff(want, infos, byKey, cmpopts.IgnoreFields(pglock.LockInfo{}, "Since"), cmp.Comparer(func(a, b pglock.Key) bool { return a == b })); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	for i := 1; i < len(infos); i++ {
		if infos[i-1].Key.Int64() == infos[i].Key.Int64() && !infos[i-1].Granted {
			t.Error("a waiter comes before the holder")
		}
	}
	cancel()
	for range 2 {
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
}

// Locks reads beside whatever is locked (R04), through a pooler, for a role that
// was granted nothing, and not after Close.
func TestLocks_OnlyReads(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	lock(t, newClient(t, pool), pglock.KeyOf("a"))
	tx := begin(t, pool)
	exec(t, tx, `LOCK TABLE pglock.leases, pglock.waiters, pglock.fences IN ACCESS EXCLUSIVE MODE`)
	for who, c := range map[string]*pglock.Client{
		"the owner":        newClient(t, pool),
		"through a pooler": newClient(t, pgtest.PoolOn(t, pgtest.PgBouncer(t, dsn))),
		"without a grant":  newClient(t, asRole(t, pool, `SELECT`)),
	} {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		infos, err := c.Locks(ctx)
		cancel()
		if err != nil || len(infos) != 1 || infos[0].Own || infos[0].Pid == 0 {
			t.Errorf("%s: %+v, %v", who, infos, err)
		}
	}
	c := pglock.New(pool)
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Locks(t.Context()); !errors.Is(err, pglock.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := newClient(t, pool).Locks(cancelled); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that ended before: %v", err)
	}
}

// A prepared transaction holds its locks without a backend.
func TestLocks_PreparedTransaction(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t, pgserver.With("max_prepared_transactions", "1"))
	pool := pgtest.PoolOn(t, server.DSN())
	c := newClient(t, pool)
	key := pglock.KeyOf("prepared")
	tx := newConn(t, pool)
	exec(t, tx, `BEGIN`)
	exec(t, tx, `SELECT pg_advisory_xact_lock($1)`, key.Int64())
	exec(t, tx, `PREPARE TRANSACTION 'left behind'`)
	_, tried := c.TryLock(t.Context(), key)
	inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
		for _, err := range []error{tried, pglock.TryLockTx(t.Context(), tx, key)} {
			if blocked, ok := errors.AsType[*pglock.BlockedError](err); !ok || !slices.Equal(blocked.Pids, []int32{0}) {
				t.Errorf("beside a prepared transaction: %v", err)
			}
		}
	})
	infos, err := c.Locks(t.Context())
	if err != nil || len(infos) != 1 || infos[0].Pid != 0 || !infos[0].Granted || infos[0].Own {
		t.Errorf("%+v, %v", infos, err)
	}
	exec(t, tx, `ROLLBACK PREPARED 'left behind'`)
	release(t, lock(t, c, key))
}
