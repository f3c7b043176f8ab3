//go:build unix

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// The signals that ask a program to end. A test binary that was started in the
// background of a plain shell ignores SIGINT, and its children would too.
func init() { signal.Notify(make(chan os.Signal, 1), syscall.SIGINT, syscall.SIGQUIT) }

var ending = []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT}

// wrapped is a run whose command is a shell script.
type wrapped struct {
	*program
	t    testing.TB
	pids []int         // that the script printed on its first line: its own, and those of what it started
	over chan struct{} // closed when nobody has the script's standard output open any more
	end  time.Time     // of that
}

// wrap starts a script under run and returns when it has printed its first line.
func wrap(t testing.TB, dsn, script string, args ...string) *wrapped {
	t.Helper()
	w := &wrapped{program: command(t, dsn, append(append([]string{"run"}, args...), "--", "sh", "-c", script)...), t: t, over: make(chan struct{})}
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	w.Stdout = write
	w.start(t)
	if err := write.Close(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(read)
	first, err := lines.ReadString('\n')
	if err != nil {
		t.Fatalf("%v: %s", err, w.stderr.String())
	}
	for field := range strings.FieldsSeq(first) {
		var pid int
		if _, err := fmt.Sscan(field, &pid); err != nil {
			t.Fatal(err)
		}
		w.pids = append(w.pids, pid)
	}
	t.Cleanup(func() { // whatever has left the group, or a group that was not ended
		for _, pid := range w.pids {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	})
	go func() {
		_, _ = io.Copy(io.Discard, lines)
		w.end = time.Now()
		_ = read.Close()
		close(w.over)
	}()
	return w
}

func (w *wrapped) send(s syscall.Signal) {
	w.t.Helper()
	if err := syscall.Kill(w.Process.Pid, s); err != nil {
		w.t.Fatal(err)
	}
}

// alive says which of the processes are there. One that has ended and was not
// waited for is not.
func (w *wrapped) alive() (pids []int) {
	for _, pid := range w.pids {
		if running(pid) {
			pids = append(pids, pid)
		}
	}
	return pids
}

func running(pid int) bool {
	if err := syscall.Kill(pid, 0); errors.Is(err, syscall.ESRCH) {
		return false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, after, _ := strings.Cut(string(stat), ") ")
	return err != nil || !strings.HasPrefix(after, "Z")
}

func newClient(t testing.TB, pool *pgxpool.Pool) *pglock.Client {
	client := pglock.New(pool)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = client.Close(ctx) // the database goes too
	})
	return client
}

// family is a script with a child of its own; both go on for ever. What may outlive
// the test's run gives back its standard error, for whose end the test waits.
const (
	family     = `sleep 1000 2>/dev/null & echo $$ $!; wait`
	deafFamily = `trap '' TERM INT HUP QUIT; sleep 1000 & echo $$ $!; wait`
	deafChild  = `trap '' TERM INT HUP QUIT; sleep 1000 & trap - TERM INT HUP QUIT; echo $$ $!; wait`

	// gone has a child that leaves the group, and ends when it has.
	gone = `trap 'exit 0' USR1; setsid sh -c "echo \$\$; kill -USR1 $$; exec sleep 1000 2>/dev/null" & wait`
)

// A signal to end reaches the whole group, and the lease is free only when none of
// it is left (C01).
func TestRun_C01_NobodyIsLeftWhenTheLeaseIsFree(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	next := newClient(t, pool)
	for _, s := range ending {
		for what, script := range map[string]string{"family": family, "deaf child": deafChild} {
			if s != syscall.SIGTERM && what == "deaf child" {
				continue // which takes 5 s, and is the same
			}
			t.Run(fmt.Sprint(s, " ", what), func(t *testing.T) {
				t.Parallel()
				w := wrap(t, dsn, script, t.Name())
				if len(w.alive()) != 2 {
					t.Fatalf("of %v there are %v", w.pids, w.alive())
				}
				w.send(s)
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				defer cancel()
				l, err := next.Acquire(ctx, t.Name(), time.Minute)
				if err != nil {
					t.Fatal(err)
				}
				if left := w.alive(); left != nil {
					t.Errorf("the lease is free, and of %v there are %v", w.pids, left)
				}
				if code, want := w.program.end(t), 128+int(s); code != want || w.stderr.Len() > 0 {
					t.Errorf("it exits with %d and says %q, want %d", code, w.stderr.String(), want)
				}
				if err := l.Release(t.Context()); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// The control: without run the signal ends the shell, and not what it has started.
func TestRun_C01_Control(t *testing.T) {
	t.Parallel()
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	shell, err := os.StartProcess("/bin/sh", []string{"sh", "-c", family}, &os.ProcAttr{Files: []*os.File{nil, write, nil}})
	_ = write.Close()
	if err != nil {
		t.Fatal(err)
	}
	var own, child int
	if _, err := fmt.Fscan(read, &own, &child); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(child, syscall.SIGKILL) }()
	if err := shell.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if _, err := shell.Wait(); err != nil {
		t.Fatal(err)
	}
	if !running(child) {
		t.Error("what the shell has started ended with it: the test of run shows nothing")
	}
}

// A command that traps the signal decides how to exit, and the lease is held until
// it has.
func TestRun_C01_TheCommandDecides(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	w := wrap(t, dsn, `exec 2>/dev/null; trap 'sleep 0.3; exit 7' USR1; echo $$; while :; do sleep 0.01; done`, "trapped")
	w.send(syscall.SIGUSR1)
	w.send(syscall.SIGWINCH) // ends nobody
	<-w.over
	if code := w.program.end(t); code != 7 || w.stderr.Len() > 0 {
		t.Errorf("it exits with %d and says %q, want 7", code, w.stderr.String())
	}
	if !one[bool](t, pool, isFree, "trapped") {
		t.Error("the lease is not free")
	}
}

// What a command leaves behind in its group would work without the lease, and is
// ended; what has left the group is not.
func TestRun_WhatIsLeftBehind(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	for what, script := range map[string]string{
		"heeds TERM": `sleep 1000 & echo $!`,
		"heeds none": `trap '' TERM; sleep 1000 & echo $!`,
		"is stopped": `sleep 1000 & kill -STOP $!; echo $!`,
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			w := wrap(t, dsn, script, t.Name())
			if code := w.program.end(t); code != 0 || w.stderr.Len() > 0 {
				t.Errorf("it exits with %d and says %q", code, w.stderr.String())
			}
			if left := w.alive(); left != nil {
				t.Errorf("%v is there", left)
			}
		})
	}
	t.Run("the control left the group", func(t *testing.T) {
		t.Parallel()
		_, err := exec.LookPath("setsid")
		pgtest.Require(t, "setsid", err)
		w := wrap(t, dsn, gone, t.Name())
		if code := w.program.end(t); code != 0 {
			t.Errorf("it exits with %d", code)
		}
		if w.alive() == nil {
			t.Error("what has left the group was ended too: this test shows nothing")
		}
	})
}

// A signal to end ends the wait too, at once, and leaves nobody in line (C03).
func TestRun_C03_ASignalEndsTheWait(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	client := newClient(t, pool)
	for _, s := range append(ending, syscall.SIGKILL) {
		t.Run(fmt.Sprint(s), func(t *testing.T) {
			t.Parallel()
			l, err := client.Acquire(t.Context(), t.Name(), time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			p := command(t, dsn, "run", t.Name(), "--", "echo", "ran").start(t)
			until(t, pool, "the ticket", hasWaiter, t.Name())
			begun := time.Now()
			if err := p.Process.Signal(s); err != nil {
				t.Fatal(err)
			}
			code := p.end(t)
			took := time.Since(begun)
			waits := one[bool](t, pool, hasWaiter, t.Name())
			if s == syscall.SIGKILL {
				if !waits {
					t.Error("one that was killed has left the line: this test shows nothing")
				}
				return
			}
			if code != 128+int(s) || took > 10*time.Second || waits {
				t.Errorf("it exits with %d after %v; its ticket is there: %v", code, took, waits)
			}
			if err := l.Release(t.Context()); err != nil {
				t.Fatal(err)
			}
			if !one[bool](t, pool, isFree, t.Name()) || p.stdout.Len() > 0 {
				t.Errorf("it was granted the lease afterwards, and printed %q", p.stdout.String())
			}
			t.Logf("%v after the signal it was gone", took)
		})
	}
}

// Who waits is told for whom, within 2 s, and --wait is kept to (C08).
func TestRun_C08_SaysWhoHolds(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	client := pglock.New(pool, pglock.WithOwner("an idle holder"))
	defer client.Close(t.Context())
	l, err := client.Acquire(t.Context(), "kept", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	p := command(t, dsn, "run", "kept", "--wait", "2500ms", "--", "true")
	read, write := io.Pipe()
	p.Cmd.Stderr = write
	begun := time.Now()
	p.start(t)
	lines := bufio.NewReader(read)
	first, err := lines.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	said := time.Since(begun)
	if want := fmt.Sprintf(`waiting for lease "kept": held by "an idle holder" with token %d`, l.Token()); !strings.Contains(first, want) {
		t.Errorf("it says %q, want %q", first, want)
	}
	go func() { _, _ = io.Copy(io.Discard, lines) }()
	if code := p.end(t); code != exitBusy {
		t.Errorf("it exits with %d", code)
	}
	took := time.Since(begun)
	if said > 10*time.Second || took < 2500*time.Millisecond || took > 25*time.Second {
		t.Errorf("it said who holds after %v, and gave up after %v", said, took)
	}
	t.Logf("it said who holds after %v, and gave up after %v", said, took)
}

// Where nobody holds it, but a transaction has its row, who waits is told how to find
// that (C08).
func TestRun_C08_ATransactionHasTheRow(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	if got := do(t, dsn, "run", "row", "--", "true"); got.code != 0 {
		t.Fatalf("%+v", got)
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }() // frees it
	if _, err := tx.Exec(t.Context(), `SELECT FROM pglock.leases WHERE name = 'row' FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	got := do(t, dsn, "run", "row", "--wait", "5s", "--", "true")
	if got.code != exitBusy || !strings.Contains(got.stderr, "nobody holds: a transaction may have its row, pglock blocked") {
		t.Errorf("%+v", got)
	}
}

// The command learns what it runs under, and nothing else is printed.
func TestRun_Environment(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	before := time.Now()
	got := do(t, dsn, "run", "known", "--ttl", "1m", "--", "sh", "-c", `echo "$PGLOCK_NAME $PGLOCK_TOKEN $PGLOCK_DEADLINE"`)
	if got.code != 0 || got.stderr != "" {
		t.Fatalf("it exits with %d and says %q", got.code, got.stderr)
	}
	var name string
	var token int64
	var at string
	if n, err := fmt.Sscan(got.stdout, &name, &token, &at); n != 3 {
		t.Fatalf("%q: %v", got.stdout, err)
	}
	deadline, err := time.Parse(time.RFC3339, at)
	if err != nil || deadline.Before(before.Add(59*time.Second)) || deadline.After(time.Now().Add(time.Minute)) {
		t.Errorf("the deadline is %s (%v), a minute after %v", at, err, before)
	}
	if want := one[int64](t, pool, `SELECT token FROM pglock.leases WHERE name = 'known'`); name != "known" || token != want {
		t.Errorf("name %q and token %d, want known and %d", name, token, want)
	}
}

// Standard input and output are the command's own.
func TestRun_Streams(t *testing.T) {
	t.Parallel()
	p := command(t, pgtest.DSN(t), "run", "streams", "--", "sh", "-c", "cat; echo to stderr >&2")
	p.Stdin = strings.NewReader("from stdin\n")
	p.start(t)
	if code := p.end(t); code != 0 || p.stdout.String() != "from stdin\n" || p.stderr.String() != "to stderr\n" {
		t.Errorf("%d, %q, %q", code, p.stdout.String(), p.stderr.String())
	}
}
