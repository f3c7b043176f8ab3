//go:build unix

package pglock_test

import (
	"encoding/json"
	"errors"
	"os"
	osexec "os/exec"
	"syscall"
	"testing"
)

// process is a child, seen from its test.
type process struct {
	t   testing.TB
	cmd *osexec.Cmd
	in  *json.Encoder
	out *json.Decoder
}

// spawn starts a child on a database. It ends with the test; and if the test's
// process is killed, then with that: a running child sees its standard input
// end, and a stopped one, in an orphaned process group of its own, is sent
// SIGHUP and SIGCONT by the kernel.
func spawn(t testing.TB, dsn string) *process {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := osexec.Command(self)
	cmd.Env = append(os.Environ(), childEnv+"=1")
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended; a stopped one dies of it too
		_ = cmd.Wait()
	})
	p := &process{t: t, cmd: cmd, in: json.NewEncoder(stdin), out: json.NewDecoder(stdout)}
	p.send(order{DSN: dsn})
	return p
}

// send gives an order. A stopped child finds it when it wakes.
func (p *process) send(o order) {
	p.t.Helper()
	if err := p.in.Encode(o); err != nil {
		p.t.Fatalf("order a child: %v", err)
	}
}

func (p *process) hear() (r report) {
	p.t.Helper()
	if err := p.out.Decode(&r); err != nil {
		p.t.Fatalf("hear from a child: %v", err)
	}
	return r
}

func (p *process) ask(o order) report {
	p.t.Helper()
	p.send(o)
	return p.hear()
}

// stop returns when the kernel says that the child stands still.
func (p *process) stop() {
	p.t.Helper()
	pid := p.cmd.Process.Pid
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		p.t.Fatal(err)
	}
	for {
		var status syscall.WaitStatus
		switch _, err := syscall.Wait4(pid, &status, syscall.WUNTRACED, nil); {
		case errors.Is(err, syscall.EINTR):
			continue
		case err != nil:
			p.t.Fatal(err)
		case !status.Stopped():
			p.t.Fatalf("a child has ended: %v", status)
		}
		return
	}
}

func (p *process) wake() {
	p.t.Helper()
	if err := syscall.Kill(p.cmd.Process.Pid, syscall.SIGCONT); err != nil {
		p.t.Fatal(err)
	}
}
