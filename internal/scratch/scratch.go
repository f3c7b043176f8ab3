// Package scratch gives an example a database to work in, and processes of its
// own beside it, and takes back what it made in the database, whatever came of it.
package scratch

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgserver"
	"github.com/pawl-go/pawl/migrations"
)

// Schema is a schema of an example's own. Connect leads other processes there.
type Schema struct {
	DSN  string
	Name string
}

// In runs fn on a new schema with the tables in it, in the database that dsn
// names; for an empty dsn a server is started for it. pool's search_path is the
// schema. The schema's name begins with prefix.
func In(ctx context.Context, dsn, prefix, tables string, fn func(s Schema, pool *pgxpool.Pool) error) (err error) {
	if dsn == "" {
		server, startErr := pgserver.Start(ctx)
		if startErr != nil {
			return startErr
		}
		defer func() { err = errors.Join(err, server.Stop()) }()
		dsn = server.DSN()
	}
	s := Schema{DSN: dsn, Name: prefix + "_" + strings.ToLower(rand.Text()[:8])}
	pool, err := s.Connect(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	name := pgx.Identifier{s.Name}.Sanitize()
	if _, err := pool.Exec(ctx, "CREATE SCHEMA "+name); err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		_, dropErr := pool.Exec(ctx, "DROP SCHEMA "+name+" CASCADE")
		err = errors.Join(err, dropErr)
	}()
	if _, err := pool.Exec(ctx, tables); err != nil {
		return err
	}
	return fn(s, pool)
}

// Connect returns a pool whose search_path is the schema.
func (s Schema) Connect(ctx context.Context) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(s.DSN)
	if err != nil {
		return nil, err
	}
	config.ConnConfig.RuntimeParams["search_path"] = s.Name
	return pgxpool.NewWithConfig(ctx, config)
}

// Server runs fn on a PostgreSQL that has the migrations and ends with it.
func Server(ctx context.Context, fn func(dsn string) error) (err error) {
	server, err := pgserver.Start(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	pool, err := pgxpool.New(ctx, server.DSN())
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := migrations.Up(ctx, pool); err != nil {
		return err
	}
	return fn(server.DSN())
}
