package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// examplePool is a pool on a database with an account, and what ends it.
func examplePool() (*pgxpool.Pool, func()) {
	t, done := pgtest.Example()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL)`)
	exec(t, pool, `INSERT INTO accounts VALUES (42, 100)`)
	return pool, done
}

// One holder at a time, across machines, for as long as fn runs.
func ExampleClient_WithLease() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()
	client := pglock.New(pool)
	defer client.Close(ctx)

	err := client.WithLease(ctx, "reports/daily", 30*time.Second, func(ctx context.Context, lease *pglock.Lease) error {
		// ctx ends when the lease is lost.
		fmt.Println("making the report under", lease.Name())
		return nil
	})
	if errors.Is(err, pglock.ErrLost) {
		fmt.Println("somebody else may have begun before we had finished")
	} else if err != nil {
		log.Fatal(err)
	}
	// Output: making the report under reports/daily
}

// Whoever comes second is told who has the lease, and doesn't wait.
func ExampleClient_TryAcquire() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()
	one := pglock.New(pool, pglock.WithOwner("worker 1"))
	defer one.Close(ctx)
	two := pglock.New(pool, pglock.WithOwner("worker 2"))
	defer two.Close(ctx)

	lease, err := one.TryAcquire(ctx, "reports/daily", 30*time.Second)
	if err != nil {
		log.Fatal(err)
	}
	defer lease.Release(ctx)

	_, err = two.TryAcquire(ctx, "reports/daily", 30*time.Second)
	if held, ok := errors.AsType[*pglock.HeldError](err); ok {
		fmt.Println(held.Name, "is held by", held.Owner)
	}
	// Output: reports/daily is held by worker 1
}

// The write goes in only if the lease is held until its COMMIT. It is the
// database that says so: nothing is to be gained by asking the lease before.
func ExampleLease_InTx() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()
	client := pglock.New(pool)
	defer client.Close(ctx)

	lease, err := client.Acquire(ctx, "accounts/42", 30*time.Second)
	if err != nil {
		log.Fatal(err)
	}
	defer lease.Release(ctx)

	err = lease.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE accounts SET balance = balance - 10 WHERE id = 42`)
		return err
	})
	switch {
	case errors.Is(err, pglock.ErrLost):
		fmt.Println("nothing was written: acquire again and start over")
	case err != nil:
		log.Fatal(err)
	default:
		fmt.Println("10 withdrawn")
	}
	// Output: 10 withdrawn
}

// Guard does the same in a transaction of your own. Here the lease is gone by
// the time of the write.
func ExampleLease_Guard() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()
	client := pglock.New(pool)
	defer client.Close(ctx)

	lease, err := client.Acquire(ctx, "accounts/42", 30*time.Second)
	if err != nil {
		log.Fatal(err)
	}
	withdraw := func(amount int) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := lease.Guard(ctx, tx); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `UPDATE accounts SET balance = balance - $1 WHERE id = 42`, amount)
			return err
		})
	}
	fmt.Println(withdraw(10))
	if err := lease.Release(ctx); err != nil {
		log.Fatal(err)
	}
	fmt.Println(errors.Is(withdraw(10), pglock.ErrLost))
	// Output:
	// <nil>
	// true
}

// Every write brings the token of its lock, and the account takes none that is
// lower than one it has taken before. The tokens may come from any lock
// service: here two writers of one that stands elsewhere.
func ExampleFence() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()

	withdraw := func(token pglock.Token, amount int) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := pglock.Fence(ctx, tx, "accounts/42", token); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `UPDATE accounts SET balance = balance - $1 WHERE id = 42`, amount)
			return err
		})
	}
	fmt.Println(withdraw(18, 10)) // the holder's
	fmt.Println(withdraw(17, 10)) // of the holder before, which was paused and wakes up
	// Output:
	// <nil>
	// pglock: resource "accounts/42" is fenced: presented token 17, accepted 18
}
