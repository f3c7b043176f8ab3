package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// process is a running child, which ends with this process whatever ends it.
type process struct {
	cmd     *exec.Cmd
	done    chan struct{} // closed when it has ended
	logfile string
}

// spawn starts cmd with stderr, and stdout where it is not piped, in logfile.
//
// The child has the kernel kill it when its parent ends, and there the parent
// is the thread that forked: a goroutine stays locked to it for as long as the
// child lives. The child is in a group of its own, so that Ctrl-C reaches this
// program only, which ends its children in order.
func spawn(cmd *exec.Cmd, logfile string) (*process, error) {
	log, err := os.Create(logfile)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd.Stderr = log
	if cmd.Stdout == nil {
		cmd.Stdout = log
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	p := &process{cmd: cmd, done: make(chan struct{}), logfile: logfile}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_, _ = cmd.Process.Wait() // how it ended is in its log
			close(p.done)
		}
	}()
	return p, <-started
}

// kill ends the process without a last word, and returns when it has ended.
func (p *process) kill() error {
	if err := p.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-p.done
	return nil
}

func (p *process) log() string {
	text, _ := os.ReadFile(p.logfile)
	return string(text)
}

// await returns when the process answers as it should at address, with an error when
// it ended or a minute has passed. That it takes connections is not enough: ZooKeeper
// takes them before it serves, and then never reads from the first.
func (p *process) await(ctx context.Context, address, ask, answer string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, time.Minute, fmt.Errorf("nothing answers at %s after a minute", address))
	defer cancel()
	for {
		if answers(ctx, address, ask, answer) {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s ended while starting:\n%s", p.cmd.Path, p.log())
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// answers says whether what is asked at address is answered so, within a second.
func answers(ctx context.Context, address, ask, answer string) bool {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return false
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return false
	}
	got := make([]byte, len(answer))
	if _, err := io.WriteString(conn, ask); err != nil {
		return false
	}
	_, err = io.ReadFull(conn, got)
	return err == nil && string(got) == answer
}

func freePort() (int, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return listener.Addr().(*net.TCPAddr).Port, listener.Close()
}
