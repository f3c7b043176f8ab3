package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"time"
)

// process is a client of a story, seen from the program that tells it.
type process struct {
	name   string
	cmd    *exec.Cmd
	stdin  io.Closer
	lines  *json.Encoder
	events chan event    // closed at the end of what it writes
	done   chan struct{} // closed when it has ended
}

// spawn runs this program again as a client and returns when that is ready.
//
// The goroutine stays locked to its OS thread for as long as the child lives:
// where the kernel ends the child with its parent (tie), the parent is the
// thread that forked. A stopped child doesn't see its standard input end.
func spawn(ctx context.Context, b brief) (*process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{name: b.Name, cmd: exec.Command(self, childCommand), events: make(chan event, 8), done: make(chan struct{})}
	tie(p.cmd)
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	p.stdin, p.lines = stdin, json.NewEncoder(stdin)
	reader, writer := io.Pipe()
	p.cmd.Stdout, p.cmd.Stderr = writer, os.Stderr
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			_ = p.cmd.Wait() // what it has to say it has said in its events
		}
		_ = writer.Close() // never fails
		close(p.done)
	}()
	go p.collect(json.NewDecoder(reader))
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start client %s: %w", b.Name, err)
	}
	if err := p.lines.Encode(b); err != nil {
		p.kill()
		return nil, p.gone(err)
	}
	if _, err := p.hear(ctx); err != nil {
		p.kill()
		return nil, err
	}
	return p, nil
}

// collect hands on what the process says: one event for each command, so that
// what nobody hears any more fits into the channel.
func (p *process) collect(lines *json.Decoder) {
	defer close(p.events)
	for {
		var e event
		if err := lines.Decode(&e); err != nil {
			return
		}
		p.events <- e
	}
}

// do sends a command and returns the event that answers it.
func (p *process) do(ctx context.Context, c command) (event, error) {
	if err := p.lines.Encode(c); err != nil {
		return event{}, p.gone(err)
	}
	return p.hear(ctx)
}

func (p *process) hear(ctx context.Context) (event, error) {
	select {
	case e, ok := <-p.events:
		if !ok {
			return event{}, p.gone(io.ErrUnexpectedEOF)
		}
		if e.Kind == failed {
			return event{}, fmt.Errorf("client %s: %s", p.name, e.Error)
		}
		return e, nil
	case <-ctx.Done():
		return event{}, fmt.Errorf("wait for client %s: %w", p.name, context.Cause(ctx))
	}
}

func (p *process) gone(err error) error {
	return fmt.Errorf("client %s has ended before its story: %w", p.name, err)
}

// leave lets the process end by itself, and sees to it if it doesn't.
func (p *process) leave() {
	_ = p.stdin.Close() // it may have ended
	select {
	case <-p.done:
	case <-time.After(5 * time.Second):
		p.kill()
	}
}

// kill ends the process, stopped or not.
func (p *process) kill() {
	if err := p.cmd.Process.Kill(); err == nil || errors.Is(err, os.ErrProcessDone) {
		<-p.done
	}
}
