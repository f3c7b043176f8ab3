package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgserver"
)

// PgBouncer runs one in transaction mode with two server connections in front
// of a DSN, for the user that the DSN names, and returns the DSN that leads
// through it. That one also turns off what pgx prepares, which such a pooler
// can't keep. settings are further lines of its configuration. It is the rig
// pgbouncer.
func PgBouncer(t testing.TB, dsn string, settings ...string) string {
	t.Helper()
	program, err := findPgBouncer()
	Require(t, "pgbouncer", err)
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	dir, remove, err := pgserver.Folder(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := remove(); err != nil {
			t.Error(err)
		}
	})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	_, port, _ := net.SplitHostPort(address)
	lines := append([]string{
		"[databases]",
		fmt.Sprintf("* = host=%s port=%d", config.Host, config.Port),
		"[pgbouncer]",
		"listen_addr = 127.0.0.1",
		"listen_port = " + port,
		"unix_socket_dir =",
		"auth_type = plain",
		"auth_file = " + filepath.Join(dir, "users"),
		"pool_mode = transaction",
		"default_pool_size = 2",
		"ignore_startup_parameters = extra_float_digits",
	}, settings...)
	for name, text := range map[string]string{
		"pgbouncer.ini": strings.Join(lines, "\n") + "\n",
		"users":         fmt.Sprintf("%q %q\n", config.User, config.Password),
	} {
		// Readable by the pooler's account; to others the folder is closed.
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var log strings.Builder
	cmd := exec.Command(program, filepath.Join(dir, "pgbouncer.ini"))
	cmd.Dir = dir
	cmd.Stderr = &log
	stop, err := pgserver.Companion(cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("log of pgbouncer:\n%s", log.String())
		}
	})
	through, err := onHost(dsn, address)
	if err != nil {
		t.Fatal(err)
	}
	through = With(t, through, "default_query_exec_mode", "exec")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, through)
		if err == nil {
			if err := conn.Close(ctx); err != nil {
				t.Fatal(err)
			}
			return through
		}
		select {
		case <-ctx.Done():
			t.Fatal(errors.Join(ctx.Err(), err))
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// findPgBouncer looks on PATH and where Debian puts it, which is on root's
// PATH only.
func findPgBouncer() (string, error) {
	path, err := exec.LookPath("pgbouncer")
	if err != nil {
		var debian error
		if path, debian = exec.LookPath("/usr/sbin/pgbouncer"); debian == nil {
			return path, nil
		}
	}
	return path, err
}
