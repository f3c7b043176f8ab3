package main

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// tie makes the kernel kill the command when the thread that starts it ends,
// which start makes the same as this process. It does not tie what the command
// starts in turn.
func tie(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGKILL }

// adopt makes orphans among a command's processes children of this one, so that
// they can be waited for: in a container nobody else might do it.
func adopt() {
	_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) // since Linux 3.4
}
