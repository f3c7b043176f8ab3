package pglock_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	osexec "os/exec"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// fort is a database of protected tables, and a role that may write to them as
// far as the database's owner is concerned, has what the README grants, and a
// schema evil of its own.
type fort struct {
	owner  *pgxpool.Pool
	role   string
	dsn    string // the role's
	psql   atomic.Pointer[string]
	spells *strings.Replacer
}

// tables of the fort; the digest is of those that are protected, and of the
// ledger, which is fenced. To surrender is to protect and to fence no longer.
const (
	fortTables = `
		CREATE TABLE accounts (id int PRIMARY KEY, balance int);
		INSERT INTO accounts SELECT n, 100 FROM generate_series(1, 3) n;
		CREATE VIEW seen AS SELECT * FROM accounts;
		CREATE TABLE parents (id int PRIMARY KEY);
		INSERT INTO parents VALUES (1), (2);
		CREATE TABLE children (id int PRIMARY KEY, parent int REFERENCES parents ON DELETE CASCADE ON UPDATE CASCADE);
		INSERT INTO children VALUES (1, 1), (2, 2);
		CREATE TABLE parts (id int PRIMARY KEY, n int) PARTITION BY RANGE (id);
		CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (1) TO (10);
		CREATE TABLE parts_2 PARTITION OF parts FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (id);
		CREATE TABLE parts_2_1 PARTITION OF parts_2 FOR VALUES FROM (10) TO (15);
		INSERT INTO parts VALUES (1, 1), (11, 1);
		CREATE TABLE kin (id int, n int);
		CREATE TABLE ledger (entry text);
		SELECT pglock.fence('ledger', 5);
		SELECT pglock.protect(t, 'accounts/%') FROM unnest('{accounts,children,parts,kin}'::regclass[]) t;
		CREATE TABLE kin_child () INHERITS (kin);
		INSERT INTO kin_child VALUES (1, 1);
		CREATE TABLE parts_late (id int PRIMARY KEY, n int);
		INSERT INTO parts_late VALUES (21, 1);
		ALTER TABLE parts ATTACH PARTITION parts_late FOR VALUES FROM (20) TO (30);
		CREATE TABLE parts_later PARTITION OF parts FOR VALUES FROM (30) TO (40)`
	fortDigest = `SELECT md5(concat(
		(SELECT string_agg(t::text, ',' ORDER BY id) FROM accounts t), '/',
		(SELECT string_agg(t::text, ',' ORDER BY id) FROM children t), '/',
		(SELECT string_agg(t::text, ',' ORDER BY id) FROM parts t), '/',
		(SELECT string_agg(t::text, ',' ORDER BY id) FROM kin t), '/',
		(SELECT string_agg(t::text, ',') FROM ledger t)))`
	surrender = `SELECT pglock.unprotect(t) FROM unnest('{accounts,children,parts,kin}'::regclass[]) t; SELECT pglock.reset_fence('ledger', 1)`
)

// appGrants are those of the README, for the role.
func appGrants(t testing.TB, role string) string {
	t.Helper()
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "<!-- grants -->\n```sql\n")
	sql, _, found := strings.Cut(rest, "```")
	if !found {
		t.Fatal("the README has no grants")
	}
	return strings.ReplaceAll(sql, " app;", " "+role+";")
}

// login makes a role that can log in and do no more than grants says.
func login(t testing.TB, owner *pgxpool.Pool, dsn, grants string) (role, roleDSN string) {
	t.Helper()
	role, password := "app_"+strings.ToLower(rand.Text()[:10]), rand.Text()
	exec(t, owner, `CREATE ROLE `+role+` LOGIN PASSWORD '`+password+`'`)
	t.Cleanup(func() { exec(t, owner, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	exec(t, owner, strings.ReplaceAll(grants, "ROLE", role))
	return role, pgtest.With(t, pgtest.With(t, dsn, "user", role), "password", password)
}

func newFort(t testing.TB) *fort {
	t.Helper()
	dsn := pgtest.DSN(t)
	f := &fort{owner: pgtest.PoolOn(t, dsn)}
	exec(t, f.owner, fortTables)
	f.role, f.dsn = login(t, f.owner, dsn, appGrants(t, "ROLE")+`
		GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES IN SCHEMA public TO ROLE;
		CREATE SCHEMA evil AUTHORIZATION ROLE`)
	take := func(db querier, name string) string {
		return fmt.Sprint(one[int64](t, db, `SELECT token FROM pglock.acquire(ARRAY[$1], '1 h') WHERE granted`, name))
	}
	app := pgtest.PoolOn(t, f.dsn)
	f.spells = strings.NewReplacer("{theirs}", take(f.owner, "accounts/theirs"), "{mine}", take(app, "accounts/mine"),
		"{other}", take(app, "other"), "{inject}", take(app, `x", 1], ["accounts/theirs", 2], ["`), "{owner}", one[string](t, f.owner, `SELECT quote_ident(session_user)`))
	return f
}

// path is a way to the server.
type path struct {
	name string
	// run runs the statements in one transaction, COMMIT included, and returns
	// the SQLSTATE of the first that fails.
	run func(f *fort, t *testing.T, level pgx.TxIsoLevel, statements []string) string
}

var paths = []path{
	{"pgx", func(f *fort, t *testing.T, level pgx.TxIsoLevel, statements []string) string {
		return f.byPgx(t, pgx.QueryExecModeDescribeExec, level, statements)
	}},
	{"simple protocol", func(f *fort, t *testing.T, level pgx.TxIsoLevel, statements []string) string {
		return f.byPgx(t, pgx.QueryExecModeSimpleProtocol, level, statements)
	}},
	{"psql", (*fort).byPsql},
}

// aRow is what COPY brings.
const aRow = "9\t9\n"

func (f *fort) byPgx(t *testing.T, mode pgx.QueryExecMode, level pgx.TxIsoLevel, statements []string) string {
	t.Helper()
	config, err := pgx.ParseConfig(f.dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.DefaultQueryExecMode = mode
	conn, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	tx, err := conn.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	if err != nil {
		t.Fatal(err)
	}
	for _, sql := range statements {
		if err = write(t.Context(), tx, sql); err != nil {
			break
		}
	}
	state := sqlState(err)
	if err != nil && state == "" {
		t.Errorf("no error of the server's: %v", err)
	}
	if err := tx.Commit(t.Context()); (err == nil) != (state == "") {
		t.Errorf("COMMIT after SQLSTATE %q: %v", state, err)
	}
	return state
}

func write(ctx context.Context, tx pgx.Tx, sql string) error {
	if strings.HasPrefix(sql, "COPY") {
		_, err := tx.Conn().PgConn().CopyFrom(ctx, strings.NewReader(aRow), sql)
		return err
	}
	_, err := tx.Exec(ctx, sql)
	return err
}

var psqlState = regexp.MustCompile(`ERROR: +([0-9A-Z]{5})`)

func (f *fort) byPsql(t *testing.T, level pgx.TxIsoLevel, statements []string) string {
	t.Helper()
	script := "BEGIN ISOLATION LEVEL " + string(level) + ";\n"
	for _, sql := range statements {
		script += sql + ";\n"
		if strings.HasPrefix(sql, "COPY") {
			script += aRow + "\\.\n"
		}
	}
	psql := f.psql.Load()
	if psql == nil {
		found := pgtest.Client(t, "psql", f.dsn)
		psql = &found
		f.psql.Store(psql)
	}
	cmd := osexec.CommandContext(t.Context(), *psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=sqlstate", "-d", f.dsn)
	cmd.Stdin = strings.NewReader(script + "COMMIT;\n")
	out, err := cmd.CombinedOutput()
	m := psqlState.FindSubmatch(out)
	if (err == nil) != (m == nil) {
		t.Fatalf("psql: %v\n%s", err, out)
	}
	if m == nil {
		return ""
	}
	return string(m[1])
}

// attack is what the role tries.
type attack struct {
	name string
	sql  []string
	want string // the SQLSTATE; "": the attack believes that it went well
	// Refused, or harmless, whether or not the tables are protected.
	always bool
	since  int // the version of PostgreSQL
	// Above READ COMMITTED the lease could be younger than the snapshot, so that
	// it may be 40001 instead.
	unseen bool
}

func unseen(a attack) attack {
	a.unseen = true
	return a
}

// rightful is what the holder does, before and after all attacks: nobody has
// locked it out.
var rightful = []string{`SELECT pglock.guard('accounts/mine', {mine})`, `SELECT pglock.present('accounts/mine', {mine})`,
	`SELECT pglock.fence('ledger', 5)`, `UPDATE accounts SET balance = balance`}

// everywhere calls try for each path and level, with -short at READ COMMITTED.
func everywhere(try func(p path, level pgx.TxIsoLevel)) {
	for _, p := range paths {
		for i, level := range levels {
			if testing.Short() && i > 0 {
				continue
			}
			try(p, level)
		}
	}
}

// storm tries each attack on each path, and shows by leaving the tables
// unprotected that it would have seen them succeed.
func storm(t *testing.T, attacks []attack) {
	f := newFort(t)
	before := one[string](t, f.owner, fortDigest)
	version := one[int32](t, f.owner, `SELECT current_setting('server_version_num')::int`)
	attacks = slices.DeleteFunc(slices.Clone(attacks), func(a attack) bool { return int(version) < a.since })
	attempt := func(statements []string) []string {
		sql := make([]string, len(statements))
		for i, s := range statements {
			sql[i] = f.spells.Replace(s)
		}
		return sql
	}
	t.Run("protected", func(t *testing.T) {
		for _, a := range attacks {
			everywhere(func(p path, level pgx.TxIsoLevel) {
				t.Run(a.name+"/"+p.name+"/"+string(level), func(t *testing.T) {
					t.Parallel()
					state := p.run(f, t, level, attempt(a.sql))
					if state != a.want && !(a.unseen && level != pgx.ReadCommitted && state == "40001") {
						t.Errorf("SQLSTATE %q, want %q", state, a.want)
					}
				})
			})
		}
	})
	if after := one[string](t, f.owner, fortDigest); after != before {
		t.Error("something was changed")
	}
	everywhere(func(p path, level pgx.TxIsoLevel) {
		t.Run("rightful/"+p.name+"/"+string(level), func(t *testing.T) {
			if state := p.run(f, t, level, attempt(rightful)); state != "" {
				t.Errorf("SQLSTATE %s", state)
			}
		})
	})
	exec(t, f.owner, surrender)
	app := pgtest.PoolOn(t, f.dsn)
	for _, a := range attacks {
		t.Run("unprotected/"+a.name, func(t *testing.T) {
			sql := attempt(a.sql)
			inTx(t, app, pgx.ReadCommitted, func(tx pgx.Tx) {
				for _, sql := range sql {
					if err := write(t.Context(), tx, sql); a.always && sqlState(err) == a.want && err != nil {
						return
					} else if err != nil {
						t.Fatalf("%s: %v", sql, err)
					}
				}
				if (one[string](t, tx, fortDigest) == before) != a.always {
					t.Error("the same attack changes nothing: this test shows nothing")
				}
			})
		})
	}
}
