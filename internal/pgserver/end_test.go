//go:build unix

package pgserver_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// ended reports whether a player's server has. It takes its file with it; the
// process itself may be listed for longer, until somebody waits for it.
func (p player) ended() bool {
	_, err := os.Stat(filepath.Join(p.data, "postmaster.pid"))
	return os.IsNotExist(err)
}

// end ends a player in the way that is named.
func (p player) end(t *testing.T, how string) {
	t.Helper()
	signals := map[string]syscall.Signal{
		"interrupt": syscall.SIGINT, "terminate": syscall.SIGTERM, "hangup": syscall.SIGHUP, "kill": syscall.SIGKILL,
	}
	if signal, ok := signals[how]; ok {
		if err := syscall.Kill(-p.cmd.Process.Pid, signal); err != nil {
			t.Fatal(err)
		}
	} else if _, err := fmt.Fprintln(p.in, how); err != nil {
		t.Fatal(err)
	}
	_ = p.cmd.Wait()
}

func TestServer_EndsWithItsProcess(t *testing.T) {
	t.Parallel()
	for _, tie := range []string{"kernel", "watchdog"} {
		for _, how := range []string{"stop", "exit", "panic", "interrupt", "terminate", "hangup", "kill"} {
			t.Run(tie+"/"+how, func(t *testing.T) {
				t.Parallel()
				p := cast(t, tie)
				if p.ended() || ping(t.Context(), p.dsn) != nil {
					t.Fatal("the server does not run")
				}
				p.end(t, how)
				eventually(t, "ended", p.ended)
				if err := ping(t.Context(), p.dsn); err == nil {
					t.Error("the server still answers")
				}
				if tie == "kernel" && how != "stop" {
					// Nobody is left to remove the folder; the next to start one does.
					local(t)
				}
				eventually(t, "removed", func() bool {
					_, err := os.Stat(filepath.Dir(p.data))
					return os.IsNotExist(err)
				})
			})
		}
	}
}

// The control: without a tie the server stays, and the sweep of later starts
// keeps away from a folder on which a server runs.
func TestServer_OutlivesItsProcess(t *testing.T) {
	t.Parallel()
	p := cast(t, "outlive")
	defer func() {
		text, err := os.ReadFile(filepath.Join(p.data, "postmaster.pid"))
		if err != nil {
			t.Fatal(err)
		}
		line, _, _ := strings.Cut(string(text), "\n")
		pid, err := strconv.Atoi(line)
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGQUIT); err != nil {
			t.Error(err)
		}
		eventually(t, "ended", p.ended)
		local(t)
	}()
	p.end(t, "kill")
	local(t)
	if err := ping(t.Context(), p.dsn); err != nil {
		t.Errorf("the server is gone: %v", err)
	}
}

// Packages are tested by processes that all start at once.
func TestStart_ManyProcessesAtOnce(t *testing.T) {
	t.Parallel()
	cache := t.TempDir()
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			p, err := audition(t, "kernel", "XDG_CACHE_HOME="+cache)
			if err != nil {
				t.Error(err)
				return
			}
			if err := ping(t.Context(), p.dsn); err != nil {
				t.Error(err)
			}
			p.end(t, "stop")
		})
	}
	all.Wait()
	if made, err := filepath.Glob(filepath.Join(cache, "pawl", "cluster-*")); err != nil || len(made) != 2 {
		t.Errorf("in the cache: %q, %v; want one cluster and its lock", made, err)
	}
}

// A folder below root's home is closed to the account that runs the server.
func TestStart_TemporaryFolderThatTheServerCannotEnter(t *testing.T) {
	t.Parallel()
	closed := filepath.Join(t.TempDir(), "closed")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	p := cast(t, "kernel", "TMPDIR="+closed, "XDG_CACHE_HOME="+filepath.Join(closed, "cache"))
	if err := ping(t.Context(), p.dsn); err != nil {
		t.Error(err)
	}
	p.end(t, "stop")
}
