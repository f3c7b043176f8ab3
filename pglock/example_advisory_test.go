package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/pglock"
)

// One process at a time makes the report, for as long as that takes.
func ExampleClient_WithLock() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres:///reports")
	if err != nil {
		log.Fatal(err)
	}
	client := pglock.New(pool)
	defer client.Close(ctx)

	err = client.WithLock(ctx, pglock.KeyOf("report/daily"), func(ctx context.Context) error {
		// ctx ends when the lock is lost.
		_, err := pool.Exec(ctx, `REFRESH MATERIALIZED VIEW daily`)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}

// Whoever comes second leaves it to the first.
func ExampleClient_TryLock() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres:///reports")
	if err != nil {
		log.Fatal(err)
	}
	client := pglock.New(pool)
	defer client.Close(ctx)

	lock, err := client.TryLock(ctx, pglock.KeyOf("report/daily"))
	if errors.Is(err, pglock.ErrLocked) {
		fmt.Println("somebody else is at it")
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	defer lock.Release(ctx)
	fmt.Println("at it")
}

// What has no row yet can be locked all the same: the name is created by one
// caller only, and the lock ends with the transaction.
func ExampleLockTx() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres:///bank")
	if err != nil {
		log.Fatal(err)
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := pglock.LockTx(ctx, tx, pglock.KeyOf("accounts/42"), pglock.KeyOf("accounts/43")); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `INSERT INTO accounts (id) SELECT n FROM unnest('{42,43}'::int[]) n
			WHERE NOT EXISTS (SELECT FROM accounts WHERE id = n)`)
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
}

// The key of a name, for pg_locks and for programs in other languages.
func ExampleKeyOf() {
	key := pglock.KeyOf("accounts/42")
	fmt.Println(key, key.Int64())
	// Output: accounts/42 -4014232167637206034
}
