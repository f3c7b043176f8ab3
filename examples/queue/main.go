// Command queue shows that a table is a work queue whose workers may be killed.
//
// Workers, each a process of its own, take jobs with LockRows, SkipLocked and
// LIMIT, do them and note that they are done, all in one transaction. Some are
// killed with SIGKILL in the middle. Their locks and what they had written go
// with their transaction, and others do those jobs: in the end none is lost and
// none was done twice. The control marks a job as taken first, in a transaction
// that commits: who is killed leaves marked jobs behind that nobody takes.
//
//	go run ./examples/queue
//
// It starts a PostgreSQL of its own, or works in a schema of its own in the
// database that -dsn names, and removes what it made. It exits with 0 when every
// job was done once under locks and some were stuck under marks, else with 1,
// and with 2 on a wrong flag.
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

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/scratch"
)

func main() {
	if len(os.Args) == 2 && os.Args[1] == workerCommand {
		os.Exit(worker(os.Stdin, os.Stdout, os.Stderr))
	}
	os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
}

// No constraint on effects hides that a job was done twice.
const createTables = `
	CREATE TABLE jobs (id bigint PRIMARY KEY, taken boolean NOT NULL DEFAULT false, done_at timestamptz);
	CREATE TABLE effects (job bigint NOT NULL)`

const (
	jobs    = 60
	workers = 4 // at once
	kills   = 5
)

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("queue", flag.ContinueOnError)
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
	err := scratch.In(ctx, *dsn, "queue", createTables, func(s scratch.Schema, pool *pgxpool.Pool) error {
		return errors.Join(
			show(ctx, pool, order{s, locked}, stdout),
			show(ctx, pool, order{s, marked}, stdout))
	})
	if err != nil {
		fmt.Fprintln(stderr, "queue:", err)
		return 1
	}
	return 0
}

// show has the jobs done in one way and counts what came of it.
func show(ctx context.Context, pool *pgxpool.Pool, how order, stdout io.Writer) error {
	if _, err := pool.Exec(ctx, fmt.Sprintf("TRUNCATE jobs, effects; INSERT INTO jobs (id) SELECT generate_series(1, %d)", jobs)); err != nil {
		return err
	}
	interrupted, err := employ(ctx, how)
	if err != nil {
		return err
	}
	var done, twice int
	err = pool.QueryRow(ctx, `SELECT count(DISTINCT job), count(*) - count(DISTINCT job) FROM effects`).Scan(&done, &twice)
	if err != nil {
		return err
	}
	fmt.Fprintf(stdout, "%s: %d jobs, %d workers killed in the middle of %d of them: %d done, %d stuck, %d done twice\n",
		how.Way, jobs, kills, interrupted, done, jobs-done, twice)
	switch stuck := jobs - done; {
	case how.Way == locked && (stuck != 0 || twice != 0):
		return fmt.Errorf("%d jobs were lost, %d done twice", stuck, twice)
	case how.Way == marked && stuck == 0:
		return errors.New("no job is stuck without locks: the control shows nothing")
	}
	return nil
}
