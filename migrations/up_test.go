package migrations_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
)

func TestUp(t *testing.T) {
	t.Parallel()
	pool := empty(t)
	before := time.Now().Add(-time.Minute)
	if applied(t, pool) || hasSchema(t, pool) {
		t.Fatal("Status made something")
	}
	for range 2 {
		if err := migrations.Up(t.Context(), pool); err != nil {
			t.Fatal(err)
		}
	}
	if !applied(t, pool) {
		t.Fatal("not applied")
	}
	states, err := migrations.Status(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	for _, state := range states {
		if state.AppliedAt.Before(before) || state.AppliedAt.After(time.Now().Add(time.Minute)) {
			t.Errorf("%s, and it is %s", state, time.Now().UTC())
		}
	}
	if n := query[int64](t, pool, "SELECT pglock.schema_version()"); n != states[len(states)-1].Version {
		t.Errorf("the schema says it has version %d, the last file is %s", n, states[len(states)-1])
	}
}

// The time in the version table has no zone; it is not to depend on that of
// the server.
func TestStatus_ElsewhereOnEarth(t *testing.T) {
	t.Parallel()
	pool := empty(t)
	name := query[string](t, pool, "SELECT quote_ident(current_database())")
	do(t, pool, "ALTER DATABASE "+name+" SET TimeZone = 'Pacific/Kiritimati'")
	if err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	states, err := migrations.Status(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	if off := time.Since(states[0].AppliedAt).Abs(); off > time.Hour {
		t.Errorf("%s is %v from now", states[0], off)
	}
}

func TestUp_TwentyAtOnce(t *testing.T) {
	t.Parallel()
	dsn := pgtest.EmptyDSN(t)
	var all sync.WaitGroup
	start := make(chan struct{})
	for range 20 {
		pool := pgtest.PoolOn(t, dsn)
		all.Go(func() {
			<-start
			if err := migrations.Up(t.Context(), pool); err != nil {
				t.Error(err)
			}
		})
	}
	close(start)
	all.Wait()
	pool := pgtest.PoolOn(t, dsn)
	if !applied(t, pool) {
		t.Error("not applied")
	}
	if n := query[int64](t, pool, "SELECT count(*) - count(DISTINCT version_id) FROM pglock.goose_db_version"); n != 0 {
		t.Errorf("%d migrations applied twice", n)
	}
}

// Under the strictest isolation too, which a database may have for a default.
func TestUp_SerializableByDefault(t *testing.T) {
	t.Parallel()
	pool := empty(t)
	name := query[string](t, pool, "SELECT quote_ident(current_database())")
	do(t, pool, "ALTER DATABASE "+name+" SET default_transaction_isolation = 'serializable'")
	if err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	if err := migrations.Down(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
}

// A role that may not make schemas can apply the migrations to one that was
// made for it.
func TestUp_SchemaMadeByTheDBA(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t)
	dba := pgtest.PoolOn(t, server.DSN())
	do(t, dba, "CREATE ROLE app LOGIN PASSWORD 'app'")
	config := dba.Config()
	config.ConnConfig.User, config.ConnConfig.Password = "app", "app"
	app, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer app.Close()
	var refused *pgconn.PgError
	if err := migrations.Up(t.Context(), app); !errors.As(err, &refused) || refused.Code != "42501" || !strings.Contains(err.Error(), `role "app" needs CREATE on the database`) {
		t.Fatalf("without a schema and the right to make one: %v", err)
	}
	do(t, dba, "CREATE SCHEMA pglock AUTHORIZATION app")
	if err := migrations.Up(t.Context(), app); err != nil {
		t.Fatal(err)
	}
	if !applied(t, app) {
		t.Error("not applied")
	}
}

func TestUp_ClosedPool(t *testing.T) {
	t.Parallel()
	pool := empty(t)
	pool.Close()
	if err := migrations.Up(t.Context(), pool); err == nil || !strings.Contains(err.Error(), "closed pool") {
		t.Error(err)
	}
}

func TestUp_CancelledContext(t *testing.T) {
	t.Parallel()
	pool := empty(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for name, err := range map[string]error{
		"up":   migrations.Up(ctx, pool),
		"down": migrations.Down(ctx, pool),
	} {
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if hasSchema(t, pool) {
		t.Error("it made the schema all the same")
	}
}

// What waits for the lock must not hold a snapshot: CREATE INDEX CONCURRENTLY,
// in the run that has the lock, waits for all of those.
func TestUp_M01_WaitersLetAnIndexBeBuilt(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		wait  func(context.Context, *pgxpool.Pool) error
		waits string // whether all three do
		ok    bool
	}{
		"ours": {func(ctx context.Context, pool *pgxpool.Pool) error {
			return migrations.UpFiles(ctx, pool, fstest.MapFS{"00001_gated.sql": {Data: []byte("-- +goose Up\nSELECT 1;\n")}})
		}, `SELECT count(*) = 3 FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'waiter' AND query LIKE '%pg_try_advisory_lock%'`, true},
		"control: waits in the server": {func(ctx context.Context, pool *pgxpool.Pool) error {
			_, err := pool.Exec(ctx, "SELECT pg_advisory_lock($1)", migrations.LockKey)
			return err
		}, `SELECT count(*) = 3 FROM pg_locks JOIN pg_stat_activity USING (pid)
			WHERE datname = current_database() AND application_name = 'waiter' AND locktype = 'advisory' AND NOT granted`, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.EmptyDSN(t)
			pool := pgtest.PoolOn(t, dsn)
			do(t, pool, "CREATE TABLE grown AS SELECT generate_series(1, 1000) AS n")
			open := closeGate(t, dsn)
			built := make(chan error, 1)
			go func() {
				built <- migrations.UpFiles(t.Context(), pool, gated("CREATE INDEX CONCURRENTLY grown_n ON grown (n);"))
			}()
			until(t, pool, someoneAtTheGate)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			waited := make(chan error, 3)
			for range cap(waited) {
				// Their sessions are told apart by the name of the program.
				waiter := pgtest.PoolOn(t, pgtest.With(t, dsn, "application_name", "waiter"))
				go func() { waited <- test.wait(ctx, waiter) }()
			}
			until(t, pool, test.waits)
			open()
			// The server resolves a deadlock by ending one of those in it.
			var failed error
			select {
			case failed = <-built:
			case failed = <-waited:
			case <-time.After(20 * time.Second):
				failed = errors.New("no index after 20 s")
			}
			if test.ok && failed != nil {
				t.Error(failed)
			}
			if !test.ok && failed == nil {
				t.Error("the index was built all the same: this test shows nothing")
			}
		})
	}
}

func TestUp_M03_RefusesATransactionPooler(t *testing.T) {
	t.Parallel()
	dsn := pgtest.EmptyDSN(t)
	direct := pgtest.PoolOn(t, dsn)
	pooled := pgtest.PoolOn(t, pgtest.PgBouncer(t, dsn))
	for range 3 {
		err := migrations.Up(t.Context(), pooled)
		if err == nil || !strings.Contains(err.Error(), "pooler") || !strings.Contains(err.Error(), "DSN that leads to the server itself") {
			t.Fatalf("through a pooler: %v", err)
		}
	}
	if hasSchema(t, direct) {
		t.Error("refused, and made the schema all the same")
	}
	if err := migrations.Up(t.Context(), direct); err != nil {
		t.Fatalf("directly: %v", err)
	}
	if err := migrations.Down(t.Context(), pooled); err == nil || !strings.Contains(err.Error(), "pooler") {
		t.Errorf("down through a pooler: %v", err)
	}
	if !applied(t, direct) {
		t.Error("refused, and taken back all the same")
	}
}

func TestUp_M06_TakesTheLock(t *testing.T) {
	t.Parallel()
	dsn := pgtest.EmptyDSN(t)
	pool := pgtest.PoolOn(t, dsn)
	if query[bool](t, pool, heldLock, migrations.LockKey) {
		t.Fatal("the lock is held before anything runs")
	}
	open := closeGate(t, dsn)
	up := make(chan error)
	go func() { up <- migrations.UpFiles(t.Context(), pool, gated("")) }()
	until(t, pool, someoneAtTheGate)
	if !query[bool](t, pool, heldLock, migrations.LockKey) {
		t.Error("no lock is held while a migration runs")
	}
	open()
	if err := <-up; err != nil {
		t.Error(err)
	}
	if query[bool](t, pool, heldLock, migrations.LockKey) {
		t.Error("the lock is held afterwards")
	}
}

// The version table, and before it the schema, are made under the lock too.
func TestUp_M06_MakesNothingBeforeItHasTheLock(t *testing.T) {
	t.Parallel()
	dsn := pgtest.EmptyDSN(t)
	pool, waiter := pgtest.PoolOn(t, dsn), pgtest.PoolOn(t, pgtest.With(t, dsn, "application_name", "waiter"))
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	if _, err := conn.Exec(t.Context(), "SELECT pg_advisory_lock($1)", migrations.LockKey); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	up := make(chan error)
	go func() { up <- migrations.Up(ctx, waiter) }()
	// When it tries again it has looked who holds the lock.
	for _, query := range []string{"%FROM pg_locks%", "%pg_try_advisory_lock%"} {
		until(t, pool, `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'waiter' AND query LIKE $1)`, query)
	}
	cancel()
	if err := <-up; !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "that of pid") {
		t.Errorf("while another holds the lock: %v", err)
	}
	if hasSchema(t, pool) {
		t.Error("it made the schema without the lock")
	}
	if _, err := conn.Exec(t.Context(), "SELECT pg_advisory_unlock($1)", migrations.LockKey); err != nil {
		t.Fatal(err)
	}
	if err := migrations.Up(t.Context(), pool); err != nil {
		t.Error(err)
	}
}

func TestUp_M08_FailureAndFailedUnlockAreBothTold(t *testing.T) {
	t.Parallel()
	pool := empty(t)
	err := migrations.UpFiles(t.Context(), pool, fstest.MapFS{
		"00001_fails.sql": {Data: []byte("-- +goose Up\nSELECT pg_advisory_unlock_all();\nSELECT 1/0;\n")},
	})
	if err == nil || !strings.Contains(err.Error(), "division by zero") || !strings.Contains(err.Error(), "unlock migrations") {
		t.Errorf("not both in: %v", err)
	}
	var refused *pgconn.PgError
	if !errors.As(err, &refused) || refused.Code != "22012" {
		t.Errorf("the server's error is not in it: %v", err)
	}
	// The control: where only the migration fails, only that is told.
	err = migrations.UpFiles(t.Context(), pool, fstest.MapFS{
		"00001_fails.sql": {Data: []byte("-- +goose Up\nSELECT 1/0;\n")},
	})
	if err == nil || !strings.Contains(err.Error(), "division by zero") || strings.Contains(err.Error(), "unlock migrations") {
		t.Errorf("not one in: %v", err)
	}
	if query[bool](t, pool, heldLock, migrations.LockKey) {
		t.Error("the lock is still held")
	}
}

func TestUp_M08_PoolOfOne(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig(pgtest.EmptyDSN(t))
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	if !applied(t, pool) {
		t.Error("not applied")
	}
	// And with its one connection in use.
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := migrations.Down(t.Context(), pool); err != nil {
		t.Error(err)
	}
	conn.Release()
	if hasSchema(t, pool) {
		t.Error("not taken back")
	}
}

func TestUp_RefusesAStandby(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t)
	pool := pgtest.PoolOn(t, server.DSN())
	if err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	if err := server.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(server.DataDir(), "standby.signal"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"up":   migrations.Up(t.Context(), pool),
		"down": migrations.Down(t.Context(), pool),
	} {
		if err == nil || !strings.Contains(err.Error(), "standby") || !strings.Contains(err.Error(), "target_session_attrs=read-write") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if !applied(t, pool) {
		t.Error("Status does not work on a standby")
	}
}

func TestUp_RefusesReadOnly(t *testing.T) {
	t.Parallel()
	pool := empty(t)
	name := query[string](t, pool, "SELECT quote_ident(current_database())")
	do(t, pool, "ALTER DATABASE "+name+" SET default_transaction_read_only = on")
	if err := migrations.Up(t.Context(), pool); err == nil || !strings.Contains(err.Error(), "default_transaction_read_only") {
		t.Error(err)
	}
}
