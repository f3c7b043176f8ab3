package pglock_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// Corners of the protocol's SQL that clients in other languages reach.

// A free lease whose row another transaction has locked all the time is neither
// granted nor waited for, and it is no error.
func TestQueue_AFreeLeaseWhoseRowIsLocked(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `SELECT pglock.release('{n}', ARRAY(SELECT token FROM pglock.acquire('{n}', '1 h')))`)
	taker := newConn(t, pool)
	exec(t, taker, `BEGIN`)
	exec(t, taker, `SELECT pglock.acquire('{n}', '1 h')`)
	rows, err := pool.Query(t.Context(), `SELECT granted, token, remaining, ticket FROM pglock.enqueue('n', '1 h', gen_random_uuid(), 'nobody')`)
	if err != nil {
		t.Fatal(err)
	}
	type answer struct {
		Granted       bool
		Token, Ticket *int64
		Remaining     *time.Duration
	}
	got, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[answer])
	if err != nil || got != (answer{}) {
		t.Errorf("%+v, %v; want nothing", got, err)
	}
}

// A ticket that a transaction left open has locked holds up nobody for longer than a
// second: the next in line is served, and who has it keeps his place.
func TestQueue_L8_TheFirstTicketIsLocked(t *testing.T) {
	t.Parallel()
	const (
		claim   = `'00000000-0000-4000-8000-000000000001'`
		refresh = `SELECT state FROM pglock.refresh('{n}', ARRAY[` + claim + `::uuid])`
		join    = `SELECT granted FROM pglock.enqueue('n', '1 h', gen_random_uuid(), 'nobody')`
		free    = `SELECT state FROM pglock.release('{n}', ARRAY[(SELECT token FROM pglock.leases WHERE name = 'n')], '0')`
	)
	for name, tt := range map[string]struct {
		frees  string // the answer is want
		want   string
		next   bool // somebody else waits, or comes
		states string
	}{
		"release, and the next":       {free, "released", true, "waiting"},
		"release, and nobody":         {free, "released", false, "granted"},
		"release_one, and the next":   {strings.NewReplacer("release(", "release_one(", "'{n}'", "'n'", "ARRAY[", "", "]", "").Replace(free), "released", true, "waiting"},
		"force_release, and the next": {`SELECT state FROM pglock.force_release('n', (SELECT token FROM pglock.leases))`, "released", true, "waiting"},
		"exchange, and nobody": {`SELECT coalesce((SELECT state FROM pglock.exchange('{n}', ARRAY[(SELECT token FROM pglock.leases)], '{}', '{}', '{}')), 'released')`,
			"released", false, "granted"},
		"it expires, and one comes":    {join, "true", false, "waiting"},
		"it expires, and one tries":    {`SELECT granted FROM pglock.acquire('{n}', '1 h')`, "false", false, "granted"},
		"it expires, and another asks": {`SELECT state FROM pglock.refresh('{n}', ARRAY[(SELECT claim FROM pglock.waiters WHERE claim <> ` + claim + `)])`, "granted", true, "waiting"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			exec(t, pool, `SELECT pglock.acquire('{n}', '1 h')`)
			exec(t, pool, `SELECT pglock.enqueue('n', '1 h', `+claim+`, 'nobody')`)
			if tt.next {
				exec(t, pool, join)
			}
			if strings.HasPrefix(name, "it expires") {
				expire(t, pool, "n")
			}
			left := newConn(t, pool)
			exec(t, left, `BEGIN; SELECT FROM pglock.waiters WHERE claim = `+claim+` FOR UPDATE`)
			if got := one[string](t, pool, `SELECT (`+tt.frees+`)::text`); got != tt.want {
				t.Errorf("the answer is %s, want %s", got, tt.want)
			}
			exec(t, left, `COMMIT`)
			if got := one[string](t, pool, refresh); got != tt.states {
				t.Errorf("who had his ticket locked is %s, want %s", got, tt.states)
			}
		})
	}
}

// A claim stands for one wait: a ticket for another lease would never be drawn.
func TestQueue_AClaimUsedTwice(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `SELECT pglock.acquire('{a,b}', '1 h')`)
	const enqueue = `SELECT pglock.enqueue($1, '1 h', '00000000-0000-4000-8000-000000000001', 'nobody')`
	exec(t, pool, enqueue, "a")
	exec(t, pool, enqueue, "a")
	if _, err := pool.Exec(t.Context(), enqueue, "b"); sqlState(err) != "22023" || !strings.Contains(err.Error(), "waits for another lease") {
		t.Errorf("got %v", err)
	}
}

// A hand-off is silent where the transaction says so, and where a session does, or a
// role's settings, it is not.
func TestQueue_SilentInItsTransactionOnly(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	waiter := newConn(t, pool)
	exec(t, waiter, `LISTEN here`)
	handOff := func(name, begin string) {
		exec(t, pool, `SELECT pglock.acquire(ARRAY[$1], '1 h')`, name)
		exec(t, waiter, `SELECT pglock.enqueue($1, '1 h', gen_random_uuid(), 'here')`, name)
		conn := newConn(t, pool)
		exec(t, conn, begin)
		exec(t, conn, `SELECT pglock.release_one(name, token, '0') FROM pglock.leases WHERE name = $1`, name)
		exec(t, conn, `COMMIT`)
	}
	handOff("silent", `BEGIN; SELECT set_config('pglock.quiet', pg_current_xact_id()::text, true)`)
	handOff("loud", `SET pglock.quiet = 'on'; BEGIN`)
	told, err := waiter.WaitForNotification(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := one[string](t, pool, `SELECT claim || ' ' || token FROM pglock.leases WHERE name = 'loud'`); told.Payload != want {
		t.Errorf("told %q, want %q", told.Payload, want)
	}
}

// Where acquire waits for a ticket that is being taken back, what it took
// before may expire meanwhile: that is answered once all the same, and has one
// token.
func TestLease_L4_AWaitLongerThanTheTTL(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	const claim = `'00000000-0000-4000-8000-000000000001'`
	exec(t, pool, `SELECT pglock.acquire('{a,b}', '1 h')`)
	exec(t, pool, `SELECT pglock.enqueue('b', '1 h', `+claim+`, 'nobody')`)
	expire(t, pool, "a")
	expire(t, pool, "b")
	canceller, taker := newConn(t, pool), newConn(t, pool)
	exec(t, canceller, `BEGIN`)
	exec(t, canceller, `SELECT pglock.cancel('b', `+claim+`)`)
	names := make(chan string, 1)
	go func() {
		var s string
		if err := taker.QueryRow(context.Background(), `SELECT string_agg(name, ' ' ORDER BY name) FROM pglock.acquire('{a,b}', '100 ms')`).Scan(&s); err != nil {
			t.Error(err)
		}
		names <- s
	}()
	until(t, pool, "acquire wait for the ticket", `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'PgSleep')`, int32(taker.PgConn().PID()))
	// Another transaction can't see the expiry: it is at most the TTL from now.
	var now time.Time
	if err := pool.QueryRow(t.Context(), `SELECT clock_timestamp()`).Scan(&now); err != nil {
		t.Fatal(err)
	}
	until(t, pool, "the TTL pass", `SELECT clock_timestamp() > $1`, now.Add(100*time.Millisecond))
	exec(t, canceller, `COMMIT`)
	if got := <-names; got != "a b" {
		t.Errorf("answered for %q, want each once", got)
	}
}

// A repeat of acquire writes, so that its commit waits for a synchronous
// standby, also while another transaction renews the lease or joins its queue.
func TestLease_R09_ARepeatWritesBesideOthers(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	const repeat = `SELECT granted::text FROM pglock.acquire('{n}', '1 h', '00000000-0000-4000-8000-000000000001')`
	exec(t, pool, repeat)
	for _, tt := range []struct{ name, sql string }{
		{"renew", `SELECT pglock.renew('{n}', ARRAY(SELECT token FROM pglock.list_leases('n')))`},
		{"enqueue", `SELECT pglock.enqueue('n', '1 h', gen_random_uuid(), 'nobody')`},
	} {
		other := newConn(t, pool)
		exec(t, other, `BEGIN`)
		exec(t, other, tt.sql)
		writes := func(sql string) bool {
			conn := newConn(t, pool)
			exec(t, conn, `BEGIN`)
			defer exec(t, conn, `ROLLBACK`)
			if granted := one[string](t, conn, sql); granted != "true" {
				t.Errorf("beside %s: granted %s", tt.name, granted)
			}
			return one[bool](t, conn, `SELECT pg_current_xact_id_if_assigned() IS NOT NULL`)
		}
		if !writes(repeat) {
			t.Errorf("beside %s the repeat wrote nothing", tt.name)
		}
		// The control asks for a lock that theirs keeps off.
		if writes(`WITH l AS (SELECT FROM pglock.leases WHERE name = 'n' FOR NO KEY UPDATE SKIP LOCKED) SELECT (count(*) = 0)::text FROM l`) {
			t.Errorf("beside %s: the control wrote", tt.name)
		}
		exec(t, other, `ROLLBACK`)
	}
}

// A new epoch that is begun by hand while tokens are drawn repeats none, also
// where the clock is behind the sequence. The control moves the sequence by one from
// where it was before others drew.
func TestLease_L1_ANewEpochWhileTokensAreDrawn(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	// Many leases, so that a turn takes its time.
	exec(t, pool, `INSERT INTO pglock.leases (name, token) SELECT i::text, 0 FROM generate_series(1, 10000) i`)
	repeats := func(turn string, turns int) bool {
		exec(t, pool, `SELECT setval('pglock.leases_token_seq', 1::bigint << 52)`)
		exec(t, pool, `DROP TABLE IF EXISTS drawn; CREATE TABLE drawn (token bigint)`)
		done := make(chan error, 1)
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		conn := newConn(t, pool)
		go func() {
			var err error
			for err == nil && ctx.Err() == nil {
				_, err = conn.Exec(context.Background(), `INSERT INTO drawn SELECT nextval('pglock.leases_token_seq') FROM generate_series(1, 10000)`)
			}
			done <- err
		}()
		until(t, pool, "tokens drawn", `SELECT EXISTS (SELECT FROM drawn)`)
		for range turns {
			exec(t, pool, turn)
		}
		stop()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		return one[bool](t, pool, `SELECT count(*) > count(DISTINCT token) FROM drawn`)
	}
	if repeats(`SELECT pglock.new_epoch()`, 50) {
		t.Error("tokens were drawn twice")
	}
	// The second of two turns waits for what is drawn after the first.
	const byOne = `DO $$ DECLARE before bigint := (SELECT last_value FROM pglock.leases_token_seq);
		BEGIN
			WHILE (SELECT last_value < before + 2 FROM pglock.leases_token_seq) LOOP END LOOP;
			PERFORM setval('pglock.leases_token_seq', before + 1);
		END $$`
	if !repeats(byOne, 2) {
		t.Fatal("the control never drew a token twice")
	}
}

// What can't be right is refused, or answered for what it is.
func TestInput_ArraysThatDontFit(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `SELECT pglock.acquire('{a,b}', '1 h')`)
	token := one[int64](t, pool, `SELECT token FROM pglock.list_leases('a')`)
	for _, sql := range []string{
		`SELECT state FROM pglock.renew('{a}', '{NULL}')`,
		`SELECT state FROM pglock.release('{a}', '{NULL}')`,
		`SELECT state FROM pglock.force_release('a', NULL)`,
	} {
		if state := one[string](t, pool, sql); state != "taken" {
			t.Errorf("%s: %s", sql, state)
		}
	}
	for sql, want := range map[string]string{
		`SELECT FROM pglock.acquire('{c,NULL}', '1 h')`:                             "NULL in {c,NULL}",
		`SELECT FROM pglock.acquire('{c,c}', '1 h')`:                                "twice",
		`SELECT FROM pglock.refresh('{a,b}', ARRAY[gen_random_uuid()])`:             "2 names beside 1 claims",
		`SELECT FROM pglock.refresh(NULL, ARRAY[gen_random_uuid()])`:                "0 names beside 1 claims",
		`SELECT FROM pglock.release('{a,b}', '{1}')`:                                "2 names beside 1 tokens",
		`SELECT FROM pglock.enqueue('c', '1 mon', gen_random_uuid(), 'nobody')`:     "TTL 1 mon",
		`SELECT FROM pglock.enqueue('a', '1 h', gen_random_uuid(), repeat('x',64))`: "listened",
	} {
		if _, err := pool.Exec(t.Context(), sql); sqlState(err) != "22023" || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want 22023 and %q", sql, err, want)
		}
	}
	// Another's token frees nothing, and the answer does not say so.
	if states := one[string](t, pool, `SELECT string_agg(name || ' ' || state, ', ' ORDER BY name) FROM pglock.release('{a,b}', ARRAY[$1, $1]::bigint[])`, token); states != "a released, b taken" {
		t.Error(states)
	}
}

// A TTL is counted in seconds: a day that is added to a timestamp has 23 hours
// once a year, and a client that adds the answer to its own clock would hold on
// for an hour too long.
func TestLease_L3_ATTLOfADay(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	conn := newConn(t, pool)
	exec(t, conn, `SET TimeZone = 'EST5EDT,M3.2.0,M11.1.0'`)
	// The control: days added where summer time begins.
	if hours := one[int](t, conn, `SELECT extract(hour FROM t + interval '1 day' - t - interval '1 h')::int FROM (VALUES (timestamptz '2027-03-13 12:00+00')) AS v (t)`); hours != 22 {
		t.Fatalf("the day had %d hours more than one, want 22", hours)
	}
	for _, sql := range []string{
		`SELECT remaining::text FROM pglock.acquire('{n}', '1 day')`,
		`SELECT ttl::text FROM pglock.list_leases('n')`,
		`SELECT remaining::text FROM pglock.renew('{n}', ARRAY(SELECT token FROM pglock.list_leases('n')))`,
	} {
		if got := one[string](t, conn, sql); got != "24:00:00" {
			t.Errorf("%s: %s", sql, got)
		}
	}
	exec(t, conn, `SELECT pglock.enqueue('n', '1 mon -29 days', gen_random_uuid(), 'nobody')`)
	if got := one[string](t, pool, `SELECT ttl::text FROM pglock.waiters`); got != "24:00:00" {
		t.Errorf("a ticket has the TTL %s", got)
	}
}

// To ask for one lease reads one, of however many: Observe does so each second.
// The control is a plan for whatever may be wanted.
func TestInspect_OneLeaseOfMany(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `INSERT INTO pglock.leases (name, token, claim, role, expires_at)
		SELECT i::text, 1, gen_random_uuid(), 'postgres', now() + interval '1 h' FROM generate_series(1, 10000) i`)
	exec(t, pool, `ANALYZE pglock.leases`)
	exec(t, pool, `CREATE FUNCTION any_of_them(wanted text) RETURNS TABLE (name text) LANGUAGE sql STABLE SET plan_cache_mode = force_generic_plan AS $$
		SELECT l.name FROM pglock.leases l WHERE wanted IS NULL OR l.name = wanted $$`)
	scanned := func(sql string) int64 {
		conn := newConn(t, pool)
		const counted = `SELECT coalesce(pg_stat_get_xact_tuples_returned('pglock.leases'::regclass), 0)`
		exec(t, conn, `BEGIN`)
		before := one[int64](t, conn, counted)
		if name := one[string](t, conn, sql); name != "77" {
			t.Errorf("%s: %s", sql, name)
		}
		return one[int64](t, conn, counted) - before
	}
	if n := scanned(`SELECT name FROM pglock.list_leases('77')`); n > 10 {
		t.Errorf("one lease was found by reading %d", n)
	}
	if n := scanned(`SELECT name FROM any_of_them('77')`); n < 10000 {
		t.Errorf("the control read %d", n)
	}
}
