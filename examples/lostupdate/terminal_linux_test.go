package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// onTerminal runs the program on a pseudo-terminal and returns what that got.
func onTerminal(t *testing.T, env []string, args ...string) string {
	t.Helper()
	ptmx, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer ptmx.Close()
	if err := unix.IoctlSetPointerInt(int(ptmx.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(int(ptmx.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	pts, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, append([]string{programCommand}, args...)...)
	cmd.Stdout, cmd.Stderr = pts, pts
	cmd.Env = append(os.Environ(), env...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = pts.Close()
	text, _ := io.ReadAll(ptmx) // which ends with an error when the terminal has no program any more
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, text)
	}
	return string(text)
}

func TestTerminal(t *testing.T) {
	t.Parallel()
	const colour, progress = "\x1b[1m", wipe + "row: 0 of 20"
	tests := []struct {
		name             string
		env              []string
		json             bool
		colour, progress bool
	}{
		{"colour", []string{"TERM=xterm", "NO_COLOR="}, false, true, true},
		{"no colour", []string{"TERM=xterm", "NO_COLOR=1"}, false, false, true},
		{"dumb", []string{"TERM=dumb", "NO_COLOR="}, false, false, false},
		{"json", []string{"TERM=xterm", "NO_COLOR="}, true, false, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			got := onTerminal(t, test.env, "-dsn="+pgtest.DSN(t), "-only=row", "-workers=2", "-ops=10", fmt.Sprint("-json=", test.json))
			if strings.Contains(got, colour) != test.colour || strings.Contains(got, progress) != test.progress {
				t.Errorf("%q", got)
			}
			if !test.colour && !test.progress && strings.Contains(got, "\x1b") {
				t.Errorf("%q", got)
			}
		})
	}
}
