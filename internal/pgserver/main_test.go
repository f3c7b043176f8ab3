//go:build unix

package pgserver_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"github.com/pawl-go/pawl/internal/pgserver"
)

// roleEnv makes this program a process that starts a server: the tests watch
// from outside what becomes of it.
const roleEnv = "PAWL_TEST_ROLE"

func TestMain(m *testing.M) {
	role, ok := os.LookupEnv(roleEnv)
	if !ok {
		// Who is started in the background, by a shell or nohup, ignores these, and
		// so would the players. What is handled here is the default for them.
		for _, ignored := range []os.Signal{os.Interrupt, syscall.SIGHUP} {
			if signal.Ignored(ignored) {
				signal.Notify(make(chan os.Signal, 1), ignored)
			}
		}
		os.Exit(m.Run())
	}
	if err := play(strings.Fields(role)); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// play starts a server, prints its DSN and data folder, waits for a line on
// standard input and then ends as it is told to.
func play(role []string) error {
	var opts []pgserver.Option
	for _, word := range role {
		switch word {
		case "watchdog":
			pgserver.UseWatchdog()
		case "outlive":
			opts = append(opts, pgserver.Outlive())
		}
	}
	server, err := pgserver.Start(context.Background(), append(opts, pgserver.Fast())...)
	if err != nil {
		return err
	}
	fmt.Printf("%s %s\n", server.DSN(), server.DataDir())
	line, err := bufio.NewReader(os.Stdin).ReadString('\n')
	if err != nil {
		return err
	}
	switch strings.TrimSpace(line) {
	case "stop":
		return server.Stop()
	case "exit":
		os.Exit(0)
	case "panic":
		go func() { panic("in some goroutine") }()
	}
	select {}
}

// player is a process in a role.
type player struct {
	cmd  *exec.Cmd
	in   io.Writer
	dsn  string
	data string
}

// cast starts a process and returns when its server runs.
func cast(t *testing.T, role string, env ...string) player {
	t.Helper()
	p, err := audition(t, role, env...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func audition(t *testing.T, role string, env ...string) (player, error) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(append(os.Environ(), roleEnv+"="+role), env...)
	// Signals go to the process group, as Ctrl-C does.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		_ = cmd.Wait()
		return player{}, fmt.Errorf("%s", stderr.String())
	}
	dsn, data, _ := strings.Cut(strings.TrimSpace(line), " ")
	return player{cmd: cmd, in: in, dsn: dsn, data: data}, nil
}
