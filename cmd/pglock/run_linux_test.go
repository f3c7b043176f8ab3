package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// When run is killed the kernel kills the command. The control is what the command has started, which lives.
func TestRun_Killed(t *testing.T) {
	t.Parallel()
	w := wrap(t, pgtest.DSN(t), family, "killed", "--ttl", "300ms")
	command, err := unix.PidfdOpen(w.pids[0], 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(command)
	w.send(syscall.SIGKILL)
	if code := w.program.end(t); code != -1 {
		t.Errorf("it exits with %d", code)
	}
	ended := []unix.PollFd{{Fd: int32(command), Events: unix.POLLIN}}
	for err = unix.EINTR; err == unix.EINTR; {
		_, err = unix.Poll(ended, int(limit.Milliseconds()))
	}
	if err != nil || running(w.pids[0]) {
		t.Fatalf("the command is there: %v", err)
	}
	if !running(w.pids[1]) {
		t.Error("what the command has started is gone too: say so in the help, and not that PGLOCK_TOKEN must cover it")
	}
}

// Orphans of the command that have left its group are run's to wait for, and don't
// pile up.
func TestRun_Orphans(t *testing.T) {
	t.Parallel()
	const orphans = `n=0
		while [ $n -lt 5 ]; do n=$((n + 1)); (setsid sh -c 'sleep 0.05' &); done; sleep 0.3; echo $$; exec sleep 1000`
	w := wrap(t, pgtest.DSN(t), orphans, "orphans")
	for give := time.Now().Add(limit); ; time.Sleep(5 * time.Millisecond) {
		children := 0
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", w.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		for _, thread := range threads {
			pids, _ := os.ReadFile(thread) // the thread may have ended
			children += len(strings.Fields(string(pids)))
		}
		if children == 1 {
			break
		}
		if time.Now().After(give) {
			t.Fatalf("run has %d children", children)
		}
	}
	w.send(syscall.SIGTERM)
	if code := w.program.end(t); code != 143 {
		t.Errorf("it exits with %d: %s", code, w.stderr.String())
	}
}
