package main

import (
	"syscall"
	"testing"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// When run is killed the kernel kills the command, however many threads have come
// and gone meanwhile. The control is what the command has started, which lives.
func TestRun_Killed(t *testing.T) {
	t.Parallel()
	w := wrap(t, pgtest.DSN(t), family+"; wait", "killed", "--ttl", "300ms")
	w.send(syscall.SIGKILL)
	if code := w.program.end(t); code != -1 {
		t.Errorf("it exits with %d", code)
	}
	for running(w.pids[0]) { // the kernel's next act
	}
	if !running(w.pids[1]) {
		t.Error("what the command has started is gone too: say so in the help, and not that PGLOCK_TOKEN must cover it")
	}
}
