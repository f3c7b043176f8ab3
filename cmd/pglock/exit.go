package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pawl-go/pawl/pglock"
)

// The codes that pglock exits with. From 64 on they are those of sysexits.h, so
// that few commands under run exit with the same by chance.
const (
	exitDanger      = 1  // doctor has found a danger
	exitUsage       = 64 // wrong arguments
	exitUnreachable = 69 // no server, or none that lets this user in or answers in time
	exitFailed      = 70 // any other error
	exitBusy        = 75 // somebody else holds it, or it is in use
	exitLost        = 76 // it was held, and the lease ended before the work; or that tenure is over
	exitNoSchema    = 78 // the schema is missing or too old

	// As in shells, of run.
	exitCannotRun = 126 // the command was found, and can't be started
	exitNotFound  = 127
	exitSignal    = 128 // and the signal's number, of whoever was ended by it
)

const exitHelp = `Exit codes:
    0  done
    1  doctor has found a danger
   64  wrong arguments
   69  the server can't be reached, refuses the user or doesn't answer in time
   70  another error
   75  busy: somebody else holds it, or it is in use
   76  lost: the lease ended before the work did, or that tenure is over
   78  the schema is missing or too old: pglock migrate up
  run exits as its command does, with 128 and the signal's number where a
  signal ended that or pglock itself; 126 if it can't be started, 127 if it is
  not found.`

// usageError is an error of whoever typed the command.
type usageError struct{ error }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

func (e *usageError) Unwrap() error { return e.error }

// unreachableError says that no server could be asked.
type unreachableError struct{ error }

func (e *unreachableError) Unwrap() error { return e.error }

// status is a code to exit with when everything has been said.
type status int

func (s status) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// signalled is the cause of a context that a signal has ended.
type signalled struct{ os.Signal }

func (s signalled) Error() string { return "ended by signal: " + s.String() }

// status returns what a shell shows of a process that the signal ended.
func (s signalled) status() status {
	if number, ok := s.Signal.(syscall.Signal); ok {
		return exitSignal + status(number)
	}
	return exitFailed
}

// exit prints an error, if there is one that has not been printed, and returns
// the code that says what it means.
func (a *app) exit(err error) int {
	if err == nil {
		return 0
	}
	if code, ok := errors.AsType[status](err); ok {
		return int(code)
	}
	if s, ok := errors.AsType[signalled](err); ok {
		return int(s.status())
	}
	a.complain(err)
	if _, ok := errors.AsType[*usageError](err); ok {
		fmt.Fprintln(a.stderr, "pglock --help lists the verbs, and pglock VERB --help what each takes")
	}
	return code(err)
}

// complain prints an error to standard error, with the program's name in front and
// not in the middle.
func (a *app) complain(err error) {
	said := strings.ReplaceAll(": "+err.Error(), ": pglock: ", ": ")
	fmt.Fprintln(a.stderr, "pglock"+printable(said))
}

func code(err error) int {
	_, usage := errors.AsType[*usageError](err)
	_, unreachable := errors.AsType[*unreachableError](err)
	_, unconnected := errors.AsType[*pgconn.ConnectError](err)
	switch {
	case usage:
		return exitUsage
	case errors.Is(err, pglock.ErrNoSchema):
		return exitNoSchema
	case errors.Is(err, pglock.ErrLocked):
		return exitBusy
	case errors.Is(err, pglock.ErrLost):
		return exitLost
	case unreachable, unconnected, errors.Is(err, context.DeadlineExceeded):
		return exitUnreachable
	}
	return exitFailed
}
