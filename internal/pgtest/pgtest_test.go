package pgtest_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// childEnv marks a run of this program that a test of it has started, to see
// how a test ends.
const childEnv = "PAWL_TEST_CHILD"

// production counts who connects to DATABASE_URL, controls those of them that
// were to.
var production, controls atomic.Int64

func TestMain(m *testing.M) {
	if inChild() {
		pgtest.Main(m)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			production.Add(1)
			_ = conn.Close()
		}
	}()
	if err := os.Setenv("DATABASE_URL", fmt.Sprintf("postgres://%s/production", listener.Addr())); err != nil {
		panic(err)
	}
	pgtest.Main(m)
}

// child runs one test of this program in a process of its own.
func child(test string, env ...string) (output string, passed bool) {
	cmd := exec.Command(os.Args[0], "-test.run=^"+test+"$", "-test.v")
	cmd.Env = append(append(os.Environ(), childEnv+"=1"), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err == nil
}

// inChild reports whether this is such a run; in others there is nothing to see.
func inChild() bool { return os.Getenv(childEnv) != "" }

func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func query[T any](t *testing.T, conn *pgx.Conn, sql string, args ...any) T {
	t.Helper()
	rows, err := conn.Query(t.Context(), sql, args...)
	if err != nil {
		t.Fatal(err)
	}
	value, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return value
}

func TestDSN_IsTheTestsOwn(t *testing.T) {
	t.Parallel()
	one, two := connect(t, pgtest.DSN(t)), connect(t, pgtest.DSN(t))
	if _, err := one.Exec(t.Context(), "INSERT INTO pglock.fences VALUES ('accounts', 7)"); err != nil {
		t.Fatal(err)
	}
	if n := query[int64](t, two, "SELECT count(*) FROM pglock.fences"); n != 0 {
		t.Errorf("the other database has %d rows of it", n)
	}
	if n := query[int64](t, one, "SELECT count(*) FROM pglock.fences"); n != 1 {
		t.Errorf("the one that it was put in has %d rows of it", n)
	}
}

func TestDSN_IsDroppedThoughInUse(t *testing.T) {
	t.Parallel()
	admin := connect(t, pgtest.EmptyDSN(t))
	var name string
	t.Run("test", func(t *testing.T) {
		pool, err := pgxpool.New(context.Background(), pgtest.DSN(t))
		if err != nil {
			t.Fatal(err)
		}
		if err := pool.QueryRow(t.Context(), "SELECT current_database()").Scan(&name); err != nil {
			t.Fatal(err)
		}
		if !query[bool](t, admin, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", name) {
			t.Errorf("no database %s while the test runs", name)
		}
	})
	if query[bool](t, admin, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", name) {
		t.Errorf("%s is still there", name)
	}
}

func TestEmptyDSN(t *testing.T) {
	t.Parallel()
	for dsn, want := range map[string]bool{pgtest.EmptyDSN(t): false, pgtest.DSN(t): true} {
		if got := query[bool](t, connect(t, dsn), "SELECT to_regnamespace('pglock') IS NOT NULL"); got != want {
			t.Errorf("%s has the schema: %v, want %v", dsn, got, want)
		}
	}
}

func TestServer_IsTheTestsOwn(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t)
	one := query[int64](t, connect(t, server.DSN()), "SELECT system_identifier FROM pg_control_system()")
	conn := connect(t, pgtest.DSN(t))
	if err := server.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if other := query[int64](t, conn, "SELECT system_identifier FROM pg_control_system()"); one == 0 || other == 0 {
		t.Errorf("identifiers %d and %d", one, other)
	}
}

func TestChild_Fails(t *testing.T) {
	if !inChild() {
		return
	}
	t.Errorf("this test fails, on %s", pgtest.DSN(t))
}

func TestChild_Passes(t *testing.T) {
	if !inChild() {
		return
	}
	connect(t, pgtest.DSN(t))
}

var address = regexp.MustCompile(`the test's database stays: (\S+)`)

// On a server of the user's a failing test keeps its database, a passing one
// doesn't, and the migrated template stays.
func TestMain_UsersServer(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t)
	conn := connect(t, server.DSN())
	url := "PGLOCK_TEST_URL=" + server.DSN()
	if out, passed := child("TestChild_Passes", url); !passed || address.MatchString(out) {
		t.Errorf("passed: %v\n%s", passed, out)
	}
	if n := query[int64](t, conn, "SELECT count(*) FROM pg_database WHERE datname LIKE 'pawl\\_test%'"); n != 0 {
		t.Errorf("%d databases of a test that passed", n)
	}
	out, passed := child("TestChild_Fails", url)
	match := address.FindStringSubmatch(out)
	if passed || match == nil {
		t.Fatalf("passed: %v\n%s", passed, out)
	}
	query[int64](t, connect(t, match[1]), "SELECT count(*) FROM pglock.leases")
	// Keywords instead of a URL.
	config := conn.Config()
	keywords := fmt.Sprintf("PGLOCK_TEST_URL=host=%s port=%d user=%s password=%s dbname=%s",
		config.Host, config.Port, config.User, config.Password, config.Database)
	if out, passed := child("TestChild_Passes", keywords); !passed {
		t.Error(out)
	}
}

func TestMain_TemplateIsMadeOnce(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			if out, passed := child("TestChild_Passes", "PGLOCK_TEST_URL="+server.DSN()); !passed {
				t.Error(out)
			}
		})
	}
	all.Wait()
	conn := connect(t, server.DSN())
	if n := query[int64](t, conn, "SELECT count(*) FROM pg_database WHERE datname LIKE 'pawl%' AND datistemplate"); n != 1 {
		t.Errorf("%d templates", n)
	}
	if n := query[int64](t, conn, "SELECT count(*) FROM pg_database WHERE datname LIKE 'pawl%' AND NOT datistemplate"); n != 0 {
		t.Errorf("%d databases left over", n)
	}
}

// With PGLOCK_PG_KEEP=1 the server stays too, or the address would be of no use.
func TestMain_KeepsOnItsOwnServer(t *testing.T) {
	t.Parallel()
	keep, own := "PGLOCK_PG_KEEP=1", "PGLOCK_TEST_URL="
	out, passed := child("TestChild_Fails", keep, own)
	match := address.FindStringSubmatch(out)
	if passed || match == nil {
		t.Fatalf("passed: %v\n%s", passed, out)
	}
	conn := connect(t, match[1])
	query[int64](t, conn, "SELECT count(*) FROM pglock.leases")
	hint := regexp.MustCompile(`stop it by: (.*)`).FindStringSubmatch(out)
	if hint == nil {
		t.Fatalf("it doesn't say how to stop the server:\n%s", out)
	}
	if out, err := exec.Command("sh", "-c", hint[1]).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", hint[1], err, out)
	}
	if err := conn.PgConn().WaitForNotification(t.Context()); err == nil {
		t.Error("a notification, and no end of the session")
	}

	// Controls: a test that passes, and one that fails without the variable.
	if out, passed := child("TestChild_Passes", keep, own); !passed || strings.Contains(out, "still runs") {
		t.Errorf("passed: %v\n%s", passed, out)
	}
	if out, passed := child("TestChild_Fails", "PGLOCK_PG_KEEP=", own); passed || address.MatchString(out) {
		t.Errorf("passed: %v\n%s", passed, out)
	}
}

func TestChild_RigIsMissing(t *testing.T) {
	if !inChild() {
		return
	}
	pgtest.Require(t, "crane", nil)
	pgtest.Require(t, "crane", os.ErrNotExist)
	t.Error("goes on without the rig")
}

func TestRequire(t *testing.T) {
	t.Parallel()
	for required, fails := range map[string]bool{"": false, "docker": false, "crane": true, "docker,crane": true} {
		out, passed := child("TestChild_RigIsMissing", "PGLOCK_REQUIRE="+required)
		if passed == fails || strings.Contains(out, "--- SKIP") == fails || !strings.Contains(out, "crane") {
			t.Errorf("PGLOCK_REQUIRE=%s: passed %v\n%s", required, passed, out)
		}
	}
}

// DATABASE_URL may be production. It is set for all tests of this package.
func TestDSN_NeverTouchesDatabaseURL(t *testing.T) {
	t.Parallel()
	connect(t, pgtest.DSN(t))
	connect(t, pgtest.EmptyDSN(t))
	if n := production.Load() - controls.Load(); n != 0 {
		t.Errorf("%d connections to DATABASE_URL", n)
	}
	// The control: who connects to it is counted.
	if conn, err := pgx.Connect(t.Context(), os.Getenv("DATABASE_URL")); err == nil {
		_ = conn.Close(t.Context())
		t.Error("connected to what is no server")
	}
	if controls.Swap(production.Load()) == production.Load() {
		t.Error("a connection to DATABASE_URL was not counted")
	}
}
