package migrations_test

import (
	"context"
	"fmt"
	"log"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
)

// exampleT is a testing.TB for Examples, which get none.
type exampleT struct {
	testing.TB
	cleanup func()
}

func (*exampleT) Name() string              { return "Example" }
func (*exampleT) Helper()                   {}
func (*exampleT) Failed() bool              { return false }
func (*exampleT) Context() context.Context  { return context.Background() }
func (*exampleT) Error(args ...any)         { log.Print(args...) }
func (*exampleT) Errorf(f string, a ...any) { log.Printf(f, a...) }
func (*exampleT) Fatal(args ...any)         { log.Panic(args...) }
func (e *exampleT) Cleanup(f func())        { e.cleanup = f }

// At the start of a program: any number of processes may do it at once. Down
// takes everything back, and is for tests and for a database that is given up.
func ExampleUp() {
	ctx := context.Background()
	t := &exampleT{}
	pool, err := pgxpool.New(ctx, pgtest.EmptyDSN(t))
	if err != nil {
		log.Fatal(err)
	}
	defer func() { pool.Close(); t.cleanup() }()

	pending := func() (n int) {
		states, err := migrations.Status(ctx, pool)
		if err != nil {
			log.Fatal(err)
		}
		for _, state := range states {
			if state.AppliedAt.IsZero() {
				n++
			}
		}
		return n
	}
	fmt.Println(pending() > 0)
	if err := migrations.Up(ctx, pool); err != nil {
		log.Fatal(err)
	}
	fmt.Println(pending())
	if err := migrations.Down(ctx, pool); err != nil {
		log.Fatal(err)
	}
	fmt.Println(pending() > 0)
	// Output:
	// true
	// 0
	// true
}
