package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

func TestLease_L2_OneHolder(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	a := newClient(t, pool, pglock.WithOwner("a"))
	b := newClient(t, pool, pglock.WithOwner("b"))
	before := time.Now()
	l, err := a.TryAcquire(t.Context(), "one", time.Minute, pglock.WithMetadata(map[string]string{"job": "nightly"}))
	if err != nil {
		t.Fatal(err)
	}
	if l.Name() != "one" || l.Owner() != "a" || l.Token() <= 0 || l.Err() != nil || l.Context().Err() != nil {
		t.Errorf("acquired %q for %q with token %d: %v", l.Name(), l.Owner(), l.Token(), l.Err())
	}
	if left := l.Deadline().Sub(before); left < 50*time.Second || left > time.Minute+limit {
		t.Errorf("the deadline is %v after the call", left)
	}
	if got := one[string](t, pool, `SELECT metadata->>'job' FROM pglock.leases WHERE name = 'one'`); got != "nightly" {
		t.Errorf("metadata says %q", got)
	}
	_, err = b.TryAcquire(t.Context(), "one", time.Minute)
	held, _ := errors.AsType[*pglock.HeldError](err)
	if held == nil || !errors.Is(err, pglock.ErrLocked) || errors.Is(err, pglock.ErrLost) {
		t.Fatalf("a try on a held lease said %v, want a HeldError", err)
	}
	expires := one[time.Time](t, pool, `SELECT expires_at FROM pglock.leases WHERE name = 'one'`)
	if held.Name != "one" || held.Owner != "a" || held.Token != l.Token() || !held.ExpiresAt.Equal(expires) {
		t.Errorf("it said %+v, want owner a, token %d, until %v", held, l.Token(), expires)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	second, err := b.TryAcquire(t.Context(), "one", time.Minute)
	if err != nil {
		t.Fatalf("a try on a released lease said %v", err)
	}
	if second.Token() <= l.Token() {
		t.Errorf("token %d after %d", second.Token(), l.Token())
	}
}

// A losing try writes nothing: it gets no transaction id and updates no row.
func TestLease_L2_ALosingTryWritesNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	mutate(t, pool, takeExcluded)
	acquire(t, newClient(t, pool), "held", time.Hour)
	wrote := func(schema string) bool {
		var wrote bool
		inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
			if one[bool](t, tx, `SELECT granted FROM `+schema+`.acquire('{held}', '1 h')`) {
				t.Fatalf("%s granted a held lease", schema)
			}
			wrote = one[bool](t, tx, `SELECT pg_current_xact_id_if_assigned() IS NOT NULL`)
		})
		return wrote
	}
	if wrote("pglock") {
		t.Error("a losing try wrote")
	}
	if !wrote("mutant") {
		t.Error("the mutant's losing try did not write: this test shows nothing")
	}
}

// A crashed owner's lease is held until it expires, and free to the first try
// after that.
func TestLease_L08_FreeAtTheFirstTryAfterExpiry(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	exec(t, pool, `SELECT pglock.acquire('{crashed}', '1 h', owner => 'gone')`)
	_, err := c.TryAcquire(t.Context(), "crashed", time.Minute)
	if held, ok := errors.AsType[*pglock.HeldError](err); !ok || held.Owner != "gone" || time.Until(held.ExpiresAt) < 50*time.Minute {
		t.Fatalf("before the expiry: %v", err)
	}
	expire(t, pool, "crashed")
	acquire(t, c, "crashed", time.Minute)
}

// The expiry that was granted counts, not the TTL of whoever comes.
func TestLease_L36_TheHoldersTTLCounts(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	a, b := newClient(t, pool), newClient(t, pool)
	acquire(t, a, "long", time.Hour)
	if _, err := b.TryAcquire(t.Context(), "long", 100*time.Millisecond); !errors.Is(err, pglock.ErrLocked) {
		t.Errorf("a candidate with a short TTL got %v, want ErrLocked", err)
	}
}

// Callers of one client and one owner are claims of their own.
func TestLease_L15_CallersOfOneClientExcludeEachOther(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	var mu sync.Mutex
	inside, most := 0, 0
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 5 {
				err := c.WithLease(t.Context(), "ticks", time.Minute, func(context.Context, *pglock.Lease) error {
					mu.Lock()
					inside++
					most = max(most, inside)
					mu.Unlock()
					one[bool](t, pool, `SELECT true`)
					mu.Lock()
					inside--
					mu.Unlock()
					return nil
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if most != 1 {
		t.Errorf("%d were inside at once", most)
	}
}

// Two handles under the same owner: neither frees the other's tenure.
func TestLease_L14_SameOwnerIsNotSameTenure(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	a := newClient(t, pool, pglock.WithOwner("same"))
	b := newClient(t, pool, pglock.WithOwner("same"))
	first := acquire(t, a, "owned", time.Hour)
	expire(t, pool, "owned")
	second := acquire(t, b, "owned", time.Hour)
	err := first.Release(t.Context())
	if lost, ok := errors.AsType[*pglock.LostError](err); !ok || lost.Cause != pglock.Taken {
		t.Errorf("the release of the tenure before said %v, want a loss: taken", err)
	}
	if err := second.Err(); err != nil {
		t.Errorf("it ended the second tenure: %v", err)
	}
	if got := one[int64](t, pool, `SELECT token FROM pglock.leases WHERE claim IS NOT NULL`); got != int64(second.Token()) {
		t.Errorf("the row has token %d, want %d", got, second.Token())
	}
}

func TestLease_L13_ReleaseSaysWhatBecameOfIt(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c, other := newClient(t, pool), newClient(t, pool)
	cause := func(err error) pglock.Cause {
		if lost, ok := errors.AsType[*pglock.LostError](err); ok && errors.Is(err, pglock.ErrLost) {
			return lost.Cause
		}
		return ""
	}
	t.Run("expired", func(t *testing.T) {
		l := acquire(t, c, "expired", time.Hour)
		expire(t, pool, "expired")
		for range 2 {
			if err := l.Release(t.Context()); cause(err) != pglock.Expired {
				t.Errorf("Release said %v", err)
			}
		}
	})
	t.Run("taken", func(t *testing.T) {
		l := acquire(t, c, "taken", time.Hour)
		expire(t, pool, "taken")
		acquire(t, other, "taken", time.Hour)
		for range 2 {
			if err := l.Release(t.Context()); cause(err) != pglock.Taken {
				t.Errorf("Release said %v", err)
			}
		}
	})
	t.Run("by force", func(t *testing.T) {
		l := acquire(t, c, "force", time.Hour)
		exec(t, pool, `SELECT pglock.release('{force}', ARRAY[$1::bigint])`, int64(l.Token()))
		if err := l.Release(t.Context()); cause(err) != pglock.ForceReleased {
			t.Errorf("Release said %v", err)
		}
	})
	t.Run("released", func(t *testing.T) {
		l := acquire(t, c, "released", time.Hour)
		for range 2 {
			if err := l.Release(t.Context()); err != nil {
				t.Errorf("Release said %v", err)
			}
		}
		if l.Err() != pglock.ErrReleased || context.Cause(l.Context()) != pglock.ErrReleased {
			t.Errorf("after it, Err says %v", l.Err())
		}
	})
}

// Release works when the caller's context has ended.
func TestLease_L6_ReleaseOutlivesItsContext(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	l := acquire(t, c, "cancelled", time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Release(ctx); err != nil {
		t.Fatal(err)
	}
	acquire(t, c, "cancelled", time.Hour)
}

// A release beside an open guard waits for it, then says who is in the way, and
// can be repeated.
func TestLease_L11_ReleaseBesideAnOpenGuard(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	for _, guards := range []int{1, 2} { // one locker, and a multixact
		l := acquire(t, c, "guarded", 1200*time.Millisecond)
		var open []pgx.Tx
		var want []int32
		for range guards {
			conn := newConn(t, pool)
			tx, err := conn.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if err := pglock.SetHoldTimeout(t.Context(), tx, limit); err != nil {
				t.Fatal(err)
			}
			if err := l.Guard(t.Context(), tx); err != nil {
				t.Fatal(err)
			}
			open, want = append(open, tx), append(want, int32(conn.PgConn().PID()))
		}
		ctx := l.Context()
		err := l.Release(t.Context())
		blocked, _ := errors.AsType[*pglock.BlockedError](err)
		if blocked == nil || !errors.Is(err, pglock.ErrLocked) {
			t.Fatalf("Release beside a guard said %v, want a BlockedError", err)
		}
		if len(blocked.Pids) != guards || blocked.Since.IsZero() {
			t.Errorf("it names backends %v since %v, want %v", blocked.Pids, blocked.Since, want)
		}
		if ctx.Err() == nil {
			t.Error("the context from before the release has not ended")
		}
		if l.Err() != nil || l.Context().Err() != nil {
			t.Errorf("after it the lease says %v, want that it is held", l.Err())
		}
		for _, tx := range open {
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if err := l.Release(t.Context()); err != nil {
			t.Fatalf("Release after the guard said %v", err)
		}
	}
}

func TestLease_L4_RenewalNeitherRevivesNorCreates(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	mutate(t, pool, renewReviving)
	state := func(schema, name string, token int64) string {
		return one[string](t, pool, `SELECT coalesce((SELECT state FROM `+schema+`.renew(ARRAY[$1], ARRAY[$2::bigint])), 'no row')`, name, token)
	}
	grant := func(name string) int64 {
		return one[int64](t, pool, `SELECT token FROM pglock.acquire(ARRAY[$1], '1 h')`, name)
	}
	row := func(name string) string {
		return one[string](t, pool, `SELECT coalesce((SELECT l::text FROM pglock.leases l WHERE name = $1), 'none')`, name)
	}
	for _, tt := range []struct {
		name string
		end  func(name string, token int64)
		want string
	}{
		{"held", func(string, int64) {}, "held"},
		{"expired", func(name string, _ int64) { expire(t, pool, name) }, "expired"},
		{"taken", func(name string, _ int64) { expire(t, pool, name); grant(name) }, "taken"},
		{"taken and released", func(name string, _ int64) {
			expire(t, pool, name)
			exec(t, pool, `SELECT pglock.release(ARRAY[$1], ARRAY[$2::bigint])`, name, grant(name))
		}, "taken"},
		{"released", func(name string, token int64) {
			exec(t, pool, `SELECT pglock.release(ARRAY[$1], ARRAY[$2::bigint])`, name, token)
		}, "idle"},
		{"purged", func(name string, token int64) { exec(t, pool, `DELETE FROM pglock.leases WHERE name = $1`, name) }, "expired"},
	} {
		token := grant(tt.name)
		tt.end(tt.name, token)
		before := row(tt.name)
		if got := state("pglock", tt.name, token); got != tt.want {
			t.Errorf("renewal of a tenure %s says %q", tt.name, got)
		}
		if after := row(tt.name); tt.want != "held" && after != before {
			t.Errorf("renewal of a tenure %s changed the row from %s to %s", tt.name, before, after)
		}
	}
	expire(t, pool, "held")
	if got := state("mutant", "held", one[int64](t, pool, `SELECT token FROM pglock.leases WHERE name = 'held'`)); got != "held" {
		t.Errorf("the mutant says %q of an expired tenure: this test shows nothing", got)
	}
	if got := state("pglock", "held", 1<<62); got != "taken" {
		t.Errorf("renewal with a token never granted says %q", got)
	}
}

// A renewal never waits for a row, and what it could not ask it does not guess.
func TestLease_L4_RenewalBesideALockedRow(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	tokens := one[[]int64](t, pool, `SELECT array_agg(token ORDER BY name) FROM pglock.acquire('{a,b,c}', '1 h')`)
	inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
		exec(t, tx, `SELECT FROM pglock.leases WHERE name = 'b' FOR UPDATE`)
		got := one[string](t, newConn(t, pool), `SELECT string_agg(name || ' ' || state, ', ' ORDER BY name) FROM pglock.renew('{a,b,c}', $1)`, tokens)
		if want := "a held, b busy, c held"; got != want {
			t.Errorf("renewal says %q, want %q", got, want)
		}
	})
}

// A name, a token and a role: guessing the first two is not enough.
func TestLease_L4_TenuresBelongToARole(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	l := acquire(t, newClient(t, pool), "mine", time.Hour)
	role := "guesser_" + one[string](t, pool, `SELECT substr(md5(random()::text), 1, 12)`)
	exec(t, pool, `CREATE ROLE `+role+` LOGIN; GRANT USAGE ON SCHEMA pglock TO `+role+`; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock TO `+role)
	t.Cleanup(func() { exec(t, pool, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	guesser := newConn(t, pool)
	exec(t, guesser, `SET SESSION AUTHORIZATION `+role)
	for _, verb := range []string{"renew", "release"} {
		if got := one[string](t, guesser, `SELECT state FROM pglock.`+verb+`('{mine}', ARRAY[$1::bigint])`, int64(l.Token())); got != "taken" {
			t.Errorf("%s by another role says %q", verb, got)
		}
	}
	if _, err := guesser.Exec(t.Context(), `SELECT pglock.guard('mine', $1)`, int64(l.Token())); sqlState(err) != "PW002" {
		t.Errorf("guard by another role says %v", err)
	}
	if got := one[bool](t, guesser, `SELECT granted FROM pglock.acquire('{mine}', '1 h', claim => $1)`,
		one[[16]byte](t, pool, `SELECT claim FROM pglock.leases WHERE name = 'mine'`)); got {
		t.Error("another role was granted a tenure by its claim")
	}
	if err := l.Release(t.Context()); err != nil {
		t.Errorf("after all that, the holder's release said %v", err)
	}
}

// Creating a name waits for nobody longer than a moment (fact 20). The mutant
// waits for as long as another creator's transaction is open.
func TestLease_Fact20_CreatingANameIsBounded(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	mutate(t, pool, takeCreating)
	creator, hung := newConn(t, pool), newConn(t, pool)
	exec(t, creator, `BEGIN; SELECT pglock.acquire('{new}', '1 h')`)
	_, err := newClient(t, pool).TryAcquire(t.Context(), "new", time.Minute)
	if held, ok := errors.AsType[*pglock.HeldError](err); !ok || held.Token != 0 || held.Name != "new" {
		t.Errorf("a try beside an open creation said %v, want a HeldError that names nobody", err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := hung.Exec(context.Background(), `SELECT mutant.acquire('{new}', '1 h')`)
		done <- err
	}()
	blockedBy(t, pool, creator.PgConn().PID())
	exec(t, creator, `COMMIT`)
	if err := <-done; err != nil {
		t.Fatal(err)
	}

	// In two orders: neither deadlocks nor waits for long.
	first, second := newConn(t, pool), newConn(t, pool)
	exec(t, first, `BEGIN; SELECT pglock.acquire('{x}', '1 h')`)
	exec(t, second, `BEGIN; SELECT pglock.acquire('{y}', '1 h')`)
	for conn, name := range map[*pgx.Conn]string{first: "{y}", second: "{x}"} {
		if got := one[string](t, conn, `SELECT granted || ' ' || coalesce(token::text, 'nobody') FROM pglock.acquire($1::text[], '1 h')`, name); got != "false nobody" {
			t.Errorf("acquire of a name that is being created says %q", got)
		}
	}
	exec(t, first, `COMMIT`)
	exec(t, second, `COMMIT`)
}

// A repeat of acquire with the same claim has the effect of one.
func TestLease_L5_ARepeatedClaimIsOneGrant(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	conn := newConn(t, pool)
	const claim = "00000000-0000-4000-8000-000000000001"
	type grant struct {
		Granted bool
		Token   int64
		Expires time.Time
	}
	ask := func(claim string) grant {
		rows, _ := conn.Query(t.Context(), `SELECT granted, token, expires_at FROM pglock.acquire('{again}', '1 h', $1::uuid)`, claim)
		g, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[grant])
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	first := ask(claim)
	if again := ask(claim); again != first || !first.Granted {
		t.Errorf("the repeat says %+v, want %+v", again, first)
	}
	if other := ask(strings.Replace(claim, "1", "2", 1)); other.Granted {
		t.Error("another claim was granted a held lease")
	}
}

func TestWithLease(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	free := func(name string) bool {
		return one[bool](t, pool, `SELECT claim IS NULL FROM pglock.leases WHERE name = $1`, name)
	}
	oops := errors.New("oops")
	t.Run("returns what fn returns, and releases after it", func(t *testing.T) {
		err := c.WithLease(t.Context(), "plain", time.Minute, func(ctx context.Context, l *pglock.Lease) error {
			if free("plain") || l.Err() != nil || ctx.Err() != nil {
				t.Error("fn runs without the lease")
			}
			return oops
		})
		if err == nil || !errors.Is(err, oops) || errors.Is(err, pglock.ErrLost) || !free("plain") {
			t.Errorf("%v; free afterwards: %v", err, free("plain"))
		}
	})
	t.Run("says that the lease was lost though fn did not", func(t *testing.T) {
		err := c.WithLease(t.Context(), "lost", time.Minute, func(context.Context, *pglock.Lease) error {
			expire(t, pool, "lost")
			return nil
		})
		if !errors.Is(err, pglock.ErrLost) {
			t.Errorf("got %v, want ErrLost", err)
		}
	})
	t.Run("releases when fn panics", func(t *testing.T) {
		defer func() {
			if recover() == nil || !free("panics") {
				t.Errorf("free after the panic: %v", free("panics"))
			}
		}()
		_ = c.WithLease(t.Context(), "panics", time.Minute, func(context.Context, *pglock.Lease) error { panic("boom") })
	})
	// The local state ends first, then the function, then the tenure (L38).
	t.Run("L38: cancelled, it waits for fn and then releases", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		err := c.WithLease(ctx, "slow", time.Minute, func(ctx context.Context, l *pglock.Lease) error {
			cancel()
			<-ctx.Done()
			if free("slow") || l.Err() != nil {
				t.Error("the lease was released before fn returned")
			}
			return ctx.Err()
		})
		if !errors.Is(err, context.Canceled) || !free("slow") {
			t.Errorf("%v; free afterwards: %v", err, free("slow"))
		}
	})
	// A function that looks at its context alone learns of the loss (L40).
	t.Run("L40: the context of fn ends with the lease", func(t *testing.T) {
		err := c.WithLease(t.Context(), "watched", 3*time.Second, func(ctx context.Context, l *pglock.Lease) error {
			expire(t, pool, "watched")
			<-ctx.Done()
			return context.Cause(ctx)
		})
		if lost, ok := errors.AsType[*pglock.LostError](err); !ok || lost.Cause != pglock.Expired {
			t.Errorf("got %v, want a loss: expired", err)
		}
	})
}

// Printing a handle shows what it stands for and touches nothing that changes.
func TestHandles_ArePrinted(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	l := acquire(t, c, "printed", time.Minute)
	if got, want := fmt.Sprint(l), fmt.Sprintf(`lease "printed", token %d`, l.Token()); got != want {
		t.Errorf("a lease prints %s, want %s", got, want)
	}
	lock, err := c.Lock(t.Context(), pglock.KeyOf("printed").Shared())
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(lock), `advisory lock "printed (shared)"`; got != want {
		t.Errorf("a lock prints %s, want %s", got, want)
	}
}

// A wait that is given up says so, and that somebody had the lease.
func TestAcquire_GivenUp(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	a, b := newClient(t, pool), newClient(t, pool)
	acquire(t, a, "wanted", time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		_, err := b.Acquire(ctx, "wanted", time.Minute)
		ended <- err
	}()
	waiting(t, pool, "wanted", 1)
	cancel()
	if err := <-ended; !errors.Is(err, pglock.ErrLocked) || !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want ErrLocked and Canceled", err)
	}
}

// The database's default isolation level is the user's affair.
func TestLease_Fact11_AnyDefaultIsolationLevel(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			exec(t, pool, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = `+"''"+string(level)+"''"+`', current_database()); END $$`)
			fresh := reopen(t, pool)
			if got := one[string](t, fresh, `SHOW transaction_isolation`); got != string(level) {
				t.Fatalf("the default is %s, want %s", got, level)
			}
			c := newClient(t, fresh)
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					for range 20 {
						err := c.WithLease(t.Context(), "level", time.Minute, func(ctx context.Context, l *pglock.Lease) error { return nil })
						if err != nil {
							t.Error(err)
						}
					}
				})
			}
			wg.Wait()
			renewed := acquire(t, c, "renewed", 3*time.Second)
			deadline := renewed.Deadline()
			for !renewed.Deadline().After(deadline) && renewed.Err() == nil {
				one[bool](t, pool, `SELECT true`)
			}
			if err := renewed.Release(t.Context()); err != nil {
				t.Errorf("release after a renewal said %v", err)
			}
		})
	}
}

// reopen returns another pool on the same database.
func reopen(t *testing.T, pool *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	fresh, err := pgxpool.NewWithConfig(t.Context(), pool.Config())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(fresh.Close)
	return fresh
}
