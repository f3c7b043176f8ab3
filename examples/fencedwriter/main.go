//go:build unix

// Command fencedwriter protects a resource that is not in PostgreSQL: a store of
// files behind HTTP, which remembers the highest token that has written a file
// and refuses a lower one.
//
// Two processes write to one file under a lease. The first takes the lease, reads
// the file and is stopped by SIGSTOP, as a machine without memory or processor
// would stop it. Its lease runs out, the second is granted it, with a higher
// token, and writes. Then the first goes on and writes what follows from what it
// had read. Without the comparison its late write wins, and the line of the second
// is lost. With it, it is 409 Conflict.
//
//	go run ./examples/fencedwriter
//
// It starts a PostgreSQL of its own, which is gone afterwards, as are the files.
// It exits with 0 when the late write was refused by the store that compares and
// won at the one that doesn't, else with 1. It needs a Unix, for SIGSTOP.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/pawl-go/pawl/internal/scratch"
)

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var err error
	switch {
	case len(args) == 0:
		err = scratch.Server(ctx, func(dsn string) error { return show(ctx, dsn, stdout, true) })
	case len(args) == 1 && args[0] == writerCommand:
		err = write(ctx, os.Stdin, stdout)
	default:
		fmt.Fprintln(stderr, "fencedwriter: it takes no arguments")
		return 2
	}
	if err != nil {
		fmt.Fprintln(stderr, "fencedwriter:", err)
		return 1
	}
	return 0
}

// show tells the story twice, and returns an error unless the late write won at
// the store that doesn't compare tokens and was refused by the one that does.
func show(ctx context.Context, dsn string, out io.Writer, compares bool) error {
	fmt.Fprintln(out, "A store that compares no tokens")
	status, text, err := tell(ctx, dsn, out, false)
	switch {
	case err != nil:
		return err
	case status != http.StatusOK || text != "a line by A\n":
		return fmt.Errorf("without the comparison: status %d, the file is %q: the control shows nothing", status, text)
	}
	fmt.Fprintln(out, "A store that refuses what is lower than the highest")
	status, text, err = tell(ctx, dsn, out, compares)
	switch {
	case err != nil:
		return err
	case status != http.StatusConflict || text != "a line by B\n":
		return fmt.Errorf("the late write was not refused: status %d, the file is %q", status, text)
	}
	return nil
}

// tell has A be paused past its lease and B write meanwhile. It returns the
// status of A's late write, and the file as it is after that.
func tell(ctx context.Context, dsn string, out io.Writer, fenced bool) (status int, text string, err error) {
	dir, err := os.MkdirTemp("", "fencedwriter")
	if err != nil {
		return 0, "", err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return 0, "", err
	}
	defer root.Close()
	server := httptest.NewServer((&store{dir: root, fenced: fenced}).handler())
	defer server.Close()
	b := brief{Name: "A", DSN: dsn, URL: server.URL + "/files/report", Lease: "examples/fencedwriter/report", TTL: time.Second}

	// step starts a writer, or has one go on, and says what it did.
	step := func(name string, do func() (event, error)) (e event, err error) {
		if e, err = do(); err == nil && e.Status == 0 {
			fmt.Fprintf(out, "  %s  is granted the lease with token %d, and reads\n", name, e.Token)
		} else if err == nil {
			fmt.Fprintf(out, "  %s  writes with token %d: %s\n", name, e.Token, cmp.Or(e.Answer, "accepted"))
		}
		return e, err
	}
	a, err := start(b)
	if err != nil {
		return 0, "", err
	}
	defer a.end()
	if _, err := step("A", func() (event, error) { return a.hear(ctx) }); err != nil {
		return 0, "", err
	}
	if err := a.Process.Signal(syscall.SIGSTOP); err != nil {
		return 0, "", err
	}
	fmt.Fprintln(out, "  A  is stopped")

	b.Name = "B"
	other, err := start(b)
	if err != nil {
		return 0, "", err
	}
	defer other.end()
	if _, err := step("B", func() (event, error) { return other.hear(ctx) }); err != nil {
		return 0, "", err
	}
	if _, err := step("B", func() (event, error) { return other.write(ctx) }); err != nil {
		return 0, "", err
	}
	if err := a.Process.Signal(syscall.SIGCONT); err != nil {
		return 0, "", err
	}
	fmt.Fprintln(out, "  A  goes on")
	late, err := step("A", func() (event, error) { return a.write(ctx) })
	if err != nil {
		return 0, "", err
	}
	if _, err := send(ctx, http.MethodGet, b.URL, 0, &text); err != nil {
		return 0, "", err
	}
	fmt.Fprintf(out, "     the file is %q\n", text)
	return late.Status, text, nil
}
