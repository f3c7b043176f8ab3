// Command lostupdate loses updates on a real PostgreSQL, and then keeps them.
//
// Workers withdraw from one account: each reads the balance, thinks, and writes
// it back. Without a lock withdrawals vanish; with a row lock, an advisory lock,
// a fenced lease or a version they don't. Then two processes tell the story of
// the paused client: one takes a lease, is stopped past its end, another takes
// over and writes, and the first goes on and writes too; once it wins, and once
// the account refuses it, because it remembers a higher token.
//
//	go run ./examples/lostupdate
//
//	go run ./examples/lostupdate -html timeline.html   # and draws what happened
//
// It starts a PostgreSQL of its own, or works in a schema of its own in the
// database that -dsn names. It exits with 0 when every lock kept every
// withdrawal, the fence refused the stale write and both went wrong without
// them; with 1 when that was not shown, and with 2 on a wrong flag.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/pawl-go/pawl/pglock"
)

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) }

// childCommand, alone, makes the program one of the clients of a story.
const childCommand = "child"

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	if len(args) == 1 && args[0] == childCommand {
		return child(os.Stdin, stdout)
	}
	o, err := parse(args)
	if errors.Is(err, flag.ErrHelp) {
		usage(stdout)
		return 0
	}
	if err != nil {
		fmt.Fprintf(stderr, "lostupdate: %v (-h lists the flags)\n", err)
		return 2
	}
	files, err := create(o)
	if err != nil {
		fmt.Fprintf(stderr, "lostupdate: %v\n", err)
		return 2
	}
	defer files.discard()

	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends the program at once
	// A reader that goes away, as head does, must not end the program before it
	// has cleaned up.
	signal.Ignore(syscall.SIGPIPE)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	out := newReport(o, &sink{stdout, cancel}, stderr)
	if err := demonstrate(ctx, o, files, out); err != nil {
		return 1
	}
	return 0
}

// sink ends the run when its reader has gone.
type sink struct {
	io.Writer
	fail context.CancelCauseFunc
}

func (s *sink) Write(p []byte) (int, error) {
	n, err := s.Writer.Write(p)
	if err != nil {
		s.fail(err)
	}
	return n, err
}

// demonstrate runs everything that was asked for. What it returns it has
// reported.
func demonstrate(ctx context.Context, o options, files files, out report) error {
	out.progress("starting")
	db, err := open(ctx, o)
	if err != nil {
		return fail(ctx, out, err)
	}
	r, err := perform(ctx, db, o, out)
	if err == nil {
		err = out.verdict(r)
	} else {
		err = fail(ctx, out, err)
	}
	if err == nil {
		if err = files.write(r, out.note); err != nil {
			err = fail(ctx, out, err)
		}
	}
	if o.keep {
		out.note(db.kept())
		if db.server != nil {
			<-ctx.Done()
		}
	}
	if closeErr := db.close(o.keep, out.note); closeErr != nil {
		return fail(context.Background(), out, closeErr)
	}
	return err
}

// fail reports an error, by its cause where the run was broken off.
func fail(ctx context.Context, out report, err error) error {
	if ctx.Err() != nil {
		err = fmt.Errorf("broken off: %w", context.Cause(ctx))
	}
	out.fail(err)
	return err
}

func perform(ctx context.Context, db *database, o options, out report) (results, error) {
	r := results{options: o, version: db.version, began: time.Now()}
	locks := pglock.New(db.pool)
	defer func() { _ = locks.Close(context.WithoutCancel(ctx)) }() // by then every lease is released, or the run was broken off
	out.begin(db, o)
	b := newBank(db, locks, o)
	for _, s := range strategies {
		if !o.wants(s.name) {
			continue
		}
		t, err := b.run(ctx, s, out.progress)
		if err != nil {
			return r, fmt.Errorf("%s: %w", s.name, err)
		}
		r.tallies = append(r.tallies, t)
		out.tally(t)
	}
	if !canPause && len(o.only) == 0 {
		out.note("The stories of the paused client are left out: this system has no SIGSTOP.")
		return r, nil
	}
	for _, name := range stories {
		if !o.wants(name) {
			continue
		}
		t, err := tell(ctx, db, name, o.ttl, out)
		if err != nil {
			return r, fmt.Errorf("%s: %w", name, err)
		}
		r.tales = append(r.tales, t)
		out.tale(t)
	}
	return r, nil
}
