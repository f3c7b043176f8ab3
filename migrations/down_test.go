package migrations_test

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
)

func TestDown(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for range 2 {
		if err := migrations.Down(t.Context(), pool); err != nil {
			t.Fatal(err)
		}
		if hasSchema(t, pool) {
			t.Fatal("the schema is still there")
		}
	}
	if err := migrations.Up(t.Context(), pool); err != nil || !applied(t, pool) {
		t.Fatalf("up again: %v", err)
	}
}

func TestDown_LeavesASchemaThatIsNotItsOwn(t *testing.T) {
	t.Parallel()
	pool := empty(t)
	do(t, pool, "CREATE SCHEMA pglock", "CREATE TABLE pglock.precious (n int)")
	if err := migrations.Down(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	query[int64](t, pool, "SELECT count(*) FROM pglock.precious")
}

func TestDown_RefusesWhatIsNotItsOwn(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]string{
		"CREATE TABLE pglock.precious (id bigserial PRIMARY KEY)":                                                          "table pglock.precious",
		"CREATE VIEW pglock.held AS SELECT name FROM pglock.leases":                                                        "view pglock.held",
		"CREATE FUNCTION pglock.mine() RETURNS int LANGUAGE sql AS 'SELECT 1'":                                             "function pglock.mine()",
		"CREATE TYPE pglock.mood AS ENUM ('good')":                                                                         "type pglock.mood",
		"CREATE VIEW public.held AS SELECT name FROM pglock.leases":                                                        "view held",
		"CREATE TABLE public.jobs (lease text REFERENCES pglock.leases)":                                                   "table jobs",
		"CREATE TABLE public.log (LIKE pglock.leases INCLUDING CONSTRAINTS); ALTER TABLE public.log INHERIT pglock.leases": "table log",
		"CREATE TABLE public.versions (n bigint DEFAULT pglock.schema_version())":                                          "table versions",
		"CREATE FUNCTION public.held(pglock.leases) RETURNS bool LANGUAGE sql AS 'SELECT true'":                            "function held(pglock.leases)",
		"CREATE INDEX fences_by_token ON pglock.fences (token)":                                                            "",
		"ALTER TABLE pglock.fences ADD COLUMN mine int DEFAULT 1; COMMENT ON SCHEMA pglock IS 'mine'":                      "",
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			do(t, pool, sql)
			err := migrations.Down(t.Context(), pool)
			if want == "" {
				// What is a part of Pawl's goes with it.
				if err != nil || hasSchema(t, pool) {
					t.Errorf("after %s: %v", sql, err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("after %s, want %q: %v", sql, want, err)
			}
			if !applied(t, pool) {
				t.Error("refused, and taken back all the same")
			}
		})
	}
}

// A newer program has migrated the database: an older one goes on with it, and
// does not tear down what it doesn't know.
func TestUpAndDown_NewerDatabase(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	do(t, pool, "INSERT INTO pglock.goose_db_version (version_id, is_applied) VALUES (9999, true)")
	if err := migrations.Up(t.Context(), pool); err != nil {
		t.Errorf("up: %v", err)
	}
	if err := migrations.Down(t.Context(), pool); err == nil || !strings.Contains(err.Error(), "at version 9999") {
		t.Errorf("down: %v", err)
	}
	if !applied(t, pool) {
		t.Error("refused, and taken back all the same")
	}
	do(t, pool, "DELETE FROM pglock.goose_db_version WHERE version_id = 9999")
	if err := migrations.Down(t.Context(), pool); err != nil {
		t.Errorf("down from what it knows: %v", err)
	}
}

// A transaction that somebody forgot must not hold Down up for ever, nor all
// the others who then wait behind Down.
func TestDown_IdleTransaction(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "SELECT FROM pglock.leases"); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	err = migrations.Down(t.Context(), pool)
	if took := time.Since(start); took > time.Minute {
		t.Errorf("it waited for %v", took)
	}
	if err == nil || !strings.Contains(err.Error(), "idle in transaction") || !strings.Contains(err.Error(), "pg_terminate_backend") {
		t.Errorf("it doesn't say who is in the way: %v", err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := migrations.Down(t.Context(), pool); err != nil {
		t.Errorf("once the transaction has ended: %v", err)
	}
}

// stock is goose as its own command sets it up.
func stock(t *testing.T, pool *pgxpool.Pool) *goose.Provider {
	t.Helper()
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	provider, err := goose.NewProvider(goose.DialectPostgres, db, migrations.FS, goose.WithTableName("pglock.goose_db_version"))
	if err != nil {
		t.Fatal(err)
	}
	return provider
}

func TestStockGoose(t *testing.T) {
	t.Parallel()
	pool := empty(t)
	provider := stock(t, pool)
	do(t, pool, "CREATE SCHEMA pglock")
	if _, err := provider.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !applied(t, pool) {
		t.Fatal("Status sees nothing of what goose applied")
	}
	if err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	if n := query[int64](t, pool, "SELECT count(*) - count(DISTINCT version_id) FROM pglock.goose_db_version"); n != 0 {
		t.Errorf("%d migrations applied twice", n)
	}
	if _, err := provider.DownTo(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	left := query[string](t, pool, `SELECT string_agg(relname, ' ' ORDER BY relname) FROM pg_class
		WHERE relnamespace = 'pglock'::regnamespace AND relkind IN ('r', 'v', 'S')`)
	if want := "goose_db_version goose_db_version_id_seq"; left != want {
		t.Errorf("goose leaves %q, want %q", left, want)
	}
	if n := query[int64](t, pool, "SELECT count(*) FROM pg_proc WHERE pronamespace = 'pglock'::regnamespace"); n != 0 {
		t.Errorf("goose leaves %d functions", n)
	}
	if err := migrations.Down(t.Context(), pool); err != nil || hasSchema(t, pool) {
		t.Errorf("what goose leaves: %v", err)
	}
}

// Applied by Up, taken back by goose, step by step, and applied again.
func TestStockGoose_TakesBackWhatUpApplied(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	provider := stock(t, pool)
	states, err := migrations.Status(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	for range states {
		if _, err := provider.Down(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if applied(t, pool) {
		t.Error("still applied")
	}
	if err := migrations.Up(t.Context(), pool); err != nil || !applied(t, pool) {
		t.Errorf("up again: %v", err)
	}
}
