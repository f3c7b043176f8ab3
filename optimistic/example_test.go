package optimistic_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/optimistic"
)

// examplePool is a pool on a database with two accounts, and what ends it.
func examplePool() (*pgxpool.Pool, func()) {
	t, done := pgtest.Example()
	return newPool(t, createAccounts), done
}

var errInsufficient = errors.New("insufficient funds")

// The program decides: read, compute, write, and again if somebody was faster.
func ExampleTable_Update() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()

	type Account struct {
		ID      int64
		Balance int64
	}
	accounts := optimistic.NewTable[Account]("accounts")

	withdraw := func(amount int64) func(Account) (Account, error) {
		return func(a Account) (Account, error) {
			if a.Balance < amount {
				return a, errInsufficient
			}
			a.Balance -= amount
			return a, nil
		}
	}
	row, err := accounts.Update(ctx, pool, 1, withdraw(70))
	fmt.Println(row.Value.Balance, err)
	_, err = accounts.Update(ctx, pool, 1, withdraw(70))
	fmt.Println(err)
	// Output:
	// 30 <nil>
	// insufficient funds
}

// A person decides: two load a form, the second to save is shown what the first
// one wrote.
func ExampleTable_CompareAndSet() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()

	type Account struct {
		ID      int64
		Balance int64
	}
	accounts := optimistic.NewTable[Account]("accounts")

	form, err := accounts.Get(ctx, pool, 1)
	if err != nil {
		log.Print(err)
		return
	}
	ann, err := accounts.CompareAndSet(ctx, pool, 1, form.Version, Account{Balance: 150})
	fmt.Println("Ann saved version", ann.Version, err)

	current, err := accounts.CompareAndSet(ctx, pool, 1, form.Version, Account{Balance: 90})
	var conflict *optimistic.ConflictError
	if errors.As(err, &conflict) {
		fmt.Printf("Bob saw version %d, it is %d by now, with a balance of %d\n",
			conflict.Expected, conflict.Actual, current.Value.Balance)
	}
	// Output:
	// Ann saved version 2 <nil>
	// Bob saw version 1, it is 2 by now, with a balance of 150
}

// Additions commute: whoever comes first, the sum is the same. Nothing is read,
// nothing compared, nothing tried again. The version counts for those who do.
func Example_counter() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()

	for range 3 {
		_, err := pool.Exec(ctx, `UPDATE accounts SET balance = balance + 5, version = version + 1 WHERE id = 1`)
		if err != nil {
			log.Print(err)
			return
		}
	}
	row, err := accounts.Get(ctx, pool, 1)
	fmt.Println(row.Value.Balance, row.Version, err)
	// Output: 115 4 <nil>
}

// The lines of an order are guarded by the order's version: two who saw the same
// order and change different lines meet at its root.
func ExampleTable_Touch() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()
	_, err := pool.Exec(ctx, `
		CREATE TABLE orders (id bigint PRIMARY KEY, version bigint NOT NULL);
		CREATE TABLE lines (order_id bigint REFERENCES orders, line int, amount int NOT NULL, PRIMARY KEY (order_id, line));
		INSERT INTO orders VALUES (7, 3); INSERT INTO lines VALUES (7, 1, 1), (7, 2, 1)`)
	if err != nil {
		log.Print(err)
		return
	}

	type Order struct{ ID int64 }
	orders := optimistic.NewTable[Order]("orders")

	setAmount := func(order, version int64, line, amount int) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := orders.Touch(ctx, tx, order, version); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `UPDATE lines SET amount = $3 WHERE order_id = $1 AND line = $2`, order, line, amount)
			return err
		})
	}
	fmt.Println(setAmount(7, 3, 1, 2))
	fmt.Println(setAmount(7, 3, 2, 5))
	// Output:
	// <nil>
	// touch orders, key 7: optimistic: row has changed: it is at version 4, expected 3
}

// SQL of your own, and no row of it passes unnoticed.
func ExampleExec() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()

	const set = `UPDATE accounts SET balance = $1, version = version + 1 WHERE id = $2 AND version = $3`
	fmt.Println(optimistic.Exec(ctx, pool, set, 50, 1, 1))
	err := optimistic.Exec(ctx, pool, set, 60, 1, 1)
	fmt.Println(errors.Is(err, optimistic.ErrConflict))
	// Output:
	// <nil>
	// true
}

// A rule over several rows, which no version of one of them can guard.
func ExampleRunInTx() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()

	err := optimistic.RunInTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		var total int64
		if err := tx.QueryRow(ctx, `SELECT sum(balance) FROM accounts`).Scan(&total); err != nil {
			return err
		}
		if total < 150 {
			return errInsufficient
		}
		_, err := tx.Exec(ctx, `UPDATE accounts SET balance = balance - 150, version = version + 1 WHERE id = 2`)
		return err
	})
	fmt.Println(err)
	// Output: <nil>
}
