package readme

import (
	"context"
	"database/sql"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// outsiders are all objects, roles and settings that are not in the schema.
const outsiders = `
	SELECT string_agg(what, E'\n' ORDER BY what) FROM (
		SELECT 'relation ' || c.oid::regclass AS what FROM pg_class c
		WHERE c.relnamespace::regnamespace::text NOT IN ('pglock', 'pg_toast')
		UNION ALL SELECT 'function ' || p.oid::regprocedure FROM pg_proc p WHERE p.pronamespace::regnamespace::text <> 'pglock'
		UNION ALL SELECT 'type ' || t.oid::regtype FROM pg_type t WHERE t.typnamespace::regnamespace::text <> 'pglock'
		UNION ALL SELECT 'trigger ' || t.tgname FROM pg_trigger t
		UNION ALL SELECT 'event trigger ' || e.evtname FROM pg_event_trigger e
		UNION ALL SELECT 'extension ' || e.extname FROM pg_extension e
		UNION ALL SELECT 'schema ' || n.nspname || coalesce(n.nspacl::text, '') FROM pg_namespace n
		WHERE n.nspname <> 'pglock' AND n.nspname !~ '^pg_(toast_)?temp_'
		UNION ALL SELECT 'default privileges ' || d.defaclacl::text FROM pg_default_acl d
		UNION ALL SELECT 'setting ' || s.setconfig::text FROM pg_db_role_setting s
		WHERE s.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
		UNION ALL SELECT 'version ' || g::text FROM public.goose_db_version g
	) o`

// By the README's commands the schema comes into a database that has a goose
// history of its own, and goes again. In it is what the README says, and nothing
// else has changed.
//
// goose keeps the name of its table in a variable, as its command does: no other
// test here may use it so.
func TestInstall_BesideTheUsersOwnHistory(t *testing.T) {
	dsn := pgtest.EmptyDSN(t)
	psql := pgtest.Client(t, "psql", dsn)
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	ask := func(query string, args ...any) (answer string) {
		t.Helper()
		if err := db.QueryRowContext(t.Context(), "SELECT coalesce(("+query+"), '')", args...).Scan(&answer); err != nil {
			t.Fatalf("%s: %v", query, err)
		}
		return answer
	}
	if err := goose.SetDialect("postgres"); err != nil {
		t.Fatal(err)
	}
	goose.SetLogger(goose.NopLogger())
	run := func(dir, table, command string) {
		t.Helper()
		goose.SetTableName(table)
		if err := goose.RunContext(t.Context(), command, db, dir); err != nil {
			t.Fatalf("goose %s: %v", command, err)
		}
	}
	users := t.TempDir()
	migrate := func(file, up string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(users, file), []byte("-- +goose Up\n"+up+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		run(users, goose.DefaultTablename, "up")
	}
	// shell runs the commands of a block as they stand there.
	shell := func(b block) {
		t.Helper()
		for _, line := range b.lines {
			if words := strings.Fields(line); words[0] == "goose" {
				run(filepath.Join(root, words[slices.Index(words, "-dir")+1]), words[slices.Index(words, "-table")+1], words[len(words)-1])
				continue
			}
			rest, ok := strings.CutPrefix(line, "psql ")
			if !ok {
				t.Fatalf("%s: what is this?", line)
			}
			cmd := exec.CommandContext(t.Context(), "sh", "-c", `"$PSQL" -X -v ON_ERROR_STOP=1 `+rest)
			cmd.Env = append(os.Environ(), "PSQL="+psql, "DSN="+dsn)
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%s: %v\n%s", line, err, out)
			}
		}
	}
	install, remove := gooseBlocks(t)

	migrate("00001_shop.sql", "CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint); CREATE TABLE leases (house text);")
	before := ask(outsiders)
	shell(install)
	if diff := cmp.Diff(before, ask(outsiders)); diff != "" {
		t.Errorf("installing changed what is not Pawl's:\n%s", diff)
	}
	section, _, _ := strings.Cut(strings.SplitN(text(t), "## The schema", 2)[1], "\n## ")
	for _, kind := range []string{"r", "v", "c"} {
		names := ask(`SELECT string_agg(relname, ' ') FROM pg_class WHERE relnamespace = 'pglock'::regnamespace AND relkind = $1::"char"`, kind)
		for _, name := range strings.Fields(names) {
			if !strings.Contains(section, "`"+name+"`") && !strings.Contains(section, "`pglock."+name+"`") {
				t.Errorf("the README doesn't say that %s is installed", name)
			}
		}
		if names == "" {
			t.Errorf("nothing of kind %s is installed: this test shows nothing", kind)
		}
	}
	if others := ask(`SELECT string_agg(relname, ' ') FROM pg_class WHERE relnamespace = 'pglock'::regnamespace AND relkind NOT IN ('r', 'v', 'c', 'i', 'S')`); others != "" {
		t.Errorf("installed too: %s", others)
	}
	// Its own history goes on.
	migrate("00002_more.sql", "ALTER TABLE accounts ADD COLUMN owner text;")
	after := ask(outsiders)
	if after == before {
		t.Error("a migration of the user's is not seen: this test shows nothing")
	}
	if _, err := db.ExecContext(context.WithoutCancel(t.Context()), `SELECT * FROM pglock.acquire('{accounts/42}', '1 min')`); err != nil {
		t.Error(err)
	}
	shell(remove)
	if diff := cmp.Diff(after, ask(outsiders)); diff != "" {
		t.Errorf("removing changed what is not Pawl's:\n%s", diff)
	}
	if ask(`SELECT to_regnamespace('pglock')::text`) != "" {
		t.Error("the schema is still there")
	}
}

// gooseBlocks are the README's commands that install and that remove.
func gooseBlocks(t *testing.T) (install, remove block) {
	t.Helper()
	code, _ := blocks(text(t))
	for _, b := range code {
		switch {
		case b.language != "sh" || !strings.Contains(b.String(), "goose -dir"):
		case strings.HasSuffix(b.lines[len(b.lines)-1], " up"):
			install = b
		case strings.Contains(b.String(), " reset"):
			remove = b
		}
	}
	if install.lines == nil || remove.lines == nil {
		t.Fatal("the README doesn't say how goose installs and removes the schema")
	}
	return install, remove
}
