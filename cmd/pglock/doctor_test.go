package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgserver"
	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
)

// ward is a server that doctor finds healthy, with a database for each case.
type ward struct {
	server   *pgserver.Server
	admin    *pgxpool.Pool
	patients int
}

func newWard(t *testing.T) *ward {
	t.Helper()
	server := pgtest.Server(t, pgserver.With("fsync", "on"), pgserver.With("full_page_writes", "on"),
		pgserver.With("tcp_keepalives_idle", "60"), pgserver.With("tcp_keepalives_interval", "10"), pgserver.With("tcp_keepalives_count", "6"),
		pgserver.With("max_prepared_transactions", "2"), pgserver.With("max_wal_senders", "2"), pgserver.With("wal_level", "replica"))
	w := &ward{server: server, admin: pgtest.PoolOn(t, server.DSN())}
	apply(t, w.admin, `CREATE DATABASE healthy`)
	pool, err := pgxpool.New(t.Context(), w.dsn("healthy"))
	if err != nil {
		t.Fatal(err)
	}
	err = migrations.Up(t.Context(), pool)
	pool.Close()
	if err != nil {
		t.Fatal(err)
	}
	return w
}

func (w *ward) dsn(database string) string {
	return strings.Replace(w.server.DSN(), "/postgres?", "/"+database+"?", 1)
}

func apply(t testing.TB, pool *pgxpool.Pool, statements ...string) {
	t.Helper()
	for _, sql := range statements {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%.80s: %v", sql, err)
		}
	}
}

// admit makes a database.
func (w *ward) admit(t *testing.T) (pool *pgxpool.Pool, dsn string) {
	t.Helper()
	w.patients++
	name := fmt.Sprintf("patient_%d", w.patients)
	apply(t, w.admin, `CREATE DATABASE `+name+` TEMPLATE healthy`)
	dsn = w.dsn(name)
	return pgtest.PoolOn(t, dsn), dsn
}

// diagnose runs doctor and returns what is not in order.
func diagnose(t *testing.T, dsn string) (found map[string][]finding, code int) {
	t.Helper()
	before := time.Now()
	o := do(t, dsn, "doctor", "-o", "json")
	if took := time.Since(before); took > 10*answerBound {
		t.Errorf("doctor took %v", took)
	}
	var all []finding
	if err := json.Unmarshal([]byte(o.stdout), &all); err != nil {
		t.Fatalf("%v\n%s\n%s", err, o.stdout, o.stderr)
	}
	found = map[string][]finding{}
	for _, f := range all {
		if f.Level != healthy {
			found[f.Check] = append(found[f.Check], f)
			if f.Do == "" && f.Level != unseen {
				t.Errorf("nothing to do about %+v", f)
			}
		}
	}
	return found, o.code
}

// shadow has the server answer something else to whoever doesn't pin a search_path.
func shadow(function, body string) []string {
	return []string{`CREATE SCHEMA shadow`, `CREATE FUNCTION shadow.` + function + ` LANGUAGE sql AS $$ ` + body + ` $$`,
		shadowFirst}
}

const shadowFirst = `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = shadow, pg_catalog, public', current_database()); END $$`

func set(name, value string) []string {
	return []string{`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET ` + name + ` = ''` + value + `''', current_database()); END $$`}
}

const manyTransactions = `DO $$ BEGIN FOR i IN 1..10010 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$`

// Each finding is seen where its condition is true, and nothing is found before.
func TestDoctor_Findings(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	for _, tt := range []struct {
		name  string
		check string
		level level
		says  string // part of it
		make  []string
		undo  []string
	}{
		{"lookalike", "server", danger, "CockroachDB", shadow(`version() RETURNS text`, `SELECT 'CockroachDB CCL v25.1'::text`), nil},
		{"another engine", "server", danger, "is no PostgreSQL", shadow(`version() RETURNS text`, `SELECT 'SomeDB 1.0'::text`), nil},
		{"standby", "role", danger, "standby", shadow(`pg_is_in_recovery() RETURNS bool`, `SELECT true`), nil},
		{"read only", "role", danger, "default_transaction_read_only", set("default_transaction_read_only", "on"), nil},
		{"stub locks", "advisory locks", danger, "not PostgreSQL's", shadow(`pg_try_advisory_xact_lock(bigint) RETURNS bool`, `SELECT true`), nil},
		{"old schema", "schema", danger, "version 12", []string{`DELETE FROM pglock.goose_db_version WHERE version_id = 13`}, nil},
		{"no schema", "schema", danger, "none", []string{`DROP SCHEMA pglock CASCADE`}, nil},
		{"cached sequence", "tokens", danger, "blocks of 32", []string{`ALTER SEQUENCE pglock.leases_token_seq CACHE 32`}, nil},
		{"token regression", "tokens", danger, "token regression", []string{`SELECT pglock.acquire('{a}', '1 h')`, `SELECT pglock.acquire('{b}', '1 h')`, `SELECT setval('pglock.leases_token_seq', 1)`}, nil},
		{"unlogged", "lease table", danger, "UNLOGGED", []string{`ALTER TABLE pglock.leases SET UNLOGGED`}, nil},
		{"no autovacuum", "lease table", warning, "autovacuum", []string{`ALTER TABLE pglock.leases SET (autovacuum_enabled = off)`}, nil},
		{"fillfactor", "lease table", warning, "fillfactor", []string{`ALTER TABLE pglock.leases SET (fillfactor = 100)`}, nil},
		{"index", "lease table", warning, "pglock.leases_late", []string{`CREATE INDEX leases_late ON pglock.leases (expires_at)`}, nil},
		{"bloat", "bloat", warning, "dead", []string{`SELECT pglock.acquire('{a}', '1 h')`,
			`INSERT INTO pglock.leases (name, token) SELECT 'x' || i, 0 FROM generate_series(1, 40000) i; DELETE FROM pglock.leases WHERE name LIKE 'x%'`}, nil},
		{"prepared", "prepared", warning, `"forgotten"`, []string{`BEGIN; SELECT pglock.acquire('{a}', '1 h'); PREPARE TRANSACTION 'forgotten'`}, []string{`ROLLBACK PREPARED 'forgotten'`}},
		{"short sessions", "timeouts", danger, "idle_session_timeout is 2s", set("idle_session_timeout", "2s"), nil},
		{"short pauses", "timeouts", warning, "idle_in_transaction_session_timeout is 500ms", set("idle_in_transaction_session_timeout", "500ms"), nil},
		{"short statements", "timeouts", warning, "statement_timeout is 5s", set("statement_timeout", "5s"), nil},
		{"short waits", "timeouts", warning, "lock_timeout is 50ms", set("lock_timeout", "50ms"), nil},
		{"keepalives", "keepalives", warning, "2h", set("tcp_keepalives_idle", "7200"), nil},
		{"no wait for the disk", "durability", warning, "synchronous_commit is off", set("synchronous_commit", "off"), nil},
		{"fsync", "durability", danger, "fsync is off", append([]string{`CREATE SCHEMA shadow`, `CREATE VIEW shadow.pg_settings AS
			SELECT name, setting, CASE name WHEN 'fsync' THEN 'off' ELSE reset_val END AS reset_val FROM pg_catalog.pg_settings`}, shadowFirst), nil},
		{"no synchronous standby", "replication", danger, "none of far", []string{`ALTER SYSTEM SET synchronous_standby_names = 'far'`, `SELECT pg_reload_conf()`},
			[]string{`ALTER SYSTEM RESET synchronous_standby_names`, `SELECT pg_reload_conf()`}},
		{"clock ahead", "clock", warning, "ahead of", shadow(`clock_timestamp() RETURNS timestamptz`, `SELECT pg_catalog.clock_timestamp() + interval '5 s'`), nil},
		{"clock behind", "clock", warning, "behind", shadow(`clock_timestamp() RETURNS timestamptz`, `SELECT pg_catalog.clock_timestamp() - interval '5 s'`), nil},
		{"clock gone back", "expiry", warning, `"a" has 3h`, []string{`SELECT pglock.acquire('{a}', '1 h')`, `UPDATE pglock.leases SET expires_at = clock_timestamp() + interval '3 h 1 s'`}, nil},
		{"disabled triggers", "protection", danger, "disabled", []string{`CREATE TABLE t (id int)`, `SELECT pglock.protect('t', 't/%')`, `ALTER TABLE t DISABLE TRIGGER ALL`}, nil},
		{"gap", "protection", danger, "p1", []string{`CREATE TABLE p (id int) PARTITION BY LIST (id)`, `SELECT pglock.protect('p', 'p/%')`, `CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1)`}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			pool, dsn := w.admit(t)
			if before, code := diagnose(t, dsn); len(before) > 0 || code != 0 {
				t.Fatalf("a healthy server: exit %d, %+v", code, before)
			}
			defer apply(t, pool, tt.undo...)
			apply(t, pool, tt.make...)
			var after map[string][]finding
			var code int
			for end := time.Now().Add(limit); ; { // a reload and statistics come when they come
				after, code = diagnose(t, dsn)
				if len(after[tt.check]) > 0 || time.Now().After(end) {
					break
				}
			}
			got := after[tt.check]
			if len(got) != 1 || got[0].Level != tt.level || !strings.Contains(got[0].Says, tt.says) {
				t.Errorf("%s: %+v, want %s with %q", tt.check, got, tt.level, tt.says)
			}
			if delete(after, tt.check); len(after) > 0 {
				t.Errorf("beside it: %+v", after)
			}
			if want := map[level]int{danger: exitDanger}[tt.level]; code != want {
				t.Errorf("exit %d, want %d", code, want)
			}
		})
	}

	t.Run("short transactions", func(t *testing.T) {
		pool, dsn := w.admit(t)
		if one[int](t, pool, `SELECT current_setting('server_version_num')::int`) < 170000 {
			return // which knows no transaction_timeout
		}
		apply(t, pool, set("transaction_timeout", "1h")...)
		found, code := diagnose(t, dsn)
		if got := found["timeouts"]; code != 0 || len(found) != 1 || len(got) != 1 || got[0].Level != warning || !strings.Contains(got[0].Says, "transaction_timeout is 1h0m") {
			t.Errorf("exit %d, %+v", code, found)
		}
	})

	t.Run("old snapshot", func(t *testing.T) {
		pool, dsn := w.admit(t)
		tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback(t.Context())
		if _, err := tx.Exec(t.Context(), `SELECT FROM pglock.leases`); err != nil {
			t.Fatal(err)
		}
		apply(t, pool, manyTransactions)
		found, code := diagnose(t, dsn)
		if got := found["old snapshots"]; code != 0 || len(got) != 1 || got[0].Level != warning ||
			!strings.Contains(got[0].Says, fmt.Sprintf("backend %d ", tx.Conn().PgConn().PID())) {
			t.Errorf("exit %d, %+v", code, found)
		}
	})

	t.Run("standby without a wait", func(t *testing.T) {
		_, dsn := w.admit(t)
		config, err := pgx.ParseConfig(dsn)
		if err != nil {
			t.Fatal(err)
		}
		config.RuntimeParams["replication"] = "true"
		config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		standby, err := pgx.ConnectConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			_ = standby.Close(t.Context())
			until(t, w.admin, "it gone", `SELECT NOT EXISTS (SELECT FROM pg_stat_replication)`)
		}()
		found, code := diagnose(t, dsn)
		if got := found["replication"]; code != 0 || len(got) != 1 || got[0].Level != warning || !strings.Contains(got[0].Says, "1 standby") {
			t.Errorf("exit %d, %+v", code, found)
		}
	})

	t.Run("full queue", func(t *testing.T) {
		pool, dsn := w.admit(t)
		deaf, err := pool.Acquire(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer deaf.Release()
		for _, sql := range []string{`LISTEN a`, `BEGIN`, `SELECT 1`} {
			if _, err := deaf.Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
		}
		apply(t, pool, `SELECT count(pg_notify('a', repeat('x', 7900) || i)) FROM generate_series(1, 12000) i`)
		found, code := diagnose(t, dsn)
		if got := found["notify"]; code != 0 || len(got) != 1 || got[0].Level != warning {
			t.Errorf("exit %d, %+v", code, found)
		}
		if _, err := deaf.Exec(t.Context(), `ROLLBACK`); err != nil {
			t.Fatal(err)
		}
	})

	t.Run("locked table", func(t *testing.T) {
		pool, dsn := w.admit(t)
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback(t.Context())
		if _, err := tx.Exec(t.Context(), `LOCK TABLE pglock.leases`); err != nil {
			t.Fatal(err)
		}
		found, code := diagnose(t, dsn)
		var dangers []string
		for check, fs := range found {
			if slices.ContainsFunc(fs, func(f finding) bool { return f.Level == danger }) {
				dangers = append(dangers, check)
			}
		}
		if code != exitDanger || len(dangers) != 1 ||
			!strings.Contains(found[dangers[0]][0].Says, fmt.Sprintf("pglock.leases is locked by backend %d ", tx.Conn().PgConn().PID())) {
			t.Errorf("exit %d, %+v", code, found)
		}
	})

	t.Run("few grants", func(t *testing.T) {
		pool, _ := w.admit(t)
		apply(t, pool, `CREATE ROLE bare LOGIN PASSWORD 'bare'`)
		config := pool.Config().ConnConfig
		bare := fmt.Sprintf("postgres://bare:bare@%s:%d/%s?sslmode=disable", config.Host, config.Port, config.Database)
		found, code := diagnose(t, bare)
		hidden := slices.Sorted(maps.Keys(found))
		if want := []string{"expiry", "grants", "old snapshots", "protection", "schema", "tokens"}; code != 0 || !slices.Equal(hidden, want) {
			t.Errorf("exit %d, not in order: %v, want %v", code, hidden, want)
		}
		for check, fs := range found {
			if want := map[bool]level{true: warning, false: unseen}[check == "grants"]; fs[0].Level != want || !strings.Contains(fs[0].Do, "GRANT") {
				t.Errorf("%s: %+v", check, fs)
			}
		}
		apply(t, pool, `GRANT USAGE ON SCHEMA pglock TO bare`, `GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock TO bare`,
			`GRANT SELECT ON ALL TABLES IN SCHEMA pglock TO bare`, `GRANT SELECT ON ALL SEQUENCES IN SCHEMA pglock TO bare`, `GRANT pg_monitor TO bare`)
		if found, _ = diagnose(t, bare); len(found) != 0 {
			t.Errorf("with all grants: %+v", found)
		}
		apply(t, pool, `REVOKE EXECUTE ON FUNCTION pglock.acquire_one FROM bare`)
		found, _ = diagnose(t, bare)
		if got := found["grants"]; len(found) != 1 || len(got) != 1 || !strings.HasSuffix(got[0].Says, "may not call acquire_one") {
			t.Errorf("with all grants but one: %+v", found)
		}
		calls := pgtest.ClientCalls(t, "../../pglock")
		apply(t, pool, `REVOKE EXECUTE ON FUNCTION pglock.`+strings.Join(calls, ", pglock.")+` FROM bare`)
		found, _ = diagnose(t, bare)
		if got := found["grants"]; len(got) != 1 || !strings.HasSuffix(got[0].Says, "may not call "+strings.Join(calls, ", ")) {
			t.Errorf("without what a client calls, %v: %+v", calls, got)
		}
	})

	t.Run("pooler", func(t *testing.T) {
		_, dsn := w.admit(t)
		found, code := diagnose(t, pgtest.PgBouncer(t, dsn))
		if got := found["pooler"]; code != 0 || len(found) != 1 || len(got) != 1 || got[0].Level != warning {
			t.Errorf("exit %d, %+v", code, found)
		}
	})
}

// What can't be made on a test's server.
func TestDoctor_Judgements(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		got  finding
		want level
	}{
		"PostgreSQL 13":         {judgeServer("PostgreSQL 13.20 on x86_64", 130020), danger},
		"PostgreSQL 14":         {judgeServer("PostgreSQL 14.23 on x86_64", 140023), healthy},
		"PostgreSQL 19":         {judgeServer("PostgreSQL 19.0 on x86_64", 190000), healthy},
		"YugabyteDB":            {judgeServer("PostgreSQL 15.2-YB-2.25.0 on x86_64", 150002), danger},
		"a queue half full":     {judgeNotify(0.51), danger},
		"a synchronous standby": {judgeReplication("s1", "on", 2, 1, false), healthy},
		"who may not see it":    {judgeReplication("s1", "on", 2, 0, true), unseen},
		"an old snapshot":       {judgeSnapshot("backend 1", "end it", 1, 2*time.Minute), warning},
		"a young snapshot":      {judgeSnapshot("backend 1", "end it", 1, 2*time.Second), healthy},
		"no keepalives":         {judgeKeepalives(0, 0, 0), warning},
		"a table of many rows":  {judgeBloat(64<<20, 100_000, 0), healthy},
	} {
		if tt.got.Level != tt.want {
			t.Errorf("%s: %+v, want %s", name, tt.got, tt.want)
		}
	}
}
