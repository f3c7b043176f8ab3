package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// limit is long enough for the slowest machine: a test that reaches it hangs.
const limit = time.Minute

// program is the demo as a process of its own.
type program struct {
	cmd    *exec.Cmd
	stdout *bufio.Scanner
	stderr bytes.Buffer
}

func start(t *testing.T, args ...string) *program {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &program{cmd: exec.Command(self, append([]string{programCommand}, args...)...)}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.stdout, p.cmd.Stderr = bufio.NewScanner(stdout), &p.stderr
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	})
	return p
}

// until reads what the program prints until a line has the text.
func (p *program) until(t *testing.T, text string) {
	t.Helper()
	for p.stdout.Scan() {
		if strings.Contains(p.stdout.Text(), text) {
			return
		}
	}
	_ = p.cmd.Wait()
	t.Fatalf("never printed %q\n%s", text, &p.stderr)
}

// end reads to the end and returns the exit code.
func (p *program) end(t *testing.T) int {
	t.Helper()
	for p.stdout.Scan() {
		continue
	}
	if err := p.cmd.Wait(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		t.Fatal(err)
	}
	return p.cmd.ProcessState.ExitCode()
}

// children are the processes that a process has started, with their states.
func children(t *testing.T, parent int) map[int]string {
	t.Helper()
	found := map[int]string{}
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		pid, _ := strconv.Atoi(strings.Split(file, "/")[2])
		if state, ppid := stat(pid); ppid == parent {
			found[pid] = state
		}
	}
	return found
}

// stat returns the state of a process and its parent, and Z where it is gone.
func stat(pid int) (state string, ppid int) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "Z", 0
	}
	_, rest, _ := strings.Cut(string(text), ") ")
	_, _ = fmt.Sscan(rest, &state, &ppid)
	return state, ppid
}

// The program is broken off while one of its clients stands still and the other
// waits for the lease: neither outlives it, and the database is as before.
func TestInterrupt(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.EmptyDSN(t)
			before := snapshot(t, dsn)
			p := start(t, "-dsn="+dsn, "-only=fenced", "-ttl=1m")
			p.until(t, "B  wants the lease")
			clients := children(t, p.cmd.Process.Pid)
			stopped := 0
			for _, state := range clients {
				if state == "T" {
					stopped++
				}
			}
			if len(clients) != 2 || stopped != 1 {
				t.Fatalf("clients %v, want two and one of them stopped", clients)
			}
			if err := p.cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			code := p.end(t)
			for pid := range clients {
				for end := time.Now().Add(limit); ; {
					if state, _ := stat(pid); state == "Z" || state == "X" {
						break
					}
					if time.Now().After(end) {
						t.Fatalf("client %d is still there", pid)
					}
				}
			}
			if sig == syscall.SIGKILL {
				return // what it had in the database nobody could remove
			}
			if code != 1 || !strings.Contains(p.stderr.String(), "broken off") {
				t.Errorf("exit %d, %s", code, &p.stderr)
			}
			if after := snapshot(t, dsn); after != before {
				t.Errorf("before:\n%s\nafter:\n%s", before, after)
			}
		})
	}
}

// A reader that goes away ends the run, and not before it has cleaned up.
func TestBrokenPipe(t *testing.T) {
	t.Parallel()
	dsn := pgtest.EmptyDSN(t)
	before := snapshot(t, dsn)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, programCommand, "-dsn="+dsn, "-json", "-only=row,advisory", "-ops=2")
	cmd.Stdout = writer
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := errors.Join(reader.Close(), cmd.Start(), writer.Close()); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(stderr.String(), "broken pipe") {
		t.Errorf("exit %d, %s", code, &stderr)
	}
	if after := snapshot(t, dsn); after != before {
		t.Errorf("before:\n%s\nafter:\n%s", before, after)
	}
}

// Somebody begins to use the schema that the demo has brought: it stays.
func TestOthersBeganToUseIt(t *testing.T) {
	t.Parallel()
	dsn := pgtest.EmptyDSN(t)
	p := start(t, "-dsn="+dsn, "-only=fenced", "-ttl=1m")
	p.until(t, "B  wants the lease")
	locks := pglock.New(pgtest.PoolOn(t, dsn))
	t.Cleanup(func() { _ = locks.Close(t.Context()) })
	lease, err := locks.Acquire(t.Context(), "of somebody else", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	p.end(t)
	if err := lease.Release(t.Context()); err != nil {
		t.Errorf("the lease of somebody else: %v", err)
	}
	if left := lines(t, dsn, "SELECT nspname::text FROM pg_namespace WHERE nspname ~ '^(lostupdate_|pglock)'"); left != "pglock" {
		t.Errorf("left %q, want pglock", left)
	}
}

// A server of its own runs on for -keep, and ends with the program.
func TestKeepOwnServer(t *testing.T) {
	t.Parallel()
	p := start(t, "-keep", "-only=none", "-workers=1", "-ops=3")
	p.until(t, "Kept until Ctrl-C")
	p.until(t, "psql '")
	dsn := strings.Split(p.stdout.Text(), "'")[1]
	p.until(t, "SELECT * FROM ")
	table := strings.Trim(strings.Fields(p.stdout.Text())[3], ";")
	if got := lines(t, dsn, "SELECT balance::text FROM "+table); got != "997" {
		t.Errorf("balance %s", got)
	}
	if err := p.cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if code := p.end(t); code != 0 {
		t.Errorf("exit %d, %s", code, &p.stderr)
	}
	if conn, err := pgx.Connect(t.Context(), dsn); err == nil {
		t.Errorf("the server still runs")
		_ = conn.Close(t.Context())
	}
}

// A server that the environment names is not the demo's.
func TestDatabaseURL(t *testing.T) {
	dsn := pgtest.EmptyDSN(t)
	t.Setenv("DATABASE_URL", dsn)
	t.Setenv("PGLOCK_TEST_URL", dsn)
	code, stdout, stderr := demo(t, "-only=none")
	if code != 0 || !strings.Contains(stdout, "started for this") {
		t.Errorf("exit %d\n%s%s", code, stdout, stderr)
	}
}

// A client ends with its standard input, in the middle of a wait and after a
// pause.
func TestClientEnds(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	locks := pglock.New(pgtest.PoolOn(t, dsn))
	t.Cleanup(func() { _ = locks.Close(t.Context()) })
	if _, err := locks.Acquire(t.Context(), accountIn("public").name, time.Hour); err != nil {
		t.Fatal(err)
	}
	for name, before := range map[string]func(*process) error{
		"idle":    func(*process) error { return nil },
		"waiting": func(p *process) error { return p.lines.Encode(acquire) },
		"paused":  func(p *process) error { return errors.Join(p.pause(), p.stdin.Close(), p.resume()) },
	} {
		t.Run(name, func(t *testing.T) {
			p, err := spawn(t.Context(), brief{Name: "A", DSN: dsn, Schema: "public", TTL: time.Minute})
			if err != nil {
				t.Fatal(err)
			}
			defer p.kill()
			if err := before(p); err != nil {
				t.Fatal(err)
			}
			_ = p.stdin.Close()
			select {
			case <-p.done:
			case <-time.After(limit):
				t.Error("it is still there")
			}
		})
	}
}
