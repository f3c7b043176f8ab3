package pgserver

import (
	"os/exec"
	"syscall"
)

// diesWithParent says that tie alone ends the server with this process.
const diesWithParent = true

// tie makes the kernel end cmd when the thread that starts it ends, which spawn
// makes the same as this process. SIGQUIT and not SIGKILL: the postmaster then
// ends its children, whatever they do, and gives its shared memory back.
func tie(cmd *exec.Cmd) { cmd.SysProcAttr.Pdeathsig = syscall.SIGQUIT }
