package pglock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// wired returns a pool straight to a database of the test's own, and one to the
// same through a wire, over which each call is one exchange: what is prepared
// would take another.
func wired(t *testing.T) (direct, through *pgxpool.Pool, wire *pgtest.Wire) {
	t.Helper()
	dsn := pgtest.DSN(t)
	wire = pgtest.Proxy(t, dsn)
	through = poolBy(t, wire.DSN(), func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec })
	return pgtest.PoolOn(t, dsn), through, wire
}

// lossOf returns when a lease's context ended, once it has.
func lossOf(l *pglock.Lease) <-chan time.Time {
	at := make(chan time.Time, 1)
	context.AfterFunc(l.Context(), func() { at <- time.Now() })
	return at
}

func unreachable(err error) bool {
	lost, ok := errors.AsType[*pglock.LostError](err)
	return ok && lost.Cause == pglock.Unreachable && errors.Is(err, pglock.ErrLost)
}

// renewed waits until the database shows a renewal of the lease from now on.
func renewed(t testing.TB, db querier, name string) {
	t.Helper()
	last := one[time.Time](t, db, `SELECT expires_at FROM pglock.leases WHERE name = $1`, name)
	until(t, db, "a renewal of "+name, `SELECT expires_at > $2 OR expires_at <= clock_timestamp() FROM pglock.leases WHERE name = $1`, name, last)
	if one[bool](t, db, `SELECT expires_at <= $2 FROM pglock.leases WHERE name = $1`, name, last) {
		t.Fatalf("%s was not renewed", name)
	}
}

// Whatever the network does, a holder knows of the loss before the next holder's
// Acquire returns: at the time before the statement was sent that the server
// answered last, plus what was left then, less the margin.
func TestFault_L3_TheHolderKnowsFirst(t *testing.T) {
	t.Parallel()
	const ttl = 1500 * time.Millisecond
	for _, tt := range []struct {
		what  string
		fault func(*pgtest.Wire)
	}{
		{"replies later than the TTL", func(w *pgtest.Wire) { w.Delay(2 * ttl) }},
		{"silence", (*pgtest.Wire).Silence},
		{"replies lost", (*pgtest.Wire).DropReplies},
		{"cut off", (*pgtest.Wire).Cut},
	} {
		t.Run(tt.what, func(t *testing.T) {
			t.Parallel()
			direct, through, wire := wired(t)
			next := newClient(t, direct)
			holder := newClient(t, through)
			acquire(t, holder, "warm", time.Hour)
			before := time.Now()
			l := acquire(t, holder, "watched", ttl)
			after := time.Now()
			deadline := l.Deadline()
			const margin = time.Millisecond + ttl/500
			if least, most := before.Add(ttl-margin), after.Add(ttl-margin); deadline.Before(least) || deadline.After(most) {
				t.Errorf("the deadline is %v after the call began, want between %v and %v",
					deadline.Sub(before), least.Sub(before), most.Sub(before))
			}
			lost := lossOf(l)
			tt.fault(wire)
			second, err := next.Acquire(t.Context(), "watched", time.Minute)
			granted := time.Now()
			if err != nil {
				t.Fatal(err)
			}
			at := <-lost
			if !at.Before(granted) {
				t.Errorf("the holder knew of the loss %v after the next holder's Acquire returned", at.Sub(granted))
			}
			if last := l.Deadline(); at.Before(last) {
				t.Errorf("the context ended %v before the deadline", last.Sub(at))
			}
			if err := l.Err(); !unreachable(err) || context.Cause(l.Context()) != err {
				t.Errorf("it was lost by %v, want %s", err, pglock.Unreachable)
			}
			if second.Token() <= l.Token() {
				t.Errorf("token %d after %d", second.Token(), l.Token())
			}
			wire.Heal()
			if err := l.Release(t.Context()); !errors.Is(err, pglock.ErrLost) {
				t.Errorf("Release after the loss says %v", err)
			}
			if err := second.Err(); err != nil {
				t.Errorf("that ended the next tenure: %v", err)
			}
		})
	}
}

// A reply to Acquire that comes after the lease has run out is no lease. The
// control is a client that counts from the reply: it believes to hold what
// somebody else has.
func TestFault_L12_ALateGrantIsNone(t *testing.T) {
	t.Parallel()
	const ttl = 500 * time.Millisecond
	direct, through, wire := wired(t)
	late, next := newClient(t, through), newClient(t, direct)
	acquire(t, late, "warm", time.Hour)
	wire.Delay(4 * ttl)
	type result struct {
		l   *pglock.Lease
		err error
		at  time.Time
	}
	results := make(chan result, 1)
	go func() {
		l, err := late.TryAcquire(t.Context(), "late", ttl)
		results <- result{l, err, time.Now()}
	}()
	until(t, direct, "the grant", `SELECT EXISTS (SELECT FROM pglock.leases WHERE name = 'late' AND claim IS NOT NULL)`)
	second, err := next.Acquire(t.Context(), "late", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	granted := time.Now()
	r := <-results
	if r.err == nil && !errors.Is(r.l.Err(), pglock.ErrLost) {
		t.Errorf("token %d is held though its reply came late", r.l.Token())
	}
	if r.err == nil {
		_ = ended(t, r.l.Context())
	}
	if believed := r.at.Add(ttl); !believed.After(granted) {
		t.Error("a client that counts from the reply would have been right: this test shows nothing")
	}
	if err := second.Err(); err != nil {
		t.Error(err)
	}
}

// Sessions that the server ends cost a second try and no lease (L5, L27).
func TestFault_L05_L27_KilledBackends(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	direct, mine := pgtest.PoolOn(t, dsn), named(t, dsn, "killed")
	c := newClient(t, mine)
	l := acquire(t, c, "kept", 6*time.Second)
	for range 2 {
		if n := one[int](t, direct, `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'killed'`); n == 0 {
			t.Error("no session was there to be killed: this test shows nothing")
		}
		acquire(t, c, "another", time.Minute)
		deadline := l.Deadline()
		renewed(t, direct, "kept")
		until(t, direct, "no other sessions than the client's few", `SELECT (`+sessions+`) <= 6`, "killed")
		if l.Err() != nil || l.Context().Err() != nil {
			t.Fatalf("lost: %v", l.Err())
		}
		if !l.Deadline().After(deadline) { // the answer may be under way
			renewed(t, direct, "kept")
		}
		exec(t, direct, `DELETE FROM pglock.leases WHERE name = 'another'`)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// A holder that the network cuts off is refused by the resource when it writes
// late, by Guard as by Fence. The control writes without either.
func TestFault_L23_TheLateWriterIsRefused(t *testing.T) {
	t.Parallel()
	direct, through, wire := wired(t)
	exec(t, direct, `CREATE TABLE account (balance int); INSERT INTO account VALUES (100)`)
	old, next := newClient(t, through), newClient(t, direct)
	l := acquire(t, old, "account", time.Second)
	wire.Silence()
	if err := ended(t, l.Context()); !unreachable(err) {
		t.Errorf("the holder was told %v", err)
	}
	second, err := next.Acquire(t.Context(), "account", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	write := func(to int, check func(tx pgx.Tx) error) error {
		return pgx.BeginFunc(t.Context(), direct, func(tx pgx.Tx) error {
			if err := check(tx); err != nil {
				_, after := tx.Exec(t.Context(), `UPDATE account SET balance = $1`, to)
				if sqlState(after) != "25P02" {
					t.Errorf("after %v the transaction goes on: %v", err, after)
				}
				return err
			}
			_, err := tx.Exec(t.Context(), `UPDATE account SET balance = $1`, to)
			return err
		})
	}
	if err := write(50, func(tx pgx.Tx) error { return l.Guard(t.Context(), tx) }); !errors.Is(err, pglock.ErrLost) {
		t.Errorf("Guard before the new holder's write says %v", err)
	}
	if err := write(60, func(tx pgx.Tx) error { return pglock.Fence(t.Context(), tx, "account", second.Token()) }); err != nil {
		t.Fatal(err)
	}
	if err := write(70, func(tx pgx.Tx) error { return l.Guard(t.Context(), tx) }); !errors.Is(err, pglock.ErrLost) {
		t.Errorf("Guard after the new holder's write says %v", err)
	}
	err = write(80, func(tx pgx.Tx) error { return pglock.Fence(t.Context(), tx, "account", l.Token()) })
	if fenced, ok := errors.AsType[*pglock.FencedError](err); !ok || fenced.Token != l.Token() || fenced.Highest != second.Token() {
		t.Errorf("Fence after the new holder's write says %v", err)
	}
	if got := one[int](t, direct, `SELECT balance FROM account`); got != 60 {
		t.Errorf("the balance is %d, want the new holder's 60", got)
	}
	if err := write(90, func(pgx.Tx) error { return nil }); err != nil || one[int](t, direct, `SELECT balance FROM account`) != 90 {
		t.Errorf("without either the late write was refused (%v): this test shows nothing", err)
	}
}

// A waiter that the network cuts off while it waits is not granted the lease
// behind its back for longer than a TTL, and doesn't believe that it has it.
func TestFault_L21_ASilencedWaiter(t *testing.T) {
	t.Parallel()
	const ttl = 2 * time.Second
	direct, through, wire := wired(t)
	holder, waiter := newClient(t, direct), newClient(t, through)
	l := acquire(t, holder, "wanted", time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	gaveUp := make(chan error, 1)
	go func() { _, err := waiter.Acquire(ctx, "wanted", ttl); gaveUp <- err }()
	waiting(t, direct, "wanted", 1)
	wire.Silence()
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := <-gaveUp; !errors.Is(err, context.Canceled) {
		t.Errorf("the waiter was told %v", err)
	}
	begun := time.Now()
	wire.Heal()
	second, err := holder.Acquire(t.Context(), "wanted", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begun); took > 10*ttl {
		t.Errorf("it took %v until the lease was free", took)
	}
	if second.Token() <= l.Token() {
		t.Errorf("token %d after %d", second.Token(), l.Token())
	}
}
