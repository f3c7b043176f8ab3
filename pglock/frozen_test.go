package pglock_test

import (
	"context"
	_ "embed"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
)

//go:embed testdata/client-v0.1.0.sql
var frozenClient string

//go:embed testdata/signatures.txt
var frozenSignatures string

// frozen is a statement of the first release's client.
type frozen struct{ name, takes, answers, sql string }

var frozenForm = regexp.MustCompile(`(?m)^-- (\w+)\((.*)\) = (.*)\n((?s:.+?));$`)

func frozenStatements(t testing.TB) []frozen {
	t.Helper()
	var all []frozen
	for _, m := range frozenForm.FindAllStringSubmatch(frozenClient, -1) {
		all = append(all, frozen{m[1], m[2], m[3], m[4]})
	}
	if want := strings.Count(frozenClient, ";\n"); len(all) != want {
		t.Fatalf("%d of %d statements are understood", len(all), want)
	}
	return all
}

// prepareFrozen prepares the statements under their names. It returns the name
// of the first for which the server asks or answers otherwise than it did.
func prepareFrozen(t testing.TB, conn *pgx.Conn) (changed string, err error) {
	t.Helper()
	typeOf := func(oid uint32) string { return one[string](t, conn, `SELECT format_type($1, NULL)`, oid) }
	for _, f := range frozenStatements(t) {
		statement, err := conn.Prepare(context.Background(), f.name, f.sql)
		if err != nil {
			return f.name, err
		}
		var takes, answers []string
		for _, oid := range statement.ParamOIDs {
			takes = append(takes, typeOf(oid))
		}
		for _, field := range statement.Fields {
			column := typeOf(field.DataTypeOID)
			if strings.Contains(f.sql, " FROM ") || strings.Contains(f.sql, "\nFROM ") {
				column = field.Name + " " + column
			}
			answers = append(answers, column)
		}
		before := frozen{takes: f.takes, answers: f.answers}
		now := frozen{takes: strings.Join(takes, ", "), answers: strings.Join(answers, ", ")}
		if before != now {
			return f.name, fmt.Errorf("%s takes (%s) and answers %s, and took (%s) and answered %s", f.name, now.takes, now.answers, before.takes, before.answers)
		}
	}
	return "", nil
}

// What the first release's client sends is understood, and answered by columns
// of the names and the types that it reads.
func TestFrozen_Types(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	if changed, err := prepareFrozen(t, newConn(t, pool)); err != nil {
		t.Errorf("%s: %v", changed, err)
	}
	for _, tt := range []struct{ name, change, seen string }{
		{"control: renamed", `ALTER FUNCTION pglock.cancel RENAME TO cancel_ticket`, "cancel"},
		{"control: a parameter more", `DROP FUNCTION pglock.guard;
			CREATE FUNCTION pglock.guard(name text, token bigint, strict boolean) RETURNS void LANGUAGE sql AS ''`, "guard"},
		{"control: another column's name", `DROP FUNCTION pglock.list_fences;
			CREATE FUNCTION pglock.list_fences() RETURNS TABLE (name text, token bigint) LANGUAGE sql AS 'SELECT NULL::text, 1::bigint'`, "list_fences"},
		{"control: another column's type", `DROP FUNCTION pglock.list_fences;
			CREATE FUNCTION pglock.list_fences() RETURNS TABLE (resource text, token text) LANGUAGE sql AS 'SELECT NULL::text, NULL::text'`, "list_fences"},
		{"control: another answer", `DROP FUNCTION pglock.purge;
			CREATE FUNCTION pglock.purge(idle interval) RETURNS integer LANGUAGE sql AS 'SELECT 1'`, "purge"},
		{"a function more", `CREATE FUNCTION pglock.later(name text) RETURNS void LANGUAGE sql AS ''`, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			exec(t, pool, tt.change)
			if changed, err := prepareFrozen(t, newConn(t, pool)); changed != tt.seen {
				t.Errorf("%q was seen to have changed (%v), want %q", changed, err, tt.seen)
			}
		})
	}
}

// signatures are the functions of the schema that somebody outside calls, as
// they are called, and its view. What only other functions call pins no
// search_path of its own, and may change.
func signatures(t testing.TB, pool *pgxpool.Pool) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `
		SELECT format('%s(%s) %s', p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid))
		FROM pg_proc p
		WHERE p.pronamespace = 'pglock'::regnamespace
		  AND (p.prosecdef OR p.proname IN ('protect', 'unprotect', 'guard_version', 'bump_version'))
		UNION ALL
		SELECT format('%s: %s', c.relname, string_agg(format('%s %s', a.attname, format_type(a.atttypid, a.atttypmod)), ', ' ORDER BY a.attnum))
		FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
		WHERE c.relnamespace = 'pglock'::regnamespace AND c.relkind = 'v' AND a.attnum > 0
		GROUP BY c.relname
		ORDER BY 1`)
	if err != nil {
		t.Fatal(err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// Signatures are frozen: a function may be added, and its line then stands in
// testdata/signatures.txt; none is changed or goes away.
func TestFrozen_Signatures(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	promised := strings.Split(strings.TrimSpace(frozenSignatures), "\n")
	compare := func() (gone, added []string) {
		now := signatures(t, pool)
		return without(promised, now), without(now, promised)
	}
	gone, added := compare()
	for _, line := range gone {
		t.Errorf("promised, and changed or gone: %s", line)
	}
	for _, line := range added {
		t.Errorf("new, and belongs into testdata/signatures.txt: %s", line)
	}
	exec(t, pool, `DROP FUNCTION pglock.purge;
		CREATE FUNCTION pglock.purge(idle interval, most bigint DEFAULT NULL) RETURNS bigint LANGUAGE sql SECURITY DEFINER AS 'SELECT 1::bigint'`)
	if nowGone, nowAdded := compare(); len(nowGone) != len(gone)+1 || len(nowAdded) != len(added)+1 {
		t.Error("a parameter more is not seen: this test shows nothing")
	}
}

// without returns the lines that are not among others.
func without(lines, others []string) []string {
	return slices.DeleteFunc(slices.Clone(lines), func(line string) bool { return slices.Contains(others, line) })
}
