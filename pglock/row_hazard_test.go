package pglock_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// halt has a function of the schema, which only reads, take a step more at its
// end and then stand still, with all the locks of its statement, for as long as
// somebody has the advisory lock 1.
func halt(t *testing.T, db executor, function, step string) {
	t.Helper()
	exec(t, db, fmt.Sprintf(`DO $do$
		DECLARE f pg_proc := (SELECT p FROM pg_proc p WHERE pronamespace = 'pglock'::regnamespace AND proname = '%[1]s');
		BEGIN
			CREATE SCHEMA IF NOT EXISTS moved;
			ALTER FUNCTION pglock.%[1]s SET SCHEMA moved;
			EXECUTE format($f$CREATE FUNCTION pglock.%[1]s(%%s) RETURNS %%s LANGUAGE plpgsql AS $body$
				BEGIN
					RETURN QUERY SELECT * FROM moved.%[1]s(%%s);
					%[2]s
					PERFORM pg_advisory_xact_lock_shared(1);
				END $body$ $f$, pg_get_function_arguments(f.oid), pg_get_function_result(f.oid), CASE f.pronargs WHEN 1 THEN '$1' END);
		END $do$`, function, step))
}

// Leases, Waiters and Observe take no row locks: in the midst of each call its
// session has no lock but those for reading. The control locks rows, and is
// seen.
func TestInspect_R04_NoRowLocks(t *testing.T) {
	t.Parallel()
	for step, want := range map[string][]string{
		"": {"AccessShareLock"},
		"PERFORM FROM pglock.leases FOR KEY SHARE;": {"AccessShareLock", "ExclusiveLock", "RowShareLock"},
	} {
		pool := pgtest.Pool(t)
		c := newClient(t, pool)
		acquire(t, c, "held", time.Hour)
		halt(t, pool, "list_leases", step)
		halt(t, pool, "list_waiters", step)
		for what, call := range map[string]func(context.Context) error{
			"Leases":  func(ctx context.Context) error { _, err := c.Leases(ctx); return err },
			"Waiters": func(ctx context.Context) error { _, err := c.Waiters(ctx); return err },
			"Observe": func(ctx context.Context) error {
				ctx, cancel := context.WithCancel(ctx)
				defer cancel()
				if info := <-c.Observe(ctx, "held"); info.Token == 0 {
					return fmt.Errorf("the lease is seen as %+v", info)
				}
				return nil
			},
		} {
			gate := begin(t, pool)
			exec(t, gate, `SELECT pg_advisory_xact_lock(1)`)
			done := make(chan error, 1)
			go func() { done <- call(context.Background()) }()
			blockedBy(t, pool, uint32(pid(gate)))
			// All locks but that on its own virtual transaction, and the gate.
			modes := one[[]string](t, pool, `SELECT array_agg(DISTINCT l.mode ORDER BY l.mode) FROM pg_locks l
				WHERE l.locktype NOT IN ('virtualxid', 'advisory') AND $1 = ANY (pg_blocking_pids(l.pid))`, pid(gate))
			if diff := cmp.Diff(want, modes); diff != "" {
				t.Errorf("%s, with %q: %s", what, step, diff)
			}
			if err := gate.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
}

// A hand-off deletes a ticket and updates the lease. A session that is killed
// between the two has done neither, and the waiter is served by the next try.
// The control does them in two transactions: the ticket is gone, and nobody has
// the lease.
func TestLease_R05_KilledInTheMidstOfAHandOff(t *testing.T) {
	t.Parallel()
	pool := roomy(t, pgtest.Pool(t), 10)
	const whole = `SELECT (SELECT token = $1 AND claim IS NOT NULL FROM pglock.leases WHERE name = 'line')
		AND EXISTS (SELECT FROM pglock.waiters WHERE name = 'line')`
	holder := acquire(t, newClient(t, pool, pglock.WithOwner("holder")), "line", time.Minute)
	granted := make(chan *pglock.Lease, 1)
	waiter := newClient(t, pool, pglock.WithOwner("waiter"))
	go func() {
		l, err := waiter.Acquire(context.Background(), "line", time.Minute)
		if err != nil {
			t.Error(err)
		}
		granted <- l
	}()
	waiting(t, pool, "line", 1)

	apart := begin(t, pool)
	exec(t, apart, `DELETE FROM pglock.waiters WHERE name = 'line'`)
	if one[bool](t, apart, whole, holder.Token()) {
		t.Error("a ticket deleted in a transaction of its own is not missed: this test shows nothing")
	}
	_ = apart.Rollback(t.Context())

	exec(t, pool, `CREATE FUNCTION stand_still() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NULL; END $$;
		CREATE TRIGGER stand_still AFTER DELETE ON pglock.waiters FOR EACH STATEMENT EXECUTE FUNCTION public.stand_still();
		GRANT EXECUTE ON FUNCTION stand_still TO PUBLIC`)
	gate := begin(t, pool)
	exec(t, gate, `SELECT pg_advisory_xact_lock(1)`)
	released := make(chan error, 1)
	go func() { released <- holder.Release(context.Background()) }()
	blockedBy(t, pool, uint32(pid(gate)))
	// The release is repeated on another connection, and stands still again.
	for killed := 0; killed < 2; killed++ {
		victim := one[int32](t, pool, `SELECT min(pid) FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))`, pid(gate))
		exec(t, pool, `SELECT pg_terminate_backend($1)`, victim)
		until(t, pool, "the killed session end", `SELECT NOT EXISTS (SELECT FROM pg_locks WHERE pid = $1)`, victim)
		if !one[bool](t, pool, whole, holder.Token()) {
			t.Error("half of the hand-off stayed")
		}
		blockedBy(t, pool, uint32(pid(gate)))
	}
	if err := gate.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-released; err != nil {
		t.Errorf("the release says %v", err)
	}
	if next := <-granted; next == nil || next.Token() <= holder.Token() {
		t.Errorf("the waiter has %v after token %d", next, holder.Token())
	}
}

// A flood on a client's channel doesn't stop its listener: it reads on, and its
// session holds nothing up. The control listens and doesn't read: its session
// is stuck in writing, with a snapshot. (Where notifications don't come
// through, tickets are looked after by time: TestPooler_Leases.)
func TestListener_R08_ReadsOn(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	const stuck = `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'ClientWrite' AND backend_xmin IS NOT NULL)`
	const reads = `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'ClientRead' AND backend_xmin IS NULL)`
	flood := func(channel string) {
		t.Helper()
		for range 10 { // more than the sockets between take
			exec(t, pool, `SELECT pg_notify($1, n || repeat('x', 7900)) FROM generate_series(1, 400) n`, channel)
		}
	}
	deaf := newConn(t, pool)
	exec(t, deaf, `LISTEN deaf`)
	flood("deaf")
	until(t, pool, "a session stuck that isn't read from", stuck, deaf.PgConn().PID())

	holder := acquire(t, newClient(t, pool), "line", time.Minute)
	granted := make(chan error, 1)
	listens := newClient(t, poolBy(t, pool.Config().ConnString(), func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["application_name"] = "listens" }))
	go func() {
		_, err := listens.Acquire(context.Background(), "line", time.Minute)
		granted <- err
	}()
	waiting(t, pool, "line", 1)
	flood(one[string](t, pool, `SELECT channel FROM pglock.waiters`))
	if err := holder.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-granted; err != nil {
		t.Fatal(err)
	}
	ears := one[[]int32](t, pool, `SELECT array_agg(pid) FROM pg_stat_activity WHERE application_name = 'listens' AND query LIKE '%pg_notify%'`)
	if len(ears) != 1 {
		t.Fatalf("the client listens with %d sessions", len(ears))
	}
	until(t, pool, "the listener read on", reads, ears[0])
	if !one[bool](t, pool, stuck, deaf.PgConn().PID()) {
		t.Error("the control is no longer stuck: this test shows nothing")
	}
}

// Whatever the plan, the rows that are locked are those returned; and where
// they are more, the docs say so. The control tries a lock in the predicate.
func TestLockRows_A15_LocksWhatItReturns(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE jobs (id int PRIMARY KEY, queue text NOT NULL, rank int NOT NULL);
		CREATE TABLE owners (id int PRIMARY KEY);
		INSERT INTO jobs SELECT n, (ARRAY['a', 'b', 'c'])[n % 3 + 1], (n * 7919) % 1000 FROM generate_series(1, 1000) n;
		INSERT INTO owners SELECT id FROM jobs;
		CREATE INDEX ON jobs (queue, rank); ANALYZE jobs, owners`)
	other := begin(t, pool)
	exec(t, other, `SELECT FROM jobs WHERE queue = 'b' AND id % 5 = 0 FOR UPDATE`)
	exec(t, other, `SELECT FROM owners WHERE id IN (4, 10) FOR UPDATE`)
	free := func(t *testing.T) (ids []int) {
		inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
			ids = one[[]int](t, tx, `SELECT array_agg(id) FROM (SELECT id FROM jobs ORDER BY id FOR UPDATE SKIP LOCKED) s`)
		})
		return ids
	}
	before := free(t)
	plans := map[string]string{
		"Seq Scan on jobs": `SET LOCAL enable_indexscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_indexonlyscan = off`,
		"Index":            `SET LOCAL enable_seqscan = off`,
	}
	// locks returns how many rows a query returned and how many it locked.
	locks := func(t *testing.T, plan, sql string, exact bool) (more int) {
		inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
			exec(t, tx, plans[plan])
			explained := strings.Join(one[[]string](t, tx, `SELECT array_agg(line) FROM explain($1) line`, sql+` FOR UPDATE SKIP LOCKED`), "\n")
			if !strings.Contains(explained, plan) {
				t.Errorf("%s is not done by %s:\n%s", sql, plan, explained)
			}
			ids, err := pglock.LockRows(t.Context(), tx, pglock.ForUpdate.SkipLocked(), pgx.RowTo[int], sql)
			if err != nil {
				t.Fatal(err)
			}
			var locked []int
			now := free(t)
			for _, id := range before {
				if !slices.Contains(now, id) {
					locked = append(locked, id)
				}
			}
			slices.Sort(ids)
			if diff := cmp.Diff(ids, locked); exact && (diff != "" || len(ids) == 0) {
				t.Errorf("%s by %s: returned and locked differ: %s", sql, plan, diff)
			}
			more = len(locked) - len(ids)
		})
		return more
	}
	exec(t, pool, `CREATE FUNCTION explain(query text) RETURNS SETOF text LANGUAGE plpgsql AS $$ BEGIN RETURN QUERY EXECUTE 'EXPLAIN ' || query; END $$`)
	for plan := range plans {
		for _, sql := range []string{
			`SELECT id FROM jobs WHERE queue = 'b' ORDER BY id LIMIT 7`,
			`SELECT id FROM jobs WHERE queue = 'b' LIMIT 7`,
			`SELECT id FROM jobs WHERE queue = 'b' AND id % 2 = 0 ORDER BY rank DESC LIMIT 7`,
			`SELECT id FROM jobs WHERE id IN (SELECT id FROM jobs WHERE queue = 'b' ORDER BY rank LIMIT 7)`,
			`SELECT id FROM (SELECT * FROM jobs WHERE queue = 'b' ORDER BY id LIMIT 7) s`,
			`SELECT id FROM (SELECT * FROM jobs) s WHERE queue = 'b' LIMIT 7`,
			`WITH next AS MATERIALIZED (SELECT id FROM jobs WHERE queue = 'b' ORDER BY id LIMIT 7) SELECT jobs.id FROM jobs JOIN next USING (id)`,
		} {
			locks(t, plan, sql, true)
		}
		for _, sql := range []string{
			`SELECT id FROM jobs WHERE queue = 'b' ORDER BY id LIMIT 7 OFFSET 2`,
			`SELECT id FROM (SELECT * FROM jobs WHERE queue = 'b' ORDER BY id LIMIT 7) s WHERE id % 2 = 0`,
			`SELECT jobs.id FROM jobs JOIN owners USING (id) WHERE queue = 'b' AND id < 20`,
		} {
			if more := locks(t, plan, sql, false); more <= 0 {
				t.Errorf("%s by %s locks %d rows more than it returns, want some, as the docs say", sql, plan, more)
			}
		}
	}
	inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
		exec(t, tx, plans["Seq Scan on jobs"])
		n := one[int](t, tx, `SELECT count(*) FROM (SELECT FROM jobs WHERE queue = 'b' AND pg_try_advisory_xact_lock(id) ORDER BY rank LIMIT 7) s`)
		if held := one[int](t, tx, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()`); held <= n {
			t.Errorf("a lock tried in the predicate is held on %d rows for %d returned: this test shows nothing", held, n)
		}
	})
}
