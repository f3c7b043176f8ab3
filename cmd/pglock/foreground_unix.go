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
	stops chan os.Signal
}

// handOver makes the command's group the foreground of its standard input, where
// that is the terminal that this process is in the foreground of: else the
// command would be stopped when it reads. It may have been already.
func handOver(group int, stdin io.Reader) foreground {
	file, ok := stdin.(*os.File)
	if !ok {
		return foreground{}
	}
	fd := int(file.Fd())
	front, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP)
	if err != nil || front != syscall.Getpgrp() {
		return foreground{}
	}
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPGRP, group); err != nil {
		return foreground{} // it ended before it could be given anything
	}
	_ = syscall.Kill(-group, syscall.SIGCONT)
	t := foreground{file, front, make(chan os.Signal, 1)}
	signal.Notify(t.stops, syscall.SIGCHLD)
	go func() {
		for range t.stops {
			// Stopped by Ctrl-Z, or it has ended and heeds nothing. What runs
			// does not notice.
			_ = syscall.Kill(-group, syscall.SIGCONT)
		}
	}()
	return t
}

// takeBack undoes it.
func (t foreground) takeBack() {
	if t.file == nil {
		return
	}
	signal.Stop(t.stops)
	close(t.stops)
	signal.Ignore(syscall.SIGTTOU) // which is for a background that sets the foreground
	_ = unix.IoctlSetPointerInt(int(t.file.Fd()), unix.TIOCSPGRP, t.group)
}
