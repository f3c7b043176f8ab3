package main

import (
	"os/exec"
	"syscall"
)

// tie makes the kernel kill cmd when the thread that starts it ends, which
// spawn makes the same as this process. SIGKILL reaches a stopped one too.
func tie(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
