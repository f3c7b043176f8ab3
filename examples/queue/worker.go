package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/scratch"
	"github.com/pawl-go/pawl/pglock"
)

// workerCommand, alone, makes the program one of the workers.
const workerCommand = "work"

// The ways to take a job.
const (
	locked = "locked"
	marked = "marked"
)

const atOnce = 3 // jobs in a transaction

// order is the first line on a worker's standard input.
type order struct {
	Place scratch.Schema
	Way   string
}

// worker takes jobs until there are none. In the middle of each lot it says how
// many it has and waits for a line that lets it go on; it ends with its input,
// as it does with whoever started it.
func worker(in io.Reader, out, stderr io.Writer) int {
	lines := bufio.NewScanner(in)
	var o order
	lines.Scan()
	if err := json.Unmarshal(lines.Bytes(), &o); err != nil {
		fmt.Fprintln(stderr, "worker:", err)
		return 1
	}
	err := o.work(context.Background(), func(jobs []int64) error {
		fmt.Fprintln(out, len(jobs))
		if !lines.Scan() {
			return io.ErrUnexpectedEOF
		}
		return nil
	})
	if err != nil {
		fmt.Fprintln(stderr, "worker:", err)
		return 1
	}
	return 0
}

func (o order) work(ctx context.Context, middle func([]int64) error) error {
	pool, err := o.Place.Connect(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	for {
		take := lockedLot
		if o.Way == marked {
			take = markedLot
		}
		jobs, err := take(ctx, pool, middle)
		if err != nil {
			return err
		}
		if len(jobs) > 0 {
			continue
		}
		// Others may have all that is left, and die.
		var left bool
		if err := pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM jobs WHERE done_at IS NULL AND NOT taken)`).Scan(&left); err != nil || !left {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// lockedLot takes a few jobs and does everything in one transaction: the rows are locked until it
// ends, however it ends.
func lockedLot(ctx context.Context, pool *pgxpool.Pool, middle func([]int64) error) (jobs []int64, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		jobs, err = pglock.LockRows(ctx, tx, pglock.ForUpdate.SkipLocked(), pgx.RowTo[int64],
			`SELECT id FROM jobs WHERE done_at IS NULL ORDER BY id LIMIT $1`, atOnce)
		if err != nil || len(jobs) == 0 {
			return err
		}
		return do(ctx, tx, jobs, middle)
	})
	return jobs, err
}

// markedLot is the control: the mark outlives the worker that made it.
func markedLot(ctx context.Context, pool *pgxpool.Pool, middle func([]int64) error) ([]int64, error) {
	rows, err := pool.Query(ctx, `UPDATE jobs SET taken = true WHERE id IN
		(SELECT id FROM jobs WHERE NOT taken ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED) RETURNING id`, atOnce)
	if err != nil {
		return nil, err
	}
	jobs, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil || len(jobs) == 0 {
		return nil, err
	}
	return jobs, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return do(ctx, tx, jobs, middle) })
}

// do has the effect of each job and notes that it is done.
func do(ctx context.Context, tx pgx.Tx, jobs []int64, middle func([]int64) error) error {
	if _, err := tx.Exec(ctx, `INSERT INTO effects (job) SELECT unnest($1::bigint[])`, jobs); err != nil {
		return err
	}
	if err := middle(jobs); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `UPDATE jobs SET done_at = now() WHERE id = ANY ($1)`, jobs)
	return err
}
