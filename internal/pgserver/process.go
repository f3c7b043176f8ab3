package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"
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

// signal sends how and waits for the end.
func (p *process) signal(ctx context.Context, how os.Signal) error {
	if !p.running() {
		return nil
	}
	if err := p.cmd.Process.Signal(how); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal %s: %w", p.cmd.Path, err)
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for %s to end after %v: %w", p.cmd.Path, how, ctx.Err())
	}
}

// stop ends the process at once, by force if it does not go in ten seconds.
func (p *process) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if p.signal(ctx, immediate) == nil {
		return nil
	}
	return p.signal(context.Background(), os.Kill)
}

// Companion runs a program beside a server, a pooler for example: as the
// account that runs servers, and ended with this process where the kernel does
// that. stop ends it.
func Companion(cmd *exec.Cmd) (stop func() error, err error) {
	who, err := serverAccount()
	if err != nil {
		return nil, err
	}
	who.take(cmd)
	tie(cmd)
	p, err := spawn(cmd)
	if err != nil {
		return nil, err
	}
	return p.stop, nil
}

// Folder makes an empty folder that only the account which runs servers, and
// root, can enter. remove removes it; if this process is killed, the next
// server to start does.
func Folder(ctx context.Context) (dir string, remove func() error, err error) {
	who, err := serverAccount()
	if err != nil {
		return "", nil, err
	}
	base, err := root(who, false)
	if err != nil {
		return "", nil, err
	}
	outer, owner, err := newFolder(ctx, base)
	if err != nil {
		return "", nil, err
	}
	remove = func() error { return errors.Join(removeAll(outer), owner.Close()) }
	dir = filepath.Join(outer, "own")
	if err := errors.Join(os.Mkdir(dir, 0o700), who.own(dir)); err != nil {
		return "", nil, errors.Join(err, remove())
	}
	return dir, remove, nil
}
