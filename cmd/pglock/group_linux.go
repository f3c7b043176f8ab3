package main

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
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

// reap waits for orphans that have ended and are of other groups than the
// command's.
func reap(command int) {
	threads, _ := filepath.Glob("/proc/self/task/*/children") // the pattern is in order
	for _, thread := range threads {
		children, err := os.ReadFile(thread)
		if err != nil {
			continue // the thread has ended
		}
		for field := range strings.FieldsSeq(string(children)) {
			if pid, err := strconv.Atoi(field); err == nil && pid != command {
				_, _ = syscall.Wait4(pid, nil, syscall.WNOHANG, nil) // it may not have ended
			}
		}
	}
}
