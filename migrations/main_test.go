package migrations_test

import (
	"context"
	"io/fs"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func empty(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return pgtest.PoolOn(t, pgtest.EmptyDSN(t))
}

// applied says whether all migrations are, and fails the test if only some are.
func applied(t *testing.T, pool *pgxpool.Pool) bool {
	t.Helper()
	states, err := migrations.Status(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, state := range states {
		if !state.AppliedAt.IsZero() {
			n++
		}
	}
	if files, err := fs.Glob(migrations.FS, "*.sql"); err != nil || len(files) != len(states) || n != 0 && n != len(states) {
		t.Fatalf("%d of %d migrations applied, of %d files (%v): %v", n, len(states), len(files), err, states)
	}
	return n > 0
}

func query[T any](t *testing.T, pool *pgxpool.Pool, sql string, args ...any) T {
	t.Helper()
	value, err := look[T](t.Context(), pool, sql, args...)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return value
}

func look[T any](ctx context.Context, pool *pgxpool.Pool, sql string, args ...any) (value T, err error) {
	rows, err := pool.Query(ctx, sql, args...)
	if err != nil {
		return value, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
}

func do(t *testing.T, pool *pgxpool.Pool, sql ...string) {
	t.Helper()
	for _, statement := range sql {
		if _, err := pool.Exec(t.Context(), statement); err != nil {
			t.Fatalf("%s: %v", statement, err)
		}
	}
}

func hasSchema(t *testing.T, pool *pgxpool.Pool) bool {
	t.Helper()
	return query[bool](t, pool, "SELECT to_regnamespace('pglock') IS NOT NULL")
}

// until waits for a query to be true.
func until(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for {
		ok, err := look[bool](ctx, pool, sql, args...)
		if err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
		if ok {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// gate is a key that migrations of these tests wait for.
const gate = 4711

// gated is one migration that waits for the gate and then runs sql, outside a
// transaction.
func gated(sql string) fstest.MapFS {
	return fstest.MapFS{"00001_gated.sql": {Data: []byte(`-- +goose NO TRANSACTION
-- +goose Up
SELECT pg_advisory_lock_shared(4711);
SELECT pg_advisory_unlock_shared(4711);
` + sql + `
-- +goose Down
`)}}
}

// closeGate closes the gate and returns how to open it.
func closeGate(t *testing.T, dsn string) (open func()) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	open = sync.OnceFunc(func() {
		if err := conn.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(open)
	if _, err := conn.Exec(t.Context(), "SELECT pg_advisory_lock($1)", gate); err != nil {
		t.Fatal(err)
	}
	return open
}

// here picks from pg_locks, which shows those of all databases.
const here = "database = (SELECT oid FROM pg_database WHERE datname = current_database())"

const someoneAtTheGate = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 4711 AND NOT granted AND " + here + ")"

// heldLock asks for the lock of a run.
const heldLock = `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
	AND (classid::bigint << 32) | objid::bigint = $1 AND ` + here + `)`
