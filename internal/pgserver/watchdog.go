package pgserver

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"time"
)

// useWatchdog says how a local server is tied to this process.
var useWatchdog = !diesWithParent

// watchdogEnv makes this program, started again, be a watchdog and nothing else.
const watchdogEnv = "PGLOCK_PG_WATCHDOG"

// A watchdog is this program again, reading from a pipe that only this process
// holds the other end of. The pipe ends when the process does, in whatever
// way; the watchdog then removes what it was told to.
type watchdog struct {
	cmd  *exec.Cmd
	pipe io.WriteCloser
}

// watch starts a watchdog over what: the folder of a cluster, or a container
// as "container:NAME". It is to be started before the thing it watches.
func watch(what string) (*watchdog, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), watchdogEnv+"="+what)
	account{}.take(cmd)
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a watchdog: %w", err)
	}
	return &watchdog{cmd: cmd, pipe: pipe}, nil
}

// dismiss ends the watchdog without its doing anything.
func (w *watchdog) dismiss() error {
	if w == nil {
		return nil
	}
	if _, err := io.WriteString(w.pipe, dismissal); err != nil {
		return err
	}
	if err := w.pipe.Close(); err != nil {
		return err
	}
	return w.cmd.Wait()
}

const dismissal = "dismissed\n"

func init() {
	what, ok := os.LookupEnv(watchdogEnv)
	if !ok {
		return
	}
	signal.Ignore(os.Interrupt)
	line, _ := bufio.NewReader(os.Stdin).ReadString('\n')
	if line == dismissal {
		os.Exit(0)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var err error
	if name, ok := strings.CutPrefix(what, "container:"); ok {
		err = removeContainer(ctx, name)
	} else {
		err = removeCluster(ctx, what)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "watchdog: remove %s: %v\n", what, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// removeCluster ends the server on a folder, if there is one, and removes the
// folder.
func removeCluster(ctx context.Context, dir string) error {
	data := filepath.Join(dir, "data")
	if pid := postmaster(data); pid != 0 {
		if server, err := os.FindProcess(pid); err == nil {
			_ = server.Signal(immediate)
		}
		// Its file goes before its process does: without a parent that waits for
		// it, the process may be listed for long after its end.
		for postmaster(data) == pid && alive(pid) && ctx.Err() == nil {
			time.Sleep(10 * time.Millisecond)
		}
	}
	return removeAll(dir)
}
