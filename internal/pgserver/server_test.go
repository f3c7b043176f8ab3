package pgserver_test

import (
	"context"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pawl-go/pawl/internal/pgserver"
)

// local starts a server, or skips the test where there is none to kill.
func local(t *testing.T, opts ...pgserver.Option) *pgserver.Server {
	t.Helper()
	server, err := pgserver.Start(t.Context(), append([]pgserver.Option{pgserver.Fast()}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	if server.Kind() == pgserver.Docker {
		t.Skip("no local: a server in Docker can't be killed and restarted")
	}
	return server
}

func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

func setting(t *testing.T, conn *pgx.Conn, name string) (value string) {
	t.Helper()
	if err := conn.QueryRow(t.Context(), "SELECT current_setting($1)", name).Scan(&value); err != nil {
		t.Fatal(err)
	}
	return value
}

func TestStart_Settings(t *testing.T) {
	t.Parallel()
	plain, err := pgserver.Start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Stop()
	fast := local(t, pgserver.With("max_connections", "17"), pgserver.With("max_connections", "18"))

	got := map[string]string{}
	for name, server := range map[string]*pgserver.Server{"plain": plain, "fast": fast} {
		conn := connect(t, server.DSN())
		got[name+" fsync"] = setting(t, conn, "fsync")
		got[name+" is_superuser"] = setting(t, conn, "is_superuser")
		got[name+" server_encoding"] = setting(t, conn, "server_encoding")
	}
	got["fast max_connections"] = setting(t, connect(t, fast.DSN()), "max_connections")
	want := map[string]string{
		"plain fsync": "on", "plain is_superuser": "on", "plain server_encoding": "UTF8",
		"fast fsync": "off", "fast is_superuser": "on", "fast server_encoding": "UTF8",
		"fast max_connections": "18",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// Whoever gets in as superuser runs programs as the server's account.
func TestStart_WantsThePassword(t *testing.T) {
	t.Parallel()
	u, err := url.Parse(local(t).DSN())
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword("postgres", "wrong")
	if err := ping(t.Context(), u.String()); err == nil || !strings.Contains(err.Error(), "28P01") {
		t.Fatalf("connected with a wrong password: %v", err)
	}
}

func TestServer_StopLeavesNothing(t *testing.T) {
	t.Parallel()
	server := local(t)
	if err := ping(t.Context(), server.DSN()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := server.Stop(); err != nil {
			t.Fatal(err)
		}
	}
	if err := ping(t.Context(), server.DSN()); err == nil {
		t.Error("the server still answers")
	}
	if _, err := os.Stat(filepath.Dir(server.DataDir())); !os.IsNotExist(err) {
		t.Errorf("its folder is still there: %v", err)
	}
}

func TestServer_KilledKeepsItsDataAndItsPort(t *testing.T) {
	t.Parallel()
	server := local(t)
	conn := connect(t, server.DSN())
	if _, err := conn.Exec(t.Context(), "CREATE TABLE kept AS SELECT 42 AS n"); err != nil {
		t.Fatal(err)
	}
	// A backend at work outlives its postmaster a little, with the shared memory.
	busy := make(chan error)
	go func() {
		_, err := conn.Exec(context.WithoutCancel(t.Context()), "SELECT pg_sleep(3600)")
		busy <- err
	}()
	look := connect(t, server.DSN())
	eventually(t, "asleep", func() (asleep bool) {
		if err := look.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep')").Scan(&asleep); err != nil {
			t.Fatal(err)
		}
		return asleep
	})
	if err := server.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := ping(t.Context(), server.DSN()); err == nil {
		t.Error("the killed server still answers")
	}
	if err := <-busy; err == nil {
		t.Error("the statement in flight succeeded")
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	var n int
	if err := connect(t, server.DSN()).QueryRow(t.Context(), "SELECT n FROM kept").Scan(&n); err != nil || n != 42 {
		t.Errorf("after the restart kept is %d, %v", n, err)
	}
}

func TestServer_Shutdown(t *testing.T) {
	t.Parallel()
	server := local(t)
	conn := connect(t, server.DSN())
	if err := server.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err := conn.Exec(t.Context(), "SELECT 1")
	if refused, ok := err.(*pgconn.PgError); ok && refused.Code != "57P01" {
		t.Errorf("the session ended with %v, want admin_shutdown", err)
	} else if err == nil {
		t.Error("the session goes on")
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := ping(t.Context(), server.DSN()); err != nil {
		t.Error(err)
	}
}

// The kernel ends the server when the thread that started it ends. That thread
// must not be one that the caller can end.
func TestStart_FromAThreadThatEnds(t *testing.T) {
	t.Parallel()
	var server *pgserver.Server
	var wait sync.WaitGroup
	wait.Go(func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		server = local(t)
	})
	wait.Wait()
	conn := connect(t, server.DSN())
	if _, err := conn.Exec(t.Context(), "SELECT pg_sleep(0.2)"); err != nil {
		t.Fatal(err)
	}
}

func TestStart_CancelledLeavesNothing(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if server, err := pgserver.Start(ctx, pgserver.Fast()); err == nil {
		t.Error("started", server.Stop())
	}
}

func ping(ctx context.Context, dsn string) error {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

// eventually fails the test unless ok becomes true within half a minute.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("after 30 s: not %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
