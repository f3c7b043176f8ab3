package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
)

// dump is a database as text, without the times at which migrations were applied.
func dump(t *testing.T, dsn string) string {
	t.Helper()
	path := pgtest.Client(t, "pg_dump", dsn)
	args := []string{"-d", dsn}
	// Recent ones put a random word into each dump unless they are given one.
	if help, err := exec.Command(path, "--help").Output(); err != nil {
		t.Fatal(err)
	} else if bytes.Contains(help, []byte("--restrict-key")) {
		args = append(args, "--restrict-key=always")
	}
	out, err := exec.Command(path, args...).Output()
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return regexp.MustCompile(`\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+`).ReplaceAllString(string(out), "<time>")
}

// psql runs a file.
func psql(t *testing.T, dsn, script string, args ...string) (string, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "script.sql")
	if err := os.WriteFile(file, []byte(script), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(pgtest.Client(t, "psql", dsn), append([]string{"-X", "-q", "-d", dsn, "-f", file}, args...)...).CombinedOutput()
	return string(out), err
}

// By the script a database becomes what migrate up makes of it, in one transaction
// and in psql's own too, and goes back to what it was.
func TestMigrateSQL(t *testing.T) {
	t.Parallel()
	up, down := do(t, "", "migrate", "sql"), do(t, "", "migrate", "sql", "--down")
	if up.code != 0 || down.code != 0 {
		t.Fatalf("%+v %+v", up, down)
	}
	byUp := pgtest.EmptyDSN(t)
	empty := dump(t, byUp)
	if got := do(t, byUp, "migrate", "up"); got.code != 0 {
		t.Fatalf("%+v", got)
	}
	want := dump(t, byUp)
	for what, args := range map[string][]string{"psql -f": nil, "psql -1 -f": {"-1"}} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.EmptyDSN(t)
			if out, err := psql(t, dsn, up.stdout, args...); err != nil || args == nil && out != "" {
				t.Fatalf("%v: %s", err, out)
			}
			if diff := cmp.Diff(want, dump(t, dsn)); diff != "" {
				t.Errorf("the database is another than after migrate up:\n%s", diff)
			}
			if got := do(t, dsn, "migrate", "status"); got.code != 0 || strings.Contains(got.stdout, "pending") {
				t.Errorf("%+v", got)
			}
			if err := migrations.Up(t.Context(), pgtest.PoolOn(t, dsn)); err != nil {
				t.Error(err)
			}
			if got := do(t, dsn, "run", "works", "--", "true"); got.code != 0 {
				t.Errorf("%+v", got)
			}
			before := dump(t, dsn)
			if out, err := psql(t, dsn, up.stdout, args...); err == nil {
				t.Errorf("a second time it says %q", out)
			}
			if diff := cmp.Diff(before, dump(t, dsn)); diff != "" {
				t.Errorf("a second time it changed\n%s", diff)
			}
			if out, err := psql(t, dsn, down.stdout, args...); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if diff := cmp.Diff(empty, dump(t, dsn)); diff != "" {
				t.Errorf("taken back the database is another than before:\n%s", diff)
			}
		})
	}
}

// A role that may not make schemas can run the script where one was made for it.
func TestMigrateSQL_SchemaMadeByTheDBA(t *testing.T) {
	t.Parallel()
	up, down := do(t, "", "migrate", "sql").stdout, do(t, "", "migrate", "sql", "--down").stdout
	dba := pgtest.PoolOn(t, pgtest.Server(t).DSN())
	apply(t, dba, `CREATE ROLE app LOGIN PASSWORD 'app'`)
	config := dba.Config().ConnConfig
	dsn := fmt.Sprintf("postgres://app:app@%s:%d/%s?sslmode=disable", config.Host, config.Port, config.Database)
	if out, err := psql(t, dsn, up, "-v", "VERBOSITY=sqlstate"); err == nil || !strings.Contains(out, "42501") {
		t.Fatalf("without a schema and the right to make one: %v: %s", err, out)
	}
	apply(t, dba, `CREATE SCHEMA pglock AUTHORIZATION app`)
	if out, err := psql(t, dsn, up); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got := do(t, dsn, "migrate", "status"); got.code != 0 {
		t.Errorf("%+v", got)
	}
	if out, err := psql(t, dsn, down); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// The way back refuses what it would leave half done, and changes nothing then.
func TestMigrateSQL_DownRefuses(t *testing.T) {
	t.Parallel()
	down := do(t, "", "migrate", "sql", "--down").stdout
	for what, sql := range map[string]string{
		"newer":     `INSERT INTO pglock.goose_db_version (version_id, is_applied) VALUES (99999, true)`,
		"protected": `CREATE TABLE accounts (id int); SELECT pglock.protect('accounts', 'accounts/%')`,
		"foreign":   `CREATE TABLE pglock.mine (id int)`,
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.DSN(t)
			pool := pgtest.PoolOn(t, dsn)
			if _, err := pool.Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
			before := dump(t, dsn)
			if out, err := psql(t, dsn, down); err == nil {
				t.Errorf("it says %q", out)
			}
			if diff := cmp.Diff(before, dump(t, dsn)); diff != "" {
				t.Errorf("it changed\n%s", diff)
			}
		})
	}
}

func TestMigrate(t *testing.T) {
	t.Parallel()
	dsn := pgtest.EmptyDSN(t)
	before := dump(t, dsn)
	for _, tt := range []struct {
		verb    string
		code    int
		applied bool
	}{
		{"status", exitNoSchema, false},
		{"up", 0, true},
		{"up", 0, true},
		{"status", 0, true},
		{"down", 0, false},
		{"down", 0, false},
	} {
		got := do(t, dsn, "migrate", tt.verb, "-o", "json")
		var found []migration
		if err := json.Unmarshal([]byte(got.stdout), &found); err != nil || got.code != tt.code || len(found) == 0 {
			t.Fatalf("%s: %v %+v", tt.verb, err, got)
		}
		for _, m := range found {
			if (m.AppliedAt != nil) != tt.applied {
				t.Errorf("after %s: %+v", tt.verb, m)
			}
		}
	}
	if diff := cmp.Diff(before, dump(t, dsn)); diff != "" {
		t.Errorf("after down the database is another:\n%s", diff)
	}
}
