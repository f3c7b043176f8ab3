// Command onlyonce shows a nightly job that any of several nodes may do, and
// that is done once a night.
//
// Each node fires by a clock of its own and does the work under WithLock, a
// session advisory lock: one works, the others wait. The one that works is
// killed in the middle; its lock goes with its connection, and the next node
// takes over. The result and a record of the night are written in one
// transaction, so that whoever comes after that, be it minutes later, finds the
// night done. The control has the lock and no record: it keeps two from working
// at once, and not one after the other.
//
//	go run ./examples/onlyonce
//
// It starts a PostgreSQL of its own, or works in a schema of its own in the
// database that -dsn names, and removes what it made. It exits with 0 when each
// night had one report with a record and several without, else with 1, and with
// 2 on a wrong flag.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/pawl-go/pawl/internal/scratch"
)

func main() {
	if len(os.Args) == 2 && os.Args[1] == nodeCommand {
		os.Exit(node(os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}

const nodes = 4 // that fire at once

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("onlyonce", flag.ContinueOnError)
	flags.SetOutput(stderr)
	dsn := flags.String("dsn", "", "work in this `database` instead of starting one")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil || flags.NArg() > 0:
		return 2
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := scratch.In(ctx, *dsn, "onlyonce", createTables, func(s scratch.Schema, pool *pgxpool.Pool) error {
		return errors.Join(
			show(ctx, pool, order{s, "2026-01-01", true}, stdout),
			show(ctx, pool, order{s, "2026-01-02", true}, stdout),
			show(ctx, pool, order{s, "2026-01-03", false}, stdout))
	})
	if err != nil {
		fmt.Fprintln(stderr, "onlyonce:", err)
		return 1
	}
	return 0
}

// Its key makes runs the record of what was done. No key on reports hides that
// one was made twice.
const createTables = `
	CREATE TABLE runs (job text, night date, PRIMARY KEY (job, night));
	CREATE TABLE reports (night date NOT NULL)`

// show has the nodes fire at once, kills the first in the middle of its work,
// and has one more fire when they all have ended.
func show(ctx context.Context, pool *pgxpool.Pool, o order, stdout io.Writer) error {
	var killed atomic.Bool
	doomed := func() bool { return killed.CompareAndSwap(false, true) }
	g, all := errgroup.WithContext(ctx)
	for range nodes {
		g.Go(func() error { return fire(all, o, doomed) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if err := fire(ctx, o, doomed); err != nil {
		return err
	}
	var reports int
	if err := pool.QueryRow(ctx, `SELECT count(*) FROM reports WHERE night = $1::date`, o.Night).Scan(&reports); err != nil {
		return err
	}
	way := map[bool]string{true: "lock and record", false: "lock alone"}[o.Recorded]
	fmt.Fprintf(stdout, "%s, %s: %d nodes at once, 1 killed in the middle, 1 later; reports: %d\n", o.Night, way, nodes, reports)
	switch {
	case o.Recorded && reports != 1:
		return fmt.Errorf("%s has %d reports", o.Night, reports)
	case !o.Recorded && reports < 2:
		return errors.New("without a record there was one report too: the control shows nothing")
	}
	return nil
}

// fire runs one node to its end. In the middle of its work it may go on, unless
// it is doomed.
func fire(ctx context.Context, o order, doomed func() bool) error {
	cmd, stdin, stdout, err := scratch.Again(ctx, nodeCommand)
	if err != nil {
		return err
	}
	err = json.NewEncoder(stdin).Encode(o)
	killed := false
	if err == nil && bufio.NewScanner(stdout).Scan() {
		if killed = doomed(); killed {
			err = cmd.Process.Kill()
		} else {
			_, err = fmt.Fprintln(stdin, "go on")
		}
	}
	if ended := cmd.Wait(); !killed {
		err = errors.Join(err, ended)
	}
	return err
}
