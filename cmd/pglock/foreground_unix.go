//go:build unix

package main

import (
	"io"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// foreground is a terminal whose foreground was handed to a command; the zero one is
// none.
type foreground struct {
	file  *os.File
	group int // that had it before
}

// front returns the terminal to be handed to a command that is about to be started
// with this standard input: the one that this process is in the foreground of. Else
// the command would be stopped when it reads.
//
// The command inherits that Ctrl-Z is ignored. Stopped in the middle of a vfork, a
// shell is neither stopped nor running, which nothing tells and only SIGCONT ends.
func front(stdin io.Reader) foreground {
	file, ok := stdin.(*os.File)
	if !ok {
		return foreground{}
	}
	group, err := unix.IoctlGetInt(int(file.Fd()), unix.TIOCGPGRP)
	if err != nil || group != syscall.Getpgrp() {
		return foreground{}
	}
	signal.Ignore(syscall.SIGTSTP)
	return foreground{file, group}
}

// handOver makes a group that has just been started the foreground.
func (f foreground) handOver(group int) {
	if f.file == nil {
		return
	}
	_ = unix.IoctlSetPointerInt(int(f.file.Fd()), unix.TIOCSPGRP, group) // or it has ended
	f.resume(group)
}

// resume has a group go on whatever has stopped it: one that is suspended would
// keep others waiting. One that runs does not notice.
func (f foreground) resume(group int) {
	if f.file != nil {
		_ = syscall.Kill(-group, syscall.SIGCONT) // or it has ended
	}
}

// takeBack undoes it.
func (f foreground) takeBack() {
	if f.file == nil {
		return
	}
	signal.Ignore(syscall.SIGTTOU) // which is for a background that sets the foreground
	_ = unix.IoctlSetPointerInt(int(f.file.Fd()), unix.TIOCSPGRP, f.group)
}
