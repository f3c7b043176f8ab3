// Command schema applies the migrations to the database that its argument names
// and takes them back.
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/migrations"
)

func main() {
	if err := run(context.Background(), os.Args[1]); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, dsn string) error {
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		return err
	}
	defer pool.Close()
	for _, step := range []func(context.Context, *pgxpool.Pool) error{migrations.Up, migrations.Down} {
		if err := step(ctx, pool); err != nil {
			return err
		}
		states, err := migrations.Status(ctx, pool)
		if err != nil {
			return err
		}
		applied := 0
		for _, state := range states {
			if !state.AppliedAt.IsZero() {
				applied++
			}
		}
		fmt.Println("all applied", applied == len(states), "none applied", applied == 0)
	}
	return nil
}
