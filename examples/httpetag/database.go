package main

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgserver"
)

// withDatabase runs fn on a pool whose search_path is a new schema with the
// table in it, and removes what it made, whatever fn returned.
func withDatabase(ctx context.Context, dsn string, fn func(*pgxpool.Pool) error) (err error) {
	if dsn == "" {
		server, startErr := pgserver.Start(ctx)
		if startErr != nil {
			return startErr
		}
		defer func() { err = errors.Join(err, server.Stop()) }()
		dsn = server.DSN()
	}
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return err
	}
	schema := "httpetag_" + strings.ToLower(rand.Text()[:8])
	config.ConnConfig.RuntimeParams["search_path"] = schema
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	name := pgx.Identifier{schema}.Sanitize()
	if _, err := pool.Exec(ctx, "CREATE SCHEMA "+name); err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, dropErr := pool.Exec(ctx, "DROP SCHEMA "+name+" CASCADE")
		err = errors.Join(err, dropErr)
	}()
	if _, err := pool.Exec(ctx, createPages); err != nil {
		return err
	}
	return fn(pool)
}
