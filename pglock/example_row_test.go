package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/pglock"
)

// The row is read under the lock, so that nobody changes it between the look
// and the write.
func ExampleLockRow() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres:///bank")
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		balance, err := pglock.LockRow(ctx, tx, pglock.ForNoKeyUpdate, pgx.RowTo[int],
			`SELECT balance FROM accounts WHERE id = $1`, 42)
		if err != nil {
			return err
		}
		if balance < 10 {
			return errors.New("not enough money")
		}
		_, err = tx.Exec(ctx, `UPDATE accounts SET balance = $2 WHERE id = $1`, 42, balance-10)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}

// A refused NoWait leaves the transaction usable.
func ExampleRowLock_NoWait() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres:///bank")
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := pglock.LockRow(ctx, tx, pglock.ForNoKeyUpdate.NoWait(), pgx.RowTo[int],
			`SELECT balance FROM accounts WHERE id = $1`, 42)
		if errors.Is(err, pglock.ErrLocked) {
			_, err = tx.Exec(ctx, `INSERT INTO later (account) VALUES ($1)`, 42)
			return err
		}
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}

// Workers take different jobs from one table: what one has locked, the others
// don't see. A worker that dies gives its jobs back with its transaction.
func ExampleLockRows() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres:///jobs")
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		ids, err := pglock.LockRows(ctx, tx, pglock.ForUpdate.SkipLocked(), pgx.RowTo[int64],
			`SELECT id FROM jobs ORDER BY id LIMIT 10`)
		if err != nil {
			return err
		}
		for _, id := range ids {
			fmt.Println("working on", id)
		}
		_, err = tx.Exec(ctx, `DELETE FROM jobs WHERE id = ANY ($1)`, ids)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}

// A writer that is paused while it holds the row is cut off after two seconds:
// its COMMIT fails, and the next one in line goes on.
func ExampleSetHoldTimeout() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres:///bank")
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := pglock.SetLockTimeout(ctx, tx, 5*time.Second); err != nil {
			return err
		}
		balance, err := pglock.LockRow(ctx, tx, pglock.ForNoKeyUpdate, pgx.RowTo[int],
			`SELECT balance FROM accounts WHERE id = $1`, 42)
		if err != nil {
			return err // pglock.ErrLocked after five seconds
		}
		if err := pglock.SetHoldTimeout(ctx, tx, 2*time.Second); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, `UPDATE accounts SET balance = $2 WHERE id = $1`, 42, balance-10)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}
