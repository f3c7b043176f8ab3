package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/pawl-go/pawl/pglock"
)

// runOptions are what run was told.
type runOptions struct {
	name      string
	ttl, wait time.Duration // wait 0: as long as it takes
	try       bool
}

func (a *app) run() *cobra.Command {
	var o runOptions
	cmd := &cobra.Command{
		Use:   "run NAME [--ttl 30s] [--wait 1m | --try] -- COMMAND [ARGUMENT...]",
		Short: "Run a command under a lease, as flock does under a file",
		Long: `run waits for the lease NAME, runs the command while it is held, releases it and
exits as the command did. It prints nothing of its own unless it waits for
longer than a second or something goes wrong.

The command has in its environment PGLOCK_NAME, PGLOCK_TOKEN and PGLOCK_DEADLINE,
the time (RFC 3339) up to which the lease is held if it can't be renewed even
once. It is renewed for as long as the command runs.

The command is a process group of its own. Every signal that run gets it passes
on to that group; while it waits, one to end makes it give up, and leave the
line. When the command has ended, what is left of its group is ended too, by
TERM and 5 s later by KILL, and then the lease is released.

When the lease can't be renewed, the group gets TERM with a quarter of the TTL
left (10 s at the most), and KILL before anybody else can be granted it: so two
don't run while run does. When somebody has released it by force, run notices
with the next renewal, after a third of the TTL, and ends the group within 1 s.
If run itself is killed, the kernel kills the command; this is on Linux only, and
not for what the command has started in turn. If run is stopped, the command
goes on. What protects a resource in every case is PGLOCK_TOKEN: give it to
pglock.present or pglock.fence in the transaction that writes.

On a terminal the command gets Ctrl-C itself, and Ctrl-Z suspends nothing: a
suspended command would keep others waiting.`,
		Example: `  pglock run backup --ttl 1m -- ./backup.sh /var/data
  pglock run nightly --try -- ./nightly.sh || [ $? = 75 ]
  pglock run deploy --wait 10m -- sh -c 'echo "token $PGLOCK_TOKEN"; ./deploy.sh'`,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch dash := cmd.ArgsLenAtDash(); {
			case dash < 0 || len(args) == dash:
				return errors.New("run: give the command after --, as in pglock run NAME -- COMMAND")
			case dash != 1:
				return fmt.Errorf("run: give one NAME before --, not %d", dash)
			}
			o.name = args[0]
			if err := o.check(cmd.Flags().Changed("wait")); err != nil {
				return err
			}
			if err := a.begin(); err != nil {
				return err
			}
			return a.runUnder(cmd.Context(), o, args[1:])
		},
	}
	flags := cmd.Flags()
	flags.DurationVar(&o.ttl, "ttl", 30*time.Second, "how long the lease outlives a run that is cut off, from 100ms to 24h")
	flags.DurationVar(&o.wait, "wait", 0, "how long to wait for the lease (default: as long as it takes)")
	flags.BoolVarP(&o.try, "try", "n", false, "don't wait: exit with 75 where somebody else holds it")
	return cmd
}

func (o runOptions) check(bounded bool) error {
	switch {
	case o.name == "" || len(o.name) > 1024 || !utf8.ValidString(o.name):
		return usagef("NAME %q: give UTF-8 of 1 to 1,024 bytes", o.name)
	case o.ttl < 100*time.Millisecond || o.ttl > 24*time.Hour:
		return usagef("--ttl %v: give 100ms to 24h", o.ttl)
	case bounded && o.try:
		return usagef("--wait and --try: give one of them")
	case bounded && o.wait <= 0:
		return usagef("--wait %v: give how long to wait, or --try not to", o.wait)
	}
	return nil
}

// acquire waits for the lease, and says for whom once that has taken a second.
func (a *app) acquire(ctx context.Context, client *pglock.Client, o runOptions) (*pglock.Lease, error) {
	if o.try {
		var l *pglock.Lease
		err := ask(ctx, func(ctx context.Context) (err error) {
			l, err = client.TryAcquire(ctx, o.name, o.ttl)
			return err
		})
		return l, err
	}
	if o.wait > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.wait)
		defer cancel()
	}
	waiting, granted := context.WithCancel(ctx)
	defer granted()
	go a.tellHolder(waiting, client, o.name)
	l, err := client.Acquire(ctx, o.name, o.ttl)
	if errors.Is(ctx.Err(), context.DeadlineExceeded) && err != nil {
		if held, ok := errors.AsType[*pglock.HeldError](err); ok {
			err = held
		} // else the server has not said who holds it
		err = fmt.Errorf("gave up after %v: %w", o.wait, err)
	}
	return l, err
}

// tellHolder says who holds the lease that is waited for, once that has taken a
// second. Where nobody does it looks again: the server may just be slow.
func (a *app) tellHolder(ctx context.Context, client *pglock.Client, name string) {
	for range 3 {
		select {
		case <-ctx.Done(): // it was granted, or given up
			return
		case <-time.After(time.Second):
		}
		h, err := find(ctx, client, name)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			a.complain(fmt.Errorf("waiting for lease %q: %w", name, err))
			return
		case h != nil:
			a.complain(fmt.Errorf("waiting for lease %q: held by %q with token %d since %s, %d in line", name, h.Owner, h.Token,
				h.AcquiredAt.Format(time.RFC3339), h.Waiters))
			return
		}
	}
	a.complain(fmt.Errorf("waiting for lease %q, which nobody holds: a transaction may have its row, pglock blocked shows it", name))
}

// command prepares what is run. Its error is told before anything is waited for.
func (a *app) command(args []string) (*exec.Cmd, error) {
	if _, err := exec.LookPath(args[0]); err != nil {
		return nil, err
	}
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = a.stdin, a.stdout, a.stderr
	return cmd, nil
}

// cantRun says why a command can't be run, and exits as a shell does.
func (a *app) cantRun(err error) error {
	a.complain(fmt.Errorf("run: %w", err))
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		return status(exitNotFound)
	}
	return status(exitCannotRun)
}

// environment tells the command what it runs under.
func environment(l *pglock.Lease) []string {
	deadline := time.Now().Add(time.Until(l.Deadline())) // by the clock on the wall
	return append(os.Environ(),
		"PGLOCK_NAME="+l.Name(),
		"PGLOCK_TOKEN="+strconv.FormatInt(int64(l.Token()), 10),
		"PGLOCK_DEADLINE="+deadline.UTC().Format("2006-01-02T15:04:05.000Z07:00"))
}

// letGo releases the lease when the command's group has ended, and returns the
// code to exit with: ended, that of the command, unless the lease turns out to
// have been lost while it ran.
func (a *app) letGo(ctx context.Context, l *pglock.Lease, ended status) (_ status, released bool) {
	held := l.Err()
	err := l.Release(ctx)
	if err == nil {
		return ended, true
	}
	lost, ok := errors.AsType[*pglock.LostError](err)
	if held == nil && (!ok || lost.Cause == pglock.Unreachable) {
		a.complain(fmt.Errorf("run: the command has ended, but its lease ends with its TTL of now on: %w", err))
		return ended, false
	}
	a.complain(fmt.Errorf("run: somebody else may have begun before the command had ended: %w", err))
	return exitLost, false
}
