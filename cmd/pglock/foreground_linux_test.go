package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// On a terminal a command reads what is typed, and Ctrl-C ends it. Neither Ctrl-Z
// nor SIGSTOP suspends it.
func TestRun_Terminal(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	keys, screen := openTerminal(t)
	p := command(t, dsn, "run", "typed", "--", "sh", "-c", `
		echo ready; read line; echo "got $line"
		trap "echo continued" CONT; kill -STOP $$; trap - CONT
		while read line; do echo "got $line"; done`)
	p.Stdin, p.Stdout, p.Stderr = screen, screen, screen
	p.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	p.start(t)
	lines := bufio.NewScanner(keys)
	expect := func(want string) {
		t.Helper()
		for lines.Scan() {
			if strings.Contains(lines.Text(), want) {
				return
			}
		}
		t.Fatalf("the terminal ends before it shows %q: %v", want, lines.Err())
	}
	front := func() int {
		t.Helper()
		group, err := unix.IoctlGetInt(int(keys.Fd()), unix.TIOCGPGRP)
		if err != nil {
			t.Fatal(err)
		}
		return group
	}
	expect("ready")
	if _, err := keys.WriteString("hello\n"); err != nil {
		t.Fatal(err)
	}
	expect("got hello")
	if group := front(); group == p.Process.Pid {
		t.Error("run itself is in the foreground: what it runs read from the background")
	}
	expect("continued")
	if _, err := keys.WriteString("\x1athere\n"); err != nil { // Ctrl-Z
		t.Fatal(err)
	}
	expect("got there")
	if _, err := keys.WriteString("\x03"); err != nil { // Ctrl-C
		t.Fatal(err)
	}
	if code := p.end(t); code != 130 {
		t.Errorf("it exits with %d, want 130", code)
	}
	if !one[bool](t, pool, isFree, "typed") {
		t.Error("the lease is not free")
	}
}

// openTerminal returns both ends of a pseudo-terminal, closed at the end of the test.
func openTerminal(t *testing.T) (keys, screen *os.File) {
	t.Helper()
	keys, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = keys.Close() })
	if err := unix.IoctlSetPointerInt(int(keys.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	number, err := unix.IoctlGetInt(int(keys.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	screen, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = screen.Close() })
	return keys, screen
}
