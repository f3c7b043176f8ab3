package migrations_test

import (
	"bytes"
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
)

// fill makes protected and guarded tables with rows, and a lease.
func fill(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	do(t, pool, `CREATE TABLE accounts (id int PRIMARY KEY, balance int);
		INSERT INTO accounts SELECT n, n FROM generate_series(1, 100) n;
		CREATE TABLE parts (id int, n int) PARTITION BY RANGE (id);
		CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (1) TO (10);
		CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (id);
		CREATE TABLE parts_2_1 PARTITION OF parts_2 FOR VALUES FROM (10) TO (20);
		INSERT INTO parts VALUES (1, 1), (11, 1);
		SELECT pglock.protect('accounts', 'accounts/%'), pglock.protect('parts', 'it''s \%'), pglock.guard_version('accounts');
		SELECT FROM pglock.acquire('{accounts/1}', '1 h')`)
}

const (
	contents   = `SELECT concat((SELECT string_agg(a::text, ',' ORDER BY id) FROM accounts a), (SELECT string_agg(p::text, ',' ORDER BY id) FROM parts p))`
	protection = `SELECT string_agg(concat(tgrelid::regclass, ' ', tgname, ' ', pg_get_triggerdef(oid)), E'\n' ORDER BY tgrelid::regclass::text, tgname)
		FROM pg_trigger WHERE tgname LIKE 'pglock%'`
)

// A database with protected tables is restored from a dump, rows and all; and
// of one schema alone, once the migrations have been applied.
func TestRestore(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	fill(t, pool)
	before, triggers := query[string](t, pool, contents), query[string](t, pool, protection)
	last := query[int64](t, pool, `SELECT token FROM pglock.leases`)
	for _, tt := range []struct {
		name string
		args []string
		up   bool
	}{
		{"everything", nil, false},
		{"public alone, after Up", []string{"-n", "public"}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			out, err := exec.CommandContext(t.Context(), pgtest.Client(t, "pg_dump", dsn), append(tt.args, "-d", dsn)...).Output()
			if err != nil {
				t.Fatal(err)
			}
			target := pgtest.EmptyDSN(t)
			restored := pgtest.PoolOn(t, target)
			if tt.up {
				if err := migrations.Up(t.Context(), restored); err != nil {
					t.Fatal(err)
				}
				do(t, restored, `DROP SCHEMA public`) // which the dump creates
			}
			restore := exec.CommandContext(t.Context(), pgtest.Client(t, "psql", target), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", target)
			restore.Stdin = bytes.NewReader(out)
			if out, err := restore.CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			if after := query[string](t, restored, contents); after != before {
				t.Errorf("the tables hold %s, want %s", after, before)
			}
			if diff := cmp.Diff(triggers, query[string](t, restored, protection)); diff != "" {
				t.Error(diff)
			}
			for _, sql := range []string{`UPDATE accounts SET balance = 0`, `TRUNCATE parts_2_1`, `DELETE FROM parts_1`} {
				var refused *pgconn.PgError
				if _, err := restored.Exec(t.Context(), sql); !errors.As(err, &refused) || refused.Code != "PW004" {
					t.Errorf("%s: %v, want PW004", sql, err)
				}
			}
			if next := query[int64](t, restored, `SELECT token FROM pglock.acquire('{accounts/2}', '1 h')`); !tt.up && next <= last {
				t.Errorf("the next token is %d, and %d was granted before", next, last)
			}
			do(t, restored, `SELECT pglock.unprotect('accounts'), pglock.unprotect('parts')`, `UPDATE accounts SET balance = 0`, `TRUNCATE parts`)
		})
	}
}

// Data alone goes into protected tables with --disable-triggers, and not
// without.
func TestRestore_DataAlone(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	fill(t, pool)
	before := query[string](t, pool, contents)
	for _, tt := range []struct {
		name string
		args []string
		ok   bool
	}{
		{"with --disable-triggers", []string{"--disable-triggers"}, true},
		{"control: without", nil, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			out, err := exec.CommandContext(t.Context(), pgtest.Client(t, "pg_dump", dsn), append(tt.args, "-a", "-n", "public", "-d", dsn)...).Output()
			if err != nil {
				t.Fatal(err)
			}
			target := pgtest.DSN(t)
			restored := pgtest.PoolOn(t, target)
			fill(t, restored)
			const off, on = `SELECT pglock.unprotect('accounts'), pglock.unprotect('parts')`, `SELECT pglock.protect('accounts', 'accounts/%'), pglock.protect('parts', 'it''s \%')`
			do(t, restored, off, `TRUNCATE accounts, parts`, on)
			restore := exec.CommandContext(t.Context(), pgtest.Client(t, "psql", target), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", target)
			restore.Stdin = bytes.NewReader(out)
			said, err := restore.CombinedOutput()
			if tt.ok && (err != nil || query[string](t, restored, contents) != before) {
				t.Errorf("%v\n%s", err, said)
			}
			if !tt.ok && !bytes.Contains(said, []byte("is protected: no lease was presented")) {
				t.Errorf("it is not refused (%v): this test shows nothing\n%s", err, said)
			}
			var refused *pgconn.PgError
			if _, err := restored.Exec(t.Context(), `DELETE FROM accounts`); !errors.As(err, &refused) || refused.Code != "PW004" {
				t.Errorf("afterwards a write without a lease: %v, want PW004", err)
			}
		})
	}
}

// Leases and waits that come back with an old dump stand in nobody's way: they
// have expired since, the next token is higher than any of before, and whoever
// had one then is refused.
func TestRestore_M10_LeasesFromADump(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	do(t, pool, `SELECT setval('pglock.leases_token_seq', 1000)`,
		`SELECT pglock.acquire('{held,awaited}', '1 s')`, `SELECT pglock.acquire('{held for long}', '1 h')`,
		`SELECT pglock.enqueue('awaited', '100 ms', gen_random_uuid(), 'nobody listens')`)
	last := query[int64](t, pool, `SELECT max(token) FROM pglock.leases`)
	out, err := exec.CommandContext(t.Context(), pgtest.Client(t, "pg_dump", dsn), "-d", dsn).Output()
	if err != nil {
		t.Fatal(err)
	}
	until(t, pool, `SELECT clock_timestamp() > (SELECT max(expires_at) FROM pglock.leases WHERE name <> 'held for long')`)
	target := pgtest.EmptyDSN(t)
	restored := pgtest.PoolOn(t, target)
	restore := exec.CommandContext(t.Context(), pgtest.Client(t, "psql", target), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", target)
	restore.Stdin = bytes.NewReader(out)
	if out, err := restore.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if n := query[int64](t, restored, `SELECT count(*) FROM pglock.leases WHERE claim IS NOT NULL`); n != 3 {
		t.Fatalf("%d leases were restored: this test shows nothing", n)
	}
	for _, name := range []string{"held", "awaited"} {
		if token := query[int64](t, restored, `SELECT coalesce(max(token) FILTER (WHERE granted), 0) FROM pglock.acquire(ARRAY[$1], '1 h')`, name); token <= last {
			t.Errorf("%s: granted token %d, and %d was granted before", name, token, last)
		}
		var refused *pgconn.PgError
		_, err := restored.Exec(t.Context(), `SELECT pglock.guard($1, $2)`, name, query[int64](t, pool, `SELECT token FROM pglock.leases WHERE name = $1`, name))
		if !errors.As(err, &refused) || refused.Code != "PW002" {
			t.Errorf("%s: the holder of before is told %v, want PW002", name, err)
		}
	}
	if n := query[int64](t, restored, `SELECT count(*) FROM pglock.list_waiters()`); n != 0 {
		t.Errorf("%d still wait", n)
	}
	// The control: one that has not expired is held, and ends by force.
	const again = `SELECT granted FROM pglock.acquire('{held for long}', '1 h')`
	if query[bool](t, restored, again) {
		t.Error("a lease that has not expired was granted: this test shows nothing")
	}
	do(t, restored, `SELECT pglock.force_release('held for long', token) FROM pglock.list_leases('held for long')`)
	if !query[bool](t, restored, again) {
		t.Error("nor after it was released by force")
	}
}

// Down refuses while a table is protected or guarded, and says which, whether
// by Go or by the migration alone, and changes nothing.
func TestDown_RefusesWhileTablesAreProtected(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	fill(t, pool)
	before := query[string](t, pool, protection)
	refuses := func(what string, err error, names ...string) {
		t.Helper()
		if err == nil {
			t.Fatalf("%s did not refuse", what)
		}
		for _, name := range names {
			if !strings.Contains(err.Error(), name) {
				t.Errorf("%s doesn't name %s: %v", what, name, err)
			}
		}
		if !applied(t, pool) || query[string](t, pool, protection) != before {
			t.Errorf("%s refused, and changed something", what)
		}
	}
	refuses("Down", migrations.Down(t.Context(), pool), "accounts", "parts")
	_, err := stock(t, pool).DownTo(t.Context(), 0)
	refuses("goose", err, "accounts", "parts")
	do(t, pool, `SELECT pglock.unprotect('accounts'), pglock.unprotect('parts')`)
	before = query[string](t, pool, protection)
	refuses("Down beside a guarded table", migrations.Down(t.Context(), pool), "accounts")
	do(t, pool, `DROP TRIGGER pglock_guard_version ON accounts`)
	if err := migrations.Down(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	query[int64](t, pool, `SELECT version FROM accounts WHERE id = 1`)
}
