//go:build unix

package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"

	"github.com/pawl-go/pawl/pglock"
)

// group is the process group of a command.
type group struct {
	id    int
	cmd   *exec.Cmd
	ended chan struct{} // closed when the command itself has ended
	front foreground
}

const (
	// leftoverGrace is how long what a command has left behind may take to end.
	leftoverGrace = 5 * time.Second

	// maxGrace and maxMargin bound what a long TTL gives.
	maxGrace  = 10 * time.Second
	maxMargin = time.Second

	// killBound is how long the kernel may take to end what was killed.
	killBound = 2 * time.Second

	// glance is how often it is looked whether a group is empty, which nothing tells.
	glance = 2 * time.Millisecond
)

// start starts a command as a process group of its own.
//
// The goroutine that starts it stays locked to its OS thread for as long as the
// command lives: where the kernel ends the command with its parent (tie), the
// parent is the thread that forked.
func start(cmd *exec.Cmd) (*group, error) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	tie(cmd.SysProcAttr)
	adopt()
	g := &group{cmd: cmd, ended: make(chan struct{}), front: front(cmd.Stdin)}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // status tells how it ended
			close(g.ended)
		}
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	g.id = cmd.Process.Pid
	g.front.handOver(g.id)
	return g, nil
}

// status is how the command ended, as a shell shows it.
func (g *group) status() status {
	if how, ok := g.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && how.Signaled() {
		return exitSignal + status(how.Signal())
	}
	return status(g.cmd.ProcessState.ExitCode())
}

// signal sends to every process of the group. One that has ended meanwhile
// needs none.
func (g *group) signal(s syscall.Signal) { _ = syscall.Kill(-g.id, s) }

// empty says whether no process of the group is left, once the command itself
// has ended. What it has left behind was handed to this process, or to init.
func (g *group) empty() bool {
	for {
		if pid, err := syscall.Wait4(-g.id, nil, syscall.WNOHANG, nil); pid <= 0 && !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	return errors.Is(syscall.Kill(-g.id, 0), syscall.ESRCH)
}

// margins is how long before the deadline a group is asked to end, and killed.
// A renewal comes after a third of the TTL, and when it has failed there is time
// for a second one before the first of these moments.
func margins(ttl time.Duration) (end, kill time.Duration) {
	kill = min(max(ttl/20, 20*time.Millisecond), maxMargin)
	return min(max(ttl/4, 2*kill), maxGrace+kill), kill
}

// watch passes signals on until the group is empty, and ends it when the lease
// is lost or about to be: lost says why. gone is false for a group that even KILL
// has not ended.
func (g *group) watch(l *pglock.Lease, ttl time.Duration, signals <-chan os.Signal) (lost error, gone bool) {
	defer g.front.takeBack()
	end, kill := margins(ttl)
	ended, loss := g.ended, l.Context().Done()
	var killAt time.Time // zero: the group has not been asked to end
	for {
		if ended == nil && g.empty() {
			return lost, true
		}
		now := time.Now()
		endAt, lastAt := l.Deadline().Add(-end), l.Deadline().Add(-kill)
		switch {
		case lost == nil && l.Err() != nil:
			lost = l.Err()
			// After a release by force it has a moment; by the clock, which one that
			// was stopped sees too late, none.
			killAt = g.end(now, earlier(now.Add(kill), lastAt), killAt)
		case lost == nil && !now.Before(endAt):
			lost = fmt.Errorf("no renewal has succeeded, and %v are left", time.Until(l.Deadline()).Round(time.Millisecond))
			killAt = g.end(now, lastAt, killAt)
		case ended == nil && killAt.IsZero():
			killAt = g.end(now, now.Add(leftoverGrace), killAt)
		}
		if lost != nil {
			loss = nil // told, and closed for good
		}
		wake := endAt
		if !killAt.IsZero() {
			wake = killAt
			if !now.Before(killAt) {
				if now.After(killAt.Add(killBound)) {
					return lost, false
				}
				g.signal(syscall.SIGKILL)
				wake = now.Add(glance) // for what was just being forked
			}
		}
		if ended == nil {
			wake = now.Add(glance)
		}
		timer := time.NewTimer(time.Until(wake))
		select {
		case s := <-signals:
			g.pass(s)
		case <-ended:
			ended = nil
		case <-loss:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// end asks the group to end, also what is stopped, and returns when to kill it: at
// that time, or before if that was said before, and not in the past.
func (g *group) end(now, at, before time.Time) time.Time {
	g.signal(syscall.SIGTERM)
	g.signal(syscall.SIGCONT)
	if !before.IsZero() {
		at = earlier(at, before)
	}
	if at.Before(now) {
		return now
	}
	return at
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// pass passes a signal on. One that suspends would leave a command that holds its
// lease and does nothing, and one that tells of a child is for this process.
func (g *group) pass(s os.Signal) {
	switch s {
	case syscall.SIGCHLD:
		reap(g.id)
		g.front.resume(g.id)
	case syscall.SIGTSTP:
	default:
		g.signal(s.(syscall.Signal))
	}
}
