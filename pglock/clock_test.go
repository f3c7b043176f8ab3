package pglock_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// The clock of a client is in no statement: it may be wrong by hours.
func TestClock_L32_NoClientTimeInAnyStatement(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	direct := pgtest.PoolOn(t, dsn)
	pool, spy := spied(t, dsn)
	c := newClient(t, pool)
	l := acquire(t, c, "timeless", 6*time.Second)
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = c.Acquire(t.Context(), "timeless", time.Minute) })
	waiting(t, direct, "timeless", 1)
	renewed(t, direct, "timeless")
	inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
		if err := errors.Join(l.Guard(t.Context(), tx), pglock.Fence(t.Context(), tx, "timeless", l.Token())); err != nil {
			t.Error(err)
		}
	})
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
	wg.Wait()
	for _, verb := range []string{"acquire", "enqueue", "renew", "guard", "fence", "release"} {
		if len(spy.heard("pglock."+verb)) == 0 {
			t.Errorf("the spy heard no %s: this test shows nothing", verb)
		}
	}
	timed := func() (found []string) {
		for _, st := range spy.heard("") {
			if slices.ContainsFunc(st.args, hasTime) {
				found = append(found, st.sql)
			}
		}
		return slices.Compact(found)
	}
	if found := timed(); len(found) != 0 {
		t.Errorf("these carry a time: %q", found)
	}
	exec(t, pool, `SELECT $1::timestamptz`, time.Now())
	if len(timed()) != 1 {
		t.Error("a time was not noticed: this test shows nothing")
	}
}

// hasTime reports whether an argument is a point in time, or text that PostgreSQL
// would read as one.
func hasTime(arg any) bool {
	switch arg := arg.(type) {
	case time.Time, *time.Time:
		return true
	case string:
		for _, layout := range []string{time.RFC3339Nano, "2006-01-02 15:04:05", time.DateOnly} {
			if _, err := time.Parse(layout, arg); err == nil {
				return true
			}
		}
	}
	return false
}

// The server's clock may be set: a holder that can't ask ends on its own
// monotonic deadline, however long the row says that it has; one that can ask
// is told. Tokens rise all the same.
func TestClock_L52_TheClockIsSet(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		what, shift string
		silent      bool
		want        pglock.Cause
	}{
		{"back, out of reach", "1 h", true, pglock.Unreachable}, // an expiry is then further away
		{"ahead, out of reach", "-1 h", true, pglock.Unreachable},
		{"ahead", "-1 h", false, pglock.Expired},
	} {
		t.Run(tt.what, func(t *testing.T) {
			t.Parallel()
			direct, through, wire := wired(t)
			next := newClient(t, direct)
			l := acquire(t, newClient(t, through), "shifted", 1500*time.Millisecond)
			lost := lossOf(l)
			if tt.silent {
				wire.Silence()
			}
			exec(t, direct, `UPDATE pglock.leases SET expires_at = expires_at + $1::interval`, tt.shift)
			at := <-lost
			if lost, ok := errors.AsType[*pglock.LostError](context.Cause(l.Context())); !ok || lost.Cause != tt.want {
				t.Errorf("lost by %v, want %s", context.Cause(l.Context()), tt.want)
			}
			if tt.silent && at.Before(l.Deadline()) {
				t.Errorf("lost %v before its deadline", l.Deadline().Sub(at))
			}
			if over := time.Since(l.Deadline()); over > limit/4 {
				t.Errorf("lost %v after its deadline", over)
			}
			_, err := next.TryAcquire(t.Context(), "shifted", time.Minute)
			if held := errors.Is(err, pglock.ErrLocked); held != (tt.shift == "1 h") {
				t.Errorf("a try says %v", err)
			}
			expire(t, direct, "shifted")
			second, err := next.Acquire(t.Context(), "shifted", time.Minute)
			if err != nil {
				t.Fatal(err)
			}
			if second.Token() <= l.Token() {
				t.Errorf("token %d after %d", second.Token(), l.Token())
			}
		})
	}
}
