package main

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

func execute(t *testing.T, dsn, sql string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func lines(t *testing.T, dsn, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	rows, err := conn.Query(t.Context(), sql)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return strings.Join(all, "\n")
}

// snapshot is what a database holds that is not the server's own: every schema,
// relation, function and type, and what stands in pglock's tables.
func snapshot(t *testing.T, dsn string) string {
	t.Helper()
	s := lines(t, dsn, `
		WITH ours AS (SELECT oid, nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema')
		SELECT 'schema ' || nspname FROM ours
		UNION ALL SELECT format('relation %s.%s %s %s', nspname, relname, relkind, relacl) FROM pg_class JOIN ours ON ours.oid = relnamespace
		UNION ALL SELECT format('function %s.%s(%s)', nspname, proname, proargtypes) FROM pg_proc JOIN ours ON ours.oid = pronamespace
		UNION ALL SELECT format('type %s.%s', nspname, typname) FROM pg_type JOIN ours ON ours.oid = typnamespace
		ORDER BY 1`)
	if strings.Contains(s, "schema pglock") {
		for _, table := range []string{"leases", "waiters", "fences", "goose_db_version"} {
			s += "\n" + lines(t, dsn, fmt.Sprintf("SELECT x::text FROM pglock.%s x ORDER BY 1", table))
		}
	}
	return s
}

// A database of somebody else's is afterwards what it was before, with and
// without pglock's schema in it.
func TestLeavesNoTrace(t *testing.T) {
	t.Parallel()
	for name, dsn := range map[string]func(testing.TB) string{"without the schema": pgtest.EmptyDSN, "with it": pgtest.DSN} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := dsn(t)
			execute(t, dsn, `
				CREATE TABLE public.goose_db_version (id int PRIMARY KEY, version_id bigint);
				INSERT INTO public.goose_db_version VALUES (1, 20200101);
				CREATE TABLE accounts (id int PRIMARY KEY, balance int)`)
			if name == "with it" {
				locks := pglock.New(pgtest.PoolOn(t, dsn))
				t.Cleanup(func() { _ = locks.Close(context.Background()) })
				if _, err := locks.Acquire(t.Context(), "of the application", time.Hour); err != nil {
					t.Fatal(err)
				}
				execute(t, dsn, "SELECT pglock.fence('of the application', 5)")
			}
			before := snapshot(t, dsn)
			if code, stdout, stderr := demo(t, "-dsn="+dsn, "-only=none,lease,fenced"); code != 0 || stderr != "" {
				t.Fatalf("exit %d\n%s%s", code, stdout, stderr)
			}
			if after := snapshot(t, dsn); after != before {
				t.Errorf("before:\n%s\nafter:\n%s", before, after)
			}
		})
	}
}

func TestKeep(t *testing.T) {
	t.Parallel()
	dsn := pgtest.EmptyDSN(t)
	code, stdout, stderr := demo(t, "-dsn="+dsn, "-only=row", "-keep", "-json")
	if code != 0 {
		t.Fatalf("exit %d\n%s%s", code, stdout, stderr)
	}
	if got := objects(t, stdout); len(got) != 1 {
		t.Errorf("%v", got)
	}
	schema := lines(t, dsn, "SELECT nspname::text FROM pg_namespace WHERE nspname ~ '^lostupdate_'")
	if got := lines(t, dsn, "SELECT balance::text FROM "+schema+".accounts"); got != "960" {
		t.Errorf("balance %s", got)
	}
	for _, want := range []string{"SELECT * FROM " + schema + ".accounts", "DROP SCHEMA " + schema + " CASCADE", "migrations.Down"} {
		if !strings.Contains(stderr, want) {
			t.Errorf("%q lacks %q", stderr, want)
		}
	}
	// The next run applied nothing, so it removes nothing but its own.
	before := snapshot(t, dsn)
	if code, stdout, stderr := demo(t, "-dsn="+dsn, "-only=lease"); code != 0 {
		t.Fatalf("exit %d\n%s%s", code, stdout, stderr)
	}
	if after := snapshot(t, dsn); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

// A role that may use the locks and make a schema, and nothing more.
func TestApplicationRole(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	role := strings.TrimPrefix(u.Path, "/") // as unique as the database
	execute(t, dsn, "CREATE ROLE "+role+" LOGIN PASSWORD 'secret'")
	t.Cleanup(func() {
		conn, err := pgx.Connect(context.Background(), dsn)
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close(context.Background())
		if _, err := conn.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role); err != nil {
			t.Error(err)
		}
	})
	u.User = url.UserPassword(role, "secret")

	code, _, stderr := demo(t, "-dsn="+u.String(), "-only=row")
	if code != 1 || !strings.Contains(stderr, "GRANT CREATE ON DATABASE") {
		t.Errorf("exit %d, %s", code, stderr)
	}
	execute(t, dsn, fmt.Sprintf(`
		GRANT CREATE ON DATABASE %s TO %[1]s;
		GRANT USAGE ON SCHEMA pglock TO %[1]s;
		GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock TO %[1]s`, role))
	code, stdout, stderr := demo(t, "-dsn="+u.String(), "-only=lease,fenced")
	if code != 0 || !strings.Contains(stdout, "may use leases and not delete them") {
		t.Errorf("exit %d\n%s%s", code, stdout, stderr)
	}
	if left := lines(t, dsn, "SELECT nspname::text FROM pg_namespace WHERE nspname ~ '^lostupdate_'"); left != "" {
		t.Errorf("schema %s stays", left)
	}
}

// An older schema is not the demo's to change.
func TestOlderSchema(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	execute(t, dsn, "DELETE FROM pglock.goose_db_version WHERE version_id = (SELECT max(version_id) FROM pglock.goose_db_version)")
	before := snapshot(t, dsn)
	code, _, stderr := demo(t, "-dsn="+dsn)
	if code != 1 || !strings.Contains(stderr, "pglock migrate up") {
		t.Errorf("exit %d, %s", code, stderr)
	}
	if after := snapshot(t, dsn); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

func TestNoServer(t *testing.T) {
	t.Parallel()
	code, stdout, stderr := demo(t, "-dsn=postgres://postgres@127.0.0.1:1/nowhere?connect_timeout=5")
	if code != 1 || stdout != "" || !strings.Contains(stderr, "127.0.0.1:1") {
		t.Errorf("exit %d\n%s%s", code, stdout, stderr)
	}
}
