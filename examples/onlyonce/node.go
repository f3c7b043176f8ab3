package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/scratch"
	"github.com/pawl-go/pawl/pglock"
)

// nodeCommand, alone, makes the program one of the nodes.
const nodeCommand = "node"

// order is the first line on a node's standard input.
type order struct {
	Place    scratch.Schema
	Night    string
	Recorded bool // else the control: a lock and nothing more
}

// node makes the report of a night, unless that is done. In the middle it says
// so and waits for a line that lets it go on; it ends with its input, as it does
// with whoever started it.
func node(in io.Reader, out, stderr io.Writer) int {
	lines := bufio.NewScanner(in)
	lines.Scan()
	var o order
	err := json.Unmarshal(lines.Bytes(), &o)
	if err == nil {
		err = o.report(context.Background(), func() error {
			fmt.Fprintln(out, "in the middle")
			if !lines.Scan() {
				return io.ErrUnexpectedEOF
			}
			return nil
		})
	}
	if err != nil {
		fmt.Fprintln(stderr, "node:", err)
		return 1
	}
	return 0
}

func (o order) report(ctx context.Context, work func() error) (err error) {
	pool, err := o.Place.Connect(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	client := pglock.New(pool)
	defer func() { err = errors.Join(err, client.Close(ctx)) }()

	// The lock has the nodes come one after the other, and the next one take
	// over from one that dies. That it was done the record says, however much
	// later a node comes.
	return client.WithLock(ctx, pglock.KeyOf("report/nightly"), func(ctx context.Context) error {
		var done bool
		err := pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM runs WHERE job = 'report' AND night = $1::date)`, o.Night).Scan(&done)
		if err != nil || done {
			return err
		}
		if err := work(); err != nil {
			return err
		}
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return o.write(ctx, tx) })
	})
}

// write writes the report and the record of it, or neither: where a node that
// has lost the lock doesn't know it yet, the record of the other stops it.
func (o order) write(ctx context.Context, tx pgx.Tx) error {
	if o.Recorded {
		tag, err := tx.Exec(ctx, `INSERT INTO runs (job, night) VALUES ('report', $1::date) ON CONFLICT DO NOTHING`, o.Night)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
	}
	_, err := tx.Exec(ctx, `INSERT INTO reports (night) VALUES ($1::date)`, o.Night)
	return err
}
