package pglockotel_test

import (
	"context"
	"log"
	"log/slog"
	"strings"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/pglock"
	"github.com/pawl-go/pawl/pglock/pglockotel"
)

// Metrics and spans go to the providers that the program has set with
// otel.SetMeterProvider and otel.SetTracerProvider.
func ExampleNew() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres:///bank")
	if err != nil {
		log.Fatal(err)
	}
	observer, err := pglockotel.New(pglockotel.WithClass(func(name string) string {
		class, _, _ := strings.Cut(name, "/") // accounts/42: accounts
		return class
	}))
	if err != nil {
		log.Fatal(err)
	}
	client := pglock.New(pool, pglock.WithObserver(observer), pglock.WithObserver(pglock.LogTo(slog.Default())))
	defer client.Close(ctx)
}
