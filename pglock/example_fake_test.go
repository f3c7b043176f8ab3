package pglock_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/pglock"
)

// holding is what export needs of its lease, and no more. *pglock.Lease is one,
// and so is what a test puts in its place.
type holding interface {
	Token() pglock.Token
	Context() context.Context
	InTx(context.Context, *pgxpool.Pool, func(context.Context, pgx.Tx) error) error
}

var _ holding = (*pglock.Lease)(nil)

// export puts parts into a store that refuses low tokens, and notes in the
// database that it is done.
func export(ctx context.Context, pool *pgxpool.Pool, lease holding, parts []string, store func(pglock.Token, string) error) error {
	for _, part := range parts {
		if err := lease.Context().Err(); err != nil {
			return context.Cause(lease.Context())
		}
		if err := store(lease.Token(), part); err != nil {
			return err
		}
	}
	return lease.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO exported (parts) VALUES ($1)`, len(parts))
		return err
	})
}

// fakeLease is held for as long as the test likes. What a function writes in InTx
// is for a test with a database, and that takes a real lease.
type fakeLease struct {
	token pglock.Token
	ctx   context.Context
}

func (f fakeLease) Token() pglock.Token      { return f.token }
func (f fakeLease) Context() context.Context { return f.ctx }
func (f fakeLease) InTx(context.Context, *pgxpool.Pool, func(context.Context, pgx.Tx) error) error {
	return context.Cause(f.ctx)
}

// A unit test needs no database: the function takes an interface of the methods
// that it calls, and the test loses the lease at the line where it matters.
func ExampleLease_fake() {
	ctx, lose := context.WithCancelCause(context.Background())
	lease := fakeLease{token: 17, ctx: ctx}

	err := export(context.Background(), nil, lease, []string{"a", "b", "c"}, func(token pglock.Token, part string) error {
		fmt.Println("part", part, "with token", token)
		if part == "b" {
			lose(&pglock.LostError{Name: "reports/daily", Token: token, Cause: pglock.Expired})
		}
		return nil
	})
	fmt.Println(errors.Is(err, pglock.ErrLost))
	// Output:
	// part a with token 17
	// part b with token 17
	// true
}
