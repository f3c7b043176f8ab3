package pglock_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
)

type protected struct {
	Target, Pattern string
	Enabled         bool
	Gaps            []string
}

func protectedTables(t testing.TB, db querier) []protected {
	t.Helper()
	rows, err := db.Query(t.Context(), `SELECT target::text, pattern, enabled, gaps::text[] FROM pglock.protected_tables ORDER BY 1`)
	if err != nil {
		t.Fatal(err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[protected])
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// The view shows what is protected, by which pattern, and where not.
func TestProtect_View(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	show := func(when string, want ...protected) {
		t.Helper()
		if diff := cmp.Diff(append([]protected{}, want...), protectedTables(t, pool)); diff != "" {
			t.Errorf("%s:\n%s", when, diff)
		}
	}
	none := []string{}
	exec(t, pool, `CREATE TABLE "odd ""name" (id int); SELECT pglock.protect('"odd ""name"', 'it''s \% 50\\_%');
		CREATE TABLE parts (id int) PARTITION BY LIST (id); CREATE TABLE one PARTITION OF parts FOR VALUES IN (1);
		SELECT pglock.protect('parts', 'parts')`)
	odd := protected{`"odd ""name"`, `it's \% 50\\_%`, true, none}
	show("protected", odd, protected{"parts", "parts", true, none})

	old := newConn(t, pool)
	exec(t, old, `SET standard_conforming_strings = off`)
	exec(t, old, `SELECT pglock.protect('"odd ""name"', $1)`, odd.Pattern)
	show("protected again where backslashes escape", odd, protected{"parts", "parts", true, none})

	exec(t, pool, `CREATE TABLE two PARTITION OF parts FOR VALUES IN (2)`)
	show("a partition created since", odd, protected{"parts", "parts", true, []string{"two"}})
	if _, err := pool.Exec(t.Context(), `INSERT INTO two VALUES (2)`); sqlState(err) != "PW004" {
		t.Errorf("an insert into it: %v, want PW004", err)
	}
	exec(t, pool, `TRUNCATE two; SELECT pglock.protect('parts', 'parts/%')`)
	show("protected again", odd, protected{"parts", "parts/%", true, none})
	if _, err := pool.Exec(t.Context(), `TRUNCATE two`); sqlState(err) != "PW004" {
		t.Errorf("TRUNCATE of it now: %v, want PW004", err)
	}

	exec(t, pool, `ALTER TABLE one DISABLE TRIGGER ALL; ALTER TABLE "odd ""name" DISABLE TRIGGER pglock_protect`)
	odd.Enabled = false
	show("disabled by the owner", odd, protected{"parts", "parts/%", true, []string{"one"}})
	exec(t, pool, `ALTER TABLE one ENABLE TRIGGER ALL; ALTER TABLE "odd ""name" ENABLE REPLICA TRIGGER pglock_protect`)
	show("for replicas only", odd, protected{"parts", "parts/%", true, none})
	exec(t, pool, `CREATE TABLE child () INHERITS ("odd ""name")`)
	odd.Gaps = []string{"child"}
	show("inherited since", odd, protected{"parts", "parts/%", true, none})

	exec(t, pool, `DROP TABLE child; CREATE TABLE parent (id int); ALTER TABLE "odd ""name" INHERIT parent`)
	odd.Gaps = []string{"parent"}
	show("put under a parent since", odd, protected{"parts", "parts/%", true, none})
	exec(t, pool, `INSERT INTO parent VALUES (1); UPDATE parent SET id = 2; ALTER TABLE "odd ""name" NO INHERIT parent`)
	odd.Gaps = none
	exec(t, pool, `CREATE TABLE root (id int) PARTITION BY LIST (id); ALTER TABLE root ATTACH PARTITION "odd ""name" DEFAULT`)
	odd.Gaps = []string{"root"}
	show("attached since", odd, protected{"parts", "parts/%", true, none})
	exec(t, pool, `INSERT INTO root VALUES (1); ALTER TABLE root DETACH PARTITION "odd ""name"`)

	// A detached partition is a table of its own, and keeps a trigger until
	// unprotect is told of it.
	exec(t, pool, `ALTER TABLE parts DETACH PARTITION two; INSERT INTO two VALUES (2); SELECT pglock.unprotect('two'); TRUNCATE two`)
	if _, err := pool.Exec(t.Context(), `SELECT pglock.unprotect('one')`); sqlState(err) != "42809" {
		t.Errorf("unprotect of a partition: %v, want 42809", err)
	}
	exec(t, pool, `SELECT pglock.unprotect('parts'), pglock.unprotect('"odd ""name"')`)
	show("unprotected")
	if left := one[int64](t, pool, `SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'pglock%'`); left != 0 {
		t.Errorf("%d triggers are left", left)
	}
}

// What can't be protected is refused, and nothing is left half protected.
func TestProtect_Refuses(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE plain (id int); CREATE TABLE parent (id int); CREATE TABLE child () INHERITS (parent);
		CREATE TABLE parts (id int) PARTITION BY LIST (id); CREATE TABLE one PARTITION OF parts FOR VALUES IN (1);
		CREATE VIEW seen AS TABLE plain; CREATE MATERIALIZED VIEW kept AS TABLE plain; CREATE SEQUENCE numbers`)
	for _, tt := range []struct{ sql, want string }{
		{`SELECT pglock.protect('parent', '%')`, "42809"},
		{`SELECT pglock.protect('child', '%')`, "42809"},
		{`SELECT pglock.protect('one', '%')`, "42809"},
		{`SELECT pglock.protect('seen', '%')`, "42809"},
		{`SELECT pglock.protect('kept', '%')`, "42809"},
		{`SELECT pglock.protect('numbers', '%')`, "42809"},
		{`SELECT pglock.protect(NULL, '%')`, "42809"},
		{`SELECT pglock.protect(0, '%')`, "42809"},
		{`SELECT pglock.protect('plain', '')`, "22023"},
		{`SELECT pglock.protect('plain', NULL)`, "22023"},
		{`SELECT pglock.protect('plain', 'a\')`, "22025"},
		{`SELECT pglock.protect('plain', '\\\')`, "22025"},
		{`SELECT pglock.protect('none', '%')`, "42P01"},
		{`SELECT pglock.protect('pg_class', '%')`, "42501"},
		{`SELECT pglock.unprotect(NULL)`, "42809"},
		{`SELECT pglock.guard_version('parent')`, "42809"},
		{`SELECT pglock.guard_version(NULL)`, "42809"},
	} {
		if _, err := pool.Exec(t.Context(), tt.sql); sqlState(err) != tt.want {
			t.Errorf("%s: %v, want SQLSTATE %s", tt.sql, err, tt.want)
		}
	}
	if found := protectedTables(t, pool); len(found) > 0 {
		t.Errorf("protected all the same: %v", found)
	}
	exec(t, pool, `SELECT pglock.protect('plain', 'a\\\\')`)
}

// unprotect says nothing about triggers that were never there, in psql either.
func TestProtect_NoNotices(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE plain (id int)`)
	conn, notices := listening(t, pool)
	exec(t, conn, `SELECT pglock.protect('plain', '%')`)
	exec(t, conn, `SELECT pglock.protect('plain', 'p')`)
	exec(t, conn, `SELECT pglock.unprotect('plain')`)
	exec(t, conn, `SELECT pglock.unprotect('plain')`)
	exec(t, conn, `SELECT pglock.guard_version('plain')`)
	exec(t, conn, `SELECT pglock.guard_version('plain')`)
	if len(*notices) > 0 {
		t.Errorf("notices: %q", *notices)
	}
	exec(t, conn, `DROP TRIGGER IF EXISTS never_there ON plain`)
	if len(*notices) == 0 {
		t.Error("no notice is heard: this test shows nothing")
	}
}
