//go:build unix

package main

import (
	"errors"
	"fmt"
	"syscall"
)

const canPause = true

// pause stops a child and returns when the kernel says that it stands still.
func (p *process) pause() error {
	pid := p.cmd.Process.Pid
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return fmt.Errorf("stop client %s: %w", p.name, err)
	}
	for {
		var status syscall.WaitStatus
		_, err := syscall.Wait4(pid, &status, syscall.WUNTRACED, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("stop client %s: %w", p.name, err)
		}
		if !status.Stopped() {
			return p.gone(errors.New("it was to be stopped"))
		}
		return nil
	}
}

func (p *process) resume() error {
	if err := syscall.Kill(p.cmd.Process.Pid, syscall.SIGCONT); err != nil {
		return fmt.Errorf("continue client %s: %w", p.name, err)
	}
	return nil
}
