package readme

import (
	"context"
	"fmt"
	"log"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/migrations"
)

// At the start of a program: any number of its processes may do this at once.
func Example_migrate() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres:///bank")
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()

	if err := migrations.Up(ctx, pool); err != nil {
		log.Fatal(err)
	}
	states, err := migrations.Status(ctx, pool)
	if err != nil {
		log.Fatal(err)
	}
	for _, state := range states {
		fmt.Println(state)
	}
}
