package pgserver

import (
	"context"
	"io/fs"
	"os"
	"os/exec"
	"syscall"
)

// account is who runs the server: here always the user of this process.
type account struct {
	other bool // never, here
}

func serverAccount() (account, error) { return account{}, nil }

func (account) take(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{CreationFlags: syscall.CREATE_NEW_PROCESS_GROUP}
}

func (account) own(string) error   { return nil }
func (account) reach(string) error { return nil }

func mine(info fs.FileInfo) bool { return info.IsDir() }

// alive errs on the side of yes: a folder that might be in use stays.
func alive(int) bool { return true }

// There are no signals to shut down with; the server recovers at a Restart.
var (
	smart     os.Signal = os.Kill
	immediate os.Signal = os.Kill
)

// lockFile does not lock: what it guards is renamed into place as a whole, so
// that the worst is work done twice.
func lockFile(_ context.Context, path string, _ bool) (*os.File, error) {
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
}
