package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// commandEnv makes the test binary the command.
const commandEnv = "PAWL_TEST_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(commandEnv) != "" {
		main()
	}
	pgtest.Main(m)
}

// limit is how long a test waits for what must come.
const limit = 30 * time.Second

// program is a run of the command, in a process of its own.
type program struct {
	*exec.Cmd
	stdout, stderr bytes.Buffer
}

// command prepares a run on a database, which is found by DATABASE_URL.
func command(t testing.TB, dsn string, args ...string) *program {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*limit)
	t.Cleanup(cancel)
	p := &program{Cmd: exec.CommandContext(ctx, self, args...)}
	p.Env = append(os.Environ(), commandEnv+"=1", "DATABASE_URL="+dsn, "NO_COLOR=", "TERM=xterm")
	p.Stdout, p.Stderr = &p.stdout, &p.stderr
	p.WaitDelay = 10 * time.Second // where something it has started outlives it
	return p
}

// start starts it, to be killed at the end of the test if it is still there.
func (p *program) start(t testing.TB) *program {
	t.Helper()
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.Process.Kill() // it may have ended
		_ = p.Wait()
	})
	return p
}

// end waits for the end and returns the exit code.
func (p *program) end(t testing.TB) int {
	t.Helper()
	err := p.Wait()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode()
	}
	if err != nil {
		t.Fatal(err)
	}
	return 0
}

// outcome is what became of a run.
type outcome struct {
	code           int
	stdout, stderr string
}

// do runs the command to its end.
func do(t testing.TB, dsn string, args ...string) outcome {
	t.Helper()
	p := command(t, dsn, args...).start(t)
	code := p.end(t)
	return outcome{code, p.stdout.String(), p.stderr.String()}
}

// onPath is a script of the name pglock that is the command, for shells.
func onPath(t testing.TB) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "pglock")
	script := "#!/bin/sh\n" + commandEnv + "=1 exec '" + self + "' \"$@\"\n"
	if err := os.WriteFile(path, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// one is the first column of a query's only row.
func one[T any](t testing.TB, pool *pgxpool.Pool, sql string, args ...any) (value T) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), sql, args...).Scan(&value); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return value
}

// until waits until a query says true.
func until(t testing.TB, pool *pgxpool.Pool, what, sql string, args ...any) {
	t.Helper()
	for give := time.Now().Add(limit); !one[bool](t, pool, sql, args...); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(give) {
			t.Fatalf("waited %v for %s", limit, what)
		}
	}
}

const (
	isHeld    = `SELECT EXISTS (SELECT FROM pglock.leases WHERE name = $1 AND claim IS NOT NULL)`
	isFree    = `SELECT NOT EXISTS (SELECT FROM pglock.leases WHERE name = $1 AND claim IS NOT NULL)`
	hasWaiter = `SELECT EXISTS (SELECT FROM pglock.waiters WHERE name = $1)`
)

// shell runs a script and returns what it prints.
func shell(ctx context.Context, dsn, script string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "sh", append([]string{"-c", script, "sh"}, args...)...)
	cmd.Env = append(os.Environ(), "DATABASE_URL="+dsn)
	out, err := cmd.CombinedOutput()
	return string(out), err
}
