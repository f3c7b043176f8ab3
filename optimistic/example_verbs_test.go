package optimistic_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pawl-go/pawl/optimistic"
)

// A new row begins at a version that no earlier row with its key can have had.
func ExampleTable_Insert() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()

	row, created, err := accounts.Insert(ctx, pool, 3, account{Balance: 10})
	fmt.Println(row.Value.Balance, created, err)
	row, created, err = accounts.Insert(ctx, pool, 3, account{Balance: 99})
	fmt.Println(row.Value.Balance, created, err)
	// Output:
	// 10 true <nil>
	// 10 false <nil>
}

// Delete is for the version that was seen, like CompareAndSet.
func ExampleTable_Delete() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()

	row, err := accounts.Get(ctx, pool, 1)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := accounts.Touch(ctx, pool, 1, row.Version); err != nil {
		log.Fatal(err)
	}
	fmt.Println(errors.Is(accounts.Delete(ctx, pool, 1, row.Version), optimistic.ErrConflict))
	fmt.Println(accounts.Delete(ctx, pool, 1, row.Version+1))
	_, err = accounts.Get(ctx, pool, 1)
	fmt.Println(errors.Is(err, optimistic.ErrNotFound))
	// Output:
	// true
	// <nil>
	// true
}

// The version of an answer is its ETag, and comes back as If-Match.
func ExampleIfMatch() {
	seen := http.Header{"If-Match": {optimistic.ETag(7)}}
	match, err := optimistic.IfMatch(seen)
	if err != nil {
		log.Fatal(err)
	}
	version, err := match.Version(nil) // asks for the current one only for If-Match: *
	fmt.Println(version, err)
	fmt.Println(optimistic.Status(optimistic.ErrConflict))
	// Output:
	// 7 <nil>
	// 412
}

// With database/sql, on pgx's driver.
func ExampleSQL() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()

	row, err := accounts.Update(ctx, optimistic.SQL(db), 1, func(a account) (account, error) {
		a.Balance += 5
		return a, nil
	})
	fmt.Println(row.Value.Balance, err)
	// Output: 105 <nil>
}
