package pglock_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// shown is what a lease row says of its holder.
type leaseRow struct {
	Holder  string
	Token   int64
	Expires time.Time
}

func rowOf(t testing.TB, db querier, name string) leaseRow {
	t.Helper()
	return leaseRow{
		Holder:  one[string](t, db, `SELECT holder FROM pglock.leases WHERE name = $1`, name),
		Token:   one[int64](t, db, `SELECT token FROM pglock.leases WHERE name = $1`, name),
		Expires: one[time.Time](t, db, `SELECT expires_at FROM pglock.leases WHERE name = $1`, name),
	}
}

// Whoever doesn't hold a lease can neither extend nor end it, with whatever
// token, and is told so.
func TestLease_L01_OnlyTheHolderRenews(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	holder := acquire(t, newClient(t, pool, pglock.WithOwner("holder")), "led", time.Hour)
	before := rowOf(t, pool, "led")
	for _, verb := range []string{"renew", "release"} {
		for _, token := range []int64{before.Token - 1, before.Token + 1, 0, 1<<63 - 1} {
			state := one[string](t, pool, `SELECT state FROM pglock.`+verb+`(ARRAY['led'], ARRAY[$1::bigint])`, token)
			if state != "taken" {
				t.Errorf("%s with token %d of a tenure with %d says %s", verb, token, before.Token, state)
			}
		}
	}
	if diff := cmp.Diff(before, rowOf(t, pool, "led")); diff != "" {
		t.Errorf("a stranger changed the tenure:\n%s", diff)
	}
	if state := one[string](t, pool, `SELECT state FROM pglock.renew('{led}', ARRAY[$1::bigint])`, int64(holder.Token())); state != "held" {
		t.Errorf("renewing with the token granted says %s", state)
	}
	if after := rowOf(t, pool, "led"); !after.Expires.After(before.Expires) {
		t.Error("the holder's own renewal extended nothing: the test is blind")
	}
}

// What has expired is neither renewed nor released.
func TestLease_L10_NothingIsDoneToWhatHasExpired(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	l := acquire(t, newClient(t, pool), "over", time.Hour)
	expire(t, pool, "over")
	for _, verb := range []string{"renew", "release"} {
		if state := one[string](t, pool, `SELECT state FROM pglock.`+verb+`('{over}', ARRAY[$1::bigint])`, int64(l.Token())); state != "expired" {
			t.Errorf("%s after the expiry says %s", verb, state)
		}
	}
	var lost *pglock.LostError
	if err := l.Release(t.Context()); !errors.As(err, &lost) || lost.Cause != pglock.Expired {
		t.Errorf("Release after the expiry says %v", err)
	}
}

// A waiter whose listening connection is ended listens again, and is woken. Its
// ticket would be refreshed, and the lease looked at, only in twenty minutes.
func TestLease_L22_AWaiterListensAgain(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	holder := acquire(t, newClient(t, pool), "heard", time.Hour)
	waiter := newClient(t, pool)
	granted := make(chan error, 1)
	go func() {
		_, err := waiter.Acquire(t.Context(), "heard", time.Hour)
		granted <- err
	}()
	waiting(t, pool, "heard", 1)
	const listens = `FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND query ~ 'pg_notify|LISTEN'`
	listener := one[int32](t, pool, `SELECT pid `+listens)
	exec(t, pool, `SELECT pg_terminate_backend($1)`, listener)
	until(t, pool, "another listener", `SELECT count(*) = 1 AND min(pid) <> $1 `+listens, listener)
	if err := holder.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-granted:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(limit):
		t.Error("the waiter was not woken")
	}
}

// A lease is free at its expiry to the microsecond: who takes one for a period,
// and does so again each period, misses none.
func TestLease_L34_FreeAtTheExpiry(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	const take = `SELECT granted FROM pglock.acquire('{tick}', '1 h')`
	for tick := range 100 {
		if !one[bool](t, pool, take) {
			t.Fatalf("tick %d found the lease of the tick before", tick)
		}
		if tick == 0 && one[bool](t, pool, take) {
			t.Fatal("it was granted twice: the test is blind")
		}
		expire(t, pool, "tick")
	}
}
