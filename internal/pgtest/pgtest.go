// Package pgtest gives each test a PostgreSQL database of its own.
//
// The server is one that the package's first test starts, or the one that
// PGLOCK_TEST_URL names. A DATABASE_URL in the environment may be production
// and is never looked at.
package pgtest

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgserver"
)

// patience bounds everything here that has to do with starting and cleaning up.
const patience = 2 * time.Minute

// shared is the server of all tests of a package.
type shared struct {
	server *pgserver.Server // nil: the user's
	url    string
	admin  *pgxpool.Pool // on url's database; creates and drops the others
	// template has the migrations in it.
	template func() (string, error)
}

var start = sync.OnceValues(func() (*shared, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s := &shared{url: os.Getenv("PGLOCK_TEST_URL")}
	if s.url == "" {
		opts := []pgserver.Option{pgserver.Fast(), pgserver.With("max_connections", "300")}
		if keeping() {
			opts = append(opts, pgserver.Outlive())
		}
		var err error
		if s.server, err = pgserver.Start(ctx, opts...); err != nil {
			return nil, err
		}
		s.url = s.server.DSN()
	}
	config, err := pgxpool.ParseConfig(s.url)
	if err != nil {
		return nil, fmt.Errorf("PGLOCK_TEST_URL: %w", err)
	}
	config.MaxConns = 4
	if s.admin, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return nil, err
	}
	s.template = sync.OnceValues(func() (string, error) { return makeTemplate(s) })
	started = s
	return s, nil
})

var (
	started *shared // set by start
	kept    sync.Map
)

// keeping reports whether a failing test's database is to stay on a server of
// ours; on the user's it always stays.
func keeping() bool { return os.Getenv("PGLOCK_PG_KEEP") == "1" }

// Main runs the tests of a package, ends the server if one was started, and
// exits:
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
func Main(m *testing.M) {
	code := m.Run()
	if err := stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.Exit(code)
}

func stop() error {
	if started == nil {
		return nil
	}
	started.admin.Close()
	if started.server == nil {
		return nil
	}
	left := 0
	kept.Range(func(any, any) bool { left++; return true })
	if left > 0 {
		fmt.Fprintf(os.Stderr, "PGLOCK_PG_KEEP=1: the server still runs, for %d databases of failed tests; stop it by: %s\n",
			left, started.server.StopCommand())
		return nil
	}
	return started.server.Stop()
}

// use returns the package's server, starting it if need be.
func use(t testing.TB) *shared {
	t.Helper()
	s, err := start()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// DSN is the URL of a database of this test's own that has the migrations
// applied. It is dropped at the end of the test; if that fails it stays, on a
// server of the user's or with PGLOCK_PG_KEEP=1, and the test logs its address.
func DSN(t testing.TB) string {
	t.Helper()
	s := use(t)
	template, err := s.template()
	if err != nil {
		t.Fatal(err)
	}
	return s.create(t, template)
}

// EmptyDSN is as DSN, without the migrations.
func EmptyDSN(t testing.TB) string {
	t.Helper()
	return use(t).create(t, "template0")
}

// Pool is a pool on a database as of DSN, closed at the end of the test.
func Pool(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return PoolOn(t, DSN(t))
}

// PoolOn is a pool on a database that the test already has, closed at the end
// of the test.
func PoolOn(t testing.TB, dsn string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		closed := make(chan struct{})
		go func() {
			pool.Close()
			close(closed)
		}()
		select {
		case <-closed:
		case <-time.After(30 * time.Second):
			// Close waits for what was acquired, for ever if need be.
			t.Errorf("30 s after the test %d connections of its pool are not released", pool.Stat().AcquiredConns())
		}
	})
	return pool
}

// Server is a server of the test's own, to be killed and restarted, with no
// database but postgres and no migrations. It is stopped at the end of the
// test. The test is skipped where only Docker has a server, which can't be
// restarted in place.
func Server(t testing.TB, opts ...pgserver.Option) *pgserver.Server {
	t.Helper()
	const want = "a server that can be killed and restarted"
	if os.Getenv("PGLOCK_PG") == string(pgserver.Docker) {
		missing(t, "local", want)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	server, err := pgserver.Start(ctx, append([]pgserver.Option{pgserver.Fast()}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of the test's server:\n%s", server.Log())
		}
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	if server.DataDir() == "" {
		missing(t, "local", want)
	}
	return server
}
