package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// What many goroutines ask for at once goes in few statements; what is asked for
// one by one goes in a statement each, and by no exchange.
func TestCourier_SharesStatements(t *testing.T) {
	t.Parallel()
	const goroutines = 64
	rounds := scale(20, 5)
	for _, tt := range []struct {
		verb   string
		waited bool // somebody has waited before, so that Acquire may draw tickets
		get    func(*pglock.Client, context.Context, string, time.Duration, ...pglock.LeaseOption) (*pglock.Lease, error)
	}{
		{"TryAcquire", false, (*pglock.Client).TryAcquire},
		{"Acquire", false, (*pglock.Client).Acquire},
		{"Acquire, others have waited", true, (*pglock.Client).Acquire},
	} {
		t.Run(tt.verb, func(t *testing.T) {
			t.Parallel()
			pool, spy := spied(t, pgtest.DSN(t))
			c := newClient(t, pool)
			if tt.waited {
				haveWaited(t, c, pool)
			}
			pair := func(ctx context.Context, name string) error {
				l, err := tt.get(c, ctx, name, time.Hour)
				if err != nil {
					return err
				}
				return l.Release(ctx)
			}
			sent := func() (n int) {
				for _, verb := range []string{"acquire_one", "enqueue", "release_one", "exchange"} {
					n += len(spy.heard("FROM pglock." + verb + "("))
				}
				return n
			}
			before, exchanges := sent(), len(spy.heard("pglock.exchange"))
			for i := range rounds {
				if err := pair(t.Context(), fmt.Sprint(i)); err != nil {
					t.Fatal(err)
				}
			}
			exchanges = len(spy.heard("pglock.exchange")) - exchanges
			if n := sent() - before; n != 2*rounds || exchanges != 0 {
				t.Errorf("one by one %d pairs took %d statements, %d of them exchanges: want 2 each, and none", rounds, n, exchanges)
			}
			before = sent()
			g, ctx := errgroup.WithContext(t.Context())
			for i := range goroutines {
				g.Go(func() error {
					for range rounds {
						if err := pair(ctx, fmt.Sprint(i)); err != nil {
							return err
						}
					}
					return nil
				})
			}
			if err := g.Wait(); err != nil {
				t.Fatal(err)
			}
			n, pairs := sent()-before, goroutines*rounds
			t.Logf("%d pairs by %d goroutines took %d statements", pairs, goroutines, n)
			if n > pairs/2 {
				t.Errorf("%d pairs by %d goroutines took %d statements, want far fewer than %d", pairs, goroutines, n, 2*pairs)
			}
			if held := one[int64](t, pool, heldRows); held != 0 {
				t.Errorf("%d leases are left over", held)
			}
		})
	}
}

// haveWaited has somebody of the client wait in line, and be granted.
func haveWaited(t *testing.T, c *pglock.Client, pool *pgxpool.Pool) {
	t.Helper()
	l := acquire(t, c, "waited for", time.Hour)
	done := make(chan error, 1)
	go func() {
		next, err := c.Acquire(t.Context(), "waited for", time.Hour)
		if err == nil {
			err = next.Release(t.Context())
		}
		done <- err
	}()
	waiting(t, pool, "waited for", 1)
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// outcome is what a call in an exchange returned.
type outcome struct {
	name  string
	lease *pglock.Lease
	err   error
}

// tries returns calls that try a lease each, and where their outcomes come.
func tries(ctx context.Context, c *pglock.Client, ttl time.Duration, names ...string) (calls []func(), got chan outcome) {
	got = make(chan outcome, len(names))
	for _, name := range names {
		calls = append(calls, func() {
			l, err := c.TryAcquire(ctx, name, ttl)
			got <- outcome{name, l, err}
		})
	}
	return calls, got
}

// releases returns calls that release a lease each.
func releases(ctx context.Context, leases ...*pglock.Lease) (calls []func(), got chan outcome) {
	got = make(chan outcome, len(leases))
	for _, l := range leases {
		calls = append(calls, func() { got <- outcome{l.Name(), l, l.Release(ctx)} })
	}
	return calls, got
}

// hold acquires leases one by one.
func hold(t *testing.T, c *pglock.Client, names ...string) (held []*pglock.Lease) {
	t.Helper()
	for _, name := range names {
		held = append(held, acquire(t, c, name, time.Hour))
	}
	return held
}

func numbered(prefix string, n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("%s/%d", prefix, i))
	}
	return names
}

// Each call of an exchange has its own TTL, metadata and deadline, the deadline
// counted from before the exchange was sent.
func TestCourier_EachItsOwn(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	c, gate := turnstiled(t, dsn)
	const n = 8
	type own struct {
		ttl  time.Duration
		mark string
	}
	wants := map[string]own{}
	got := make(chan outcome, n)
	var calls []func()
	for i, name := range numbered("own", n) {
		want := own{time.Duration(1+i/2) * time.Minute, fmt.Sprint(i % 3)}
		wants[name] = want
		calls = append(calls, func() {
			l, err := c.TryAcquire(t.Context(), name, want.ttl, pglock.WithMetadata(map[string]string{"mark": want.mark}))
			got <- outcome{name, l, err}
		})
	}
	gate.together(t, c, calls...)
	opened := time.Now()
	gate.let()
	for range n {
		o := <-got
		if o.err != nil {
			t.Fatal(o.err)
		}
		want := wants[o.name]
		var now own
		if err := pool.QueryRow(t.Context(), `SELECT ttl, metadata ->> 'mark' FROM pglock.leases WHERE name = $1 AND token = $2`,
			o.name, int64(o.lease.Token())).Scan(&now.ttl, &now.mark); err != nil || now != want {
			t.Errorf("%s has %v (%v), want %v", o.name, now, err, want)
		}
		if d := o.lease.Deadline(); d.After(opened.Add(want.ttl)) {
			t.Errorf("%s: the deadline is %v later than one counted from the send", o.name, d.Sub(opened.Add(want.ttl)))
		}
	}
}

// refuseBad makes a lease that nobody is granted.
func refuseBad(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	exec(t, pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '23514'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON pglock.leases FOR EACH ROW WHEN (NEW.name = 'bad' AND NEW.claim IS NOT NULL) EXECUTE FUNCTION refuse();
		SELECT pglock.create_names('{bad}')`)
}

// Tries of one name that share an answer, and then have none because the server
// has refused the exchange, are tries of their own: one wins.
func TestCourier_OneNameBesideABadRequest(t *testing.T) {
	t.Parallel()
	pool, spy := spied(t, pgtest.DSN(t))
	refuseBad(t, pool)
	c := newClient(t, pool)
	shown(t, func(try int) bool {
		const each = 8
		name := fmt.Sprint("same/", try)
		var names []string
		for range each {
			names = append(names, name, "bad")
		}
		calls, got := tries(t.Context(), c, time.Hour, names...)
		for _, call := range calls {
			go call()
		}
		won := 0
		for range calls {
			switch o := <-got; {
			case o.err == nil && o.name == name:
				won++
			case o.err == nil || o.name == name && !errors.Is(o.err, pglock.ErrLocked):
				t.Errorf("%s: %v", o.name, o.err)
			}
		}
		if won != 1 {
			t.Errorf("%d hold %s", won, name)
		}
		return slices.ContainsFunc(spy.heard("pglock.exchange($1"), func(st *statement) bool {
			return slices.Contains(st.wanted(), name) && slices.Contains(st.wanted(), "bad")
		})
	})
}

// A call that the server refuses fails no other that it goes with. The control
// is the exchange itself, which then does nothing.
func TestCourier_OneBadRequest(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	refuseBad(t, pool)
	_, err := pool.Exec(t.Context(), `SELECT pglock.exchange('{}', '{}', '{good,bad}', '{1 h,1 h}', '{NULL,NULL}')`)
	if sqlState(err) != "23514" || one[int64](t, pool, heldRows) != 0 {
		t.Fatalf("the exchange says %v, with %d leases held: this test shows nothing", err, one[int64](t, pool, heldRows))
	}
	c, gate := turnstiled(t, dsn)
	shown(t, func(try int) bool {
		held := hold(t, c, numbered(fmt.Sprint("held/", try), 4)...)
		freeing, freed := releases(t.Context(), held...)
		trying, got := tries(t.Context(), c, time.Hour, append([]string{"bad"}, numbered(fmt.Sprint("good/", try), 4)...)...)
		statements := gate.together(t, c, append(trying, freeing...)...)
		gate.let()
		for range freeing {
			if o := <-freed; o.err != nil {
				t.Errorf("release of %s: %v", o.name, o.err)
			}
		}
		for range trying {
			if o := <-got; o.name == "bad" && (sqlState(o.err) != "23514" || errors.Is(o.err, pglock.ErrLocked)) || o.name != "bad" && o.err != nil {
				t.Errorf("%s: %v", o.name, o.err)
			}
		}
		return accompanied(statements, "bad")
	})
}

// A caller who gives up has the call's end at once, and what the exchange still
// grants is given back. The others have theirs.
func TestCourier_GivenUp(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	for _, tt := range []struct {
		name   string
		others int
	}{{"with others", 6}, {"all of them", 0}} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			shown(t, func(try int) bool {
				c, gate := turnstiled(t, dsn)
				name := fmt.Sprint(t.Name(), try)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				giving, gaveUp := tries(ctx, c, time.Hour, numbered(name+"/gives up", 2)...)
				staying, stayed := tries(t.Context(), c, time.Hour, numbered(name+"/stays", tt.others)...)
				statements := gate.together(t, c, append(giving, staying...)...)
				cancel()
				for range giving { // while nothing has been sent yet
					if o := <-gaveUp; !errors.Is(o.err, context.Canceled) || errors.Is(o.err, pglock.ErrLocked) || o.lease != nil {
						t.Errorf("who gave up has %v, %v", o.lease, o.err)
					}
				}
				gate.let()
				for range staying {
					if o := <-stayed; o.err != nil {
						t.Errorf("%s: %v", o.name, o.err)
					}
				}
				gate.plug.Wait()
				if err := c.Close(t.Context()); err != nil { // waits for what is given back
					t.Error(err)
				}
				if n := one[int64](t, pool, heldRows+` AND name LIKE $1`, name+"%"); n != 0 {
					t.Errorf("%d leases are left over", n)
				}
				granted := one[bool](t, pool, `SELECT coalesce(max(token), 0) > 0 FROM pglock.leases WHERE name LIKE $1`, name+"/gives up%")
				return tt.others == 0 || granted && accompanied(statements, name+"/gives up/0")
			})
		})
	}
}

// A repeat of an exchange whose answer was lost has the effect of one: what it
// released is released, what it was granted it holds, each by one grant.
func TestCourier_L5_LostAnswer(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	wire := pgtest.Proxy(t, dsn)
	c, gate := turnstiled(t, wire.DSN())
	audit(t, pool, false)
	shown(t, func(try int) bool {
		old, young := fmt.Sprint("old/", try), fmt.Sprint("young/", try)
		held := hold(t, c, numbered(old, 4)...)
		freeing, freed := releases(t.Context(), held...)
		trying, got := tries(t.Context(), c, time.Hour, numbered(young, 4)...)
		statements := gate.together(t, c, append(freeing, trying...)...)
		if statements != nil { // each of which has a connection already
			wire.DropReplies()
		}
		gate.let()
		until(t, pool, "the effect", `SELECT count(*) FILTER (WHERE name LIKE $1 AND claim IS NULL) = 4
			AND count(*) FILTER (WHERE name LIKE $2 AND claim IS NOT NULL) = 4 FROM pglock.leases`, old+"/%", young+"/%")
		if statements != nil && len(got) > 0 {
			t.Error("an answer arrived: this test shows nothing")
		}
		wire.Heal()
		for range freeing {
			if o := <-freed; o.err != nil {
				t.Errorf("release of %s: %v", o.name, o.err)
			}
		}
		for range trying {
			o := <-got
			if o.err != nil {
				t.Errorf("%s: %v", o.name, o.err)
				continue
			}
			granted := one[[]int64](t, pool, `SELECT array_agg(token) FROM grants WHERE name = $1`, o.name)
			if !slices.Equal(granted, []int64{int64(o.lease.Token())}) {
				t.Errorf("%s: %d was granted, and the caller has %d", o.name, granted, o.lease.Token())
			}
		}
		return slices.ContainsFunc(statements, func(st *statement) bool { return len(st.released()) > 0 && len(st.wanted()) > 0 })
	})
}

// Of one client's tries of one name one wins, the others are told who has it, most
// of them by the answer to one that they share. No exchange carries the name
// twice, which the server would refuse.
func TestCourier_OneName(t *testing.T) {
	t.Parallel()
	pool, spy := spied(t, pgtest.DSN(t))
	if _, err := pool.Exec(t.Context(), `SELECT pglock.exchange('{}', '{}', '{n,n}', '{1 h,2 h}', '{NULL,NULL}')`); sqlState(err) != "22023" {
		t.Errorf("a name twice in an exchange: %v", err)
	}
	c := newClient(t, pool)
	const goroutines = 32
	for round := range scale(20, 5) {
		name := fmt.Sprint("same/", round)
		var names []string
		for i := range goroutines {
			names = append(names, name, fmt.Sprintf("other/%d/%d", round, i))
		}
		calls, got := tries(t.Context(), c, time.Hour, names...)
		for _, call := range calls {
			go call()
		}
		var won []pglock.Token
		var told []pglock.Token
		for range calls {
			o := <-got
			held, _ := errors.AsType[*pglock.HeldError](o.err)
			switch {
			case o.err == nil && o.name == name:
				won = append(won, o.lease.Token())
			case o.err == nil:
			case o.name != name || held == nil:
				t.Errorf("%s: %v", o.name, o.err)
			case held.Token != 0: // else its row was locked
				told = append(told, held.Token)
			}
		}
		if len(won) != 1 || slices.ContainsFunc(told, func(token pglock.Token) bool { return token != won[0] }) {
			t.Errorf("%s is held with %d, and who lost was told %d", name, won, told)
		}
	}
	asked := 0
	for _, sql := range []string{"pglock.exchange($1", "pglock.acquire_one($1"} {
		for _, st := range spy.heard(sql) {
			for _, name := range st.wanted() {
				if strings.HasPrefix(name, "same/") {
					asked++
				}
			}
		}
	}
	if most := scale(20, 5) * goroutines / 2; asked > most {
		t.Errorf("the server was asked %d times, more than %d", asked, most)
	}
	shared := 0
	for _, st := range spy.heard("pglock.exchange($1") {
		names := slices.Sorted(slices.Values(st.wanted()))
		if len(slices.Compact(slices.Clone(names))) != len(names) {
			t.Errorf("an exchange carried %q", names)
		}
		shared += len(names) - 1
	}
	if shared == 0 {
		t.Error("no exchange carried two names: this test shows nothing")
	}
}

// A release beside an open guard goes on by itself: what it would have gone with
// is through before it. The control waits for the guard with all that it
// releases.
func TestCourier_AGuardDelaysNobody(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	c, gate := turnstiled(t, dsn)
	held := hold(t, c, numbered("held", 6)...)
	guarded := held[0]
	guard := newConn(t, pool)
	exec(t, guard, `BEGIN`)
	exec(t, guard, `SELECT pglock.guard($1, $2)`, guarded.Name(), int64(guarded.Token()))

	waits := newConn(t, pool)
	done := make(chan error, 1)
	exec(t, pool, `SELECT pglock.acquire('{control}', '1 h')`)
	go func() {
		_, err := waits.Exec(context.Background(), `SELECT pglock.release(ARRAY['control', $1], ARRAY[(SELECT token FROM pglock.leases WHERE name = 'control'), $2], '1 h')`,
			guarded.Name(), int64(guarded.Token()))
		done <- err
	}()
	blockedBy(t, pool, guard.PgConn().PID())
	if !one[bool](t, pool, `SELECT claim IS NOT NULL FROM pglock.leases WHERE name = 'control'`) {
		t.Error("it was released beside the open guard: this test shows nothing")
	}
	end(t, pool, waits)
	<-done

	blocked, unblocked := releases(t.Context(), guarded)
	freeing, freed := releases(t.Context(), held[1:]...)
	trying, got := tries(t.Context(), c, time.Hour, numbered("new", 4)...)
	statements := gate.together(t, c, slices.Concat(blocked, freeing, trying)...)
	if !accompanied(statements, guarded.Name()) {
		t.Log("the blocked release went alone")
	}
	gate.let()
	for range freeing {
		if o := <-freed; o.err != nil {
			t.Errorf("release of %s: %v", o.name, o.err)
		}
	}
	for range trying {
		if o := <-got; o.err != nil {
			t.Errorf("%s: %v", o.name, o.err)
		}
	}
	select {
	case o := <-unblocked:
		t.Errorf("the others took longer than the blocked release, which says %v", o.err)
		unblocked <- o
	default:
	}
	exec(t, guard, `COMMIT`)
	if o := <-unblocked; o.err != nil {
		t.Error(o.err)
	}
}

// The contract of exclusion, by 32 goroutines of one client on four names, half
// of which wait in line while the others try again and again.
func TestCourier_Exclusion(t *testing.T) {
	t.Parallel()
	pool, spy := spied(t, pgtest.DSN(t))
	c := newClient(t, pool)
	exec(t, pool, `CREATE TABLE counters (name text PRIMARY KEY, n int NOT NULL)`)
	tried := func(ctx context.Context, name string, fn func(context.Context) error) error {
		for {
			l, err := c.TryAcquire(ctx, name, time.Minute)
			if errors.Is(err, pglock.ErrLocked) {
				continue
			}
			if err != nil {
				return err
			}
			return errors.Join(fn(ctx), l.Release(ctx))
		}
	}
	waited := func(ctx context.Context, name string, fn func(context.Context) error) error {
		return c.WithLease(ctx, name, time.Minute, func(ctx context.Context, _ *pglock.Lease) error { return fn(ctx) })
	}
	t.Run("names", func(t *testing.T) {
		for i := range 4 {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				var mu sync.Mutex
				turn := 0
				lost := lostUpdates(t, pool, func(ctx context.Context, name string, fn func(context.Context) error) error {
					mu.Lock()
					turn++
					with := []with{tried, waited}[turn%2]
					mu.Unlock()
					return with(ctx, name, fn)
				})
				if lost != 0 {
					t.Errorf("%d updates were lost", lost)
				}
			})
		}
	})
	shared := 0
	for _, st := range spy.heard("pglock.exchange($1") {
		if len(st.wanted())+len(st.released()) > 1 {
			shared++
		}
	}
	if shared == 0 {
		t.Error("no exchange carried two calls: this test shows nothing")
	}
	t.Run("control: nothing", func(t *testing.T) {
		free := func(ctx context.Context, _ string, fn func(context.Context) error) error { return fn(ctx) }
		for range 20 {
			if lostUpdates(t, pool, free) > 0 {
				return
			}
		}
		t.Error("no update was lost, so that the test shows nothing")
	})
}
