// Command locks uses pglock and optimistic on the database that its argument
// names.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/optimistic"
	"github.com/pawl-go/pawl/pglock"
)

type account struct{ ID, Balance int64 }

func main() {
	balance, err := run(context.Background(), os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("balance", balance)
}

func run(ctx context.Context, dsn string) (balance int64, err error) {
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		return 0, err
	}
	defer pool.Close()
	_, err = pool.Exec(ctx, `CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL, version bigint NOT NULL DEFAULT 1)`)
	if err != nil {
		return 0, err
	}
	accounts := optimistic.NewTable[account]("accounts")
	if _, _, err := accounts.Insert(ctx, pool, 42, account{Balance: 100}); err != nil {
		return 0, err
	}

	client := pglock.New(pool)
	defer client.Close(ctx)
	err = client.WithLock(ctx, pglock.KeyOf("accounts/42"), func(ctx context.Context) error {
		return client.WithLease(ctx, "accounts/42", 10*time.Second, func(ctx context.Context, lease *pglock.Lease) error {
			return lease.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
				if err := pglock.Fence(ctx, tx, "accounts/42", lease.Token()); err != nil {
					return err
				}
				_, err := pglock.LockRow(ctx, tx, pglock.ForNoKeyUpdate, pgx.RowTo[int64], `SELECT balance FROM accounts WHERE id = 42`)
				if err != nil {
					return err
				}
				_, err = accounts.Update(ctx, tx, 42, func(a account) (account, error) {
					a.Balance -= 58
					return a, nil
				})
				return err
			})
		})
	})
	if err != nil {
		return 0, err
	}
	row, err := accounts.Get(ctx, pool, 42)
	return row.Value.Balance, err
}
