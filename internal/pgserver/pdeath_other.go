//go:build !linux

package pgserver

import "os/exec"

// diesWithParent says that tie alone ends the server with this process.
const diesWithParent = false

func tie(*exec.Cmd) {}
