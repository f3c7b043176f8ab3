package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/pglock"
)

// All keys or none, and no wait: the transaction goes on without them.
func ExampleTryLockTx() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()

	report := pglock.KeyOf("report/daily")
	err := pgx.BeginFunc(ctx, pool, func(first pgx.Tx) error {
		fmt.Println("first:", pglock.TryLockTx(ctx, first, report))
		return pgx.BeginFunc(ctx, pool, func(second pgx.Tx) error {
			err := pglock.TryLockTx(ctx, second, report)
			fmt.Println("second is locked out:", errors.Is(err, pglock.ErrLocked))
			_, err = second.Exec(ctx, `UPDATE accounts SET balance = balance + 1`)
			return err
		})
	})
	fmt.Println(err)
	// Output:
	// first: <nil>
	// second is locked out: true
	// <nil>
}

// Those who read the configuration hold the key together, and who changes it
// waits for all of them.
func ExampleKey_Shared() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()

	config := pglock.KeyOf("config")
	err := pgx.BeginFunc(ctx, pool, func(one pgx.Tx) error {
		return pgx.BeginFunc(ctx, pool, func(two pgx.Tx) error {
			fmt.Println(pglock.LockTx(ctx, one, config.Shared()), pglock.LockTx(ctx, two, config.Shared()))
			fmt.Println(errors.Is(pglock.TryLockTx(ctx, two, config), pglock.ErrLocked))
			return nil
		})
	})
	if err != nil {
		log.Fatal(err)
	}
	// Output:
	// <nil> <nil>
	// true
}

// A wait for a row ends after a while, and the transaction with it.
func ExampleSetLockTimeout() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()

	err := pgx.BeginFunc(ctx, pool, func(holder pgx.Tx) error {
		if _, err := holder.Exec(ctx, `UPDATE accounts SET balance = 0 WHERE id = 42`); err != nil {
			return err
		}
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := pglock.SetLockTimeout(ctx, tx, 50*time.Millisecond); err != nil {
				return err
			}
			_, err := pglock.LockRow(ctx, tx, pglock.ForUpdate, pgx.RowTo[int], `SELECT balance FROM accounts WHERE id = 42`)
			return err
		})
	})
	fmt.Println(errors.Is(err, pglock.ErrLocked))
	// Output: true
}

// Both accounts, one after the other in an order that is the same for all who
// take several: two transfers never wait for each other.
func ExampleClient_AcquireAll() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()
	client := pglock.New(pool)
	defer client.Close(ctx)

	leases, err := client.AcquireAll(ctx, []string{"accounts/43", "accounts/42"}, 30*time.Second)
	if err != nil {
		log.Fatal(err)
	}
	for _, lease := range leases {
		fmt.Println(lease.Name(), lease.Release(ctx))
	}
	// Output:
	// accounts/43 <nil>
	// accounts/42 <nil>
}
