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

// Its key makes runs the record of what was done. No key on reports hides that
// one was made twice.
const createTables = `
	CREATE TABLE runs (job text, night date, PRIMARY KEY (job, night));
	CREATE TABLE reports (night date NOT NULL)`

// withDatabase runs fn on a new schema with the tables in it, and removes what
// it made, whatever fn returned.
func withDatabase(ctx context.Context, dsn string, fn func(dsn, schema string, pool *pgxpool.Pool) error) (err error) {
	if dsn == "" {
		server, startErr := pgserver.Start(ctx)
		if startErr != nil {
			return startErr
		}
		defer func() { err = errors.Join(err, server.Stop()) }()
		dsn = server.DSN()
	}
	schema := "onlyonce_" + strings.ToLower(rand.Text()[:8])
	pool, err := connect(ctx, dsn, schema)
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
	if _, err := pool.Exec(ctx, createTables); err != nil {
		return err
	}
	return fn(dsn, schema, pool)
}

// connect returns a pool whose search_path is the schema.
func connect(ctx context.Context, dsn, schema string) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	config.MaxConns = 2
	config.ConnConfig.RuntimeParams["search_path"] = schema
	return pgxpool.NewWithConfig(ctx, config)
}
