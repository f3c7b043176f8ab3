package pgserver

import (
	"os/exec"
	"runtime"
)

// process is a running child.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
}

// spawn starts cmd and waits for its end in the background.
//
// The goroutine that starts it stays locked to its OS thread for as long as
// the child lives: on Linux the child asks the kernel for a signal when its
// parent ends, and there the parent is the thread that forked. Without the
// lock the Go runtime may end that thread at any time, and the server with it.
func spawn(cmd *exec.Cmd) (*process, error) {
	p := &process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // how it ended is in its log
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

// running reports whether the process has not ended yet.
func (p *process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}
