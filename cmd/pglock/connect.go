package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/pglock"
)

// answerBound is how long a server may take to be reached and to answer what
// waits for nobody.
const answerBound = 2 * time.Second

// config is how to connect. What is missing in the DSN comes from PGHOST and so
// on.
func (a *app) config() (*pgxpool.Config, error) {
	config, err := pgxpool.ParseConfig(cmp.Or(a.dsn, os.Getenv("DATABASE_URL")))
	if err != nil {
		return nil, usagef("--dsn, DATABASE_URL or PG…: give postgres://user:password@host:5432/database: %w", err)
	}
	if config.ConnConfig.ConnectTimeout == 0 {
		config.ConnConfig.ConnectTimeout = answerBound
	}
	if config.ConnConfig.RuntimeParams["application_name"] == "" {
		config.ConnConfig.RuntimeParams["application_name"] = "pglock"
	}
	return config, nil
}

// connect returns a pool whose server has answered, to be closed by the caller.
func (a *app) connect(ctx context.Context) (*pgxpool.Pool, error) {
	config, err := a.config()
	if err != nil {
		return nil, err
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	// A host may stand there several times, once for each way to encrypt.
	hosts := map[string]bool{config.ConnConfig.Host: true}
	for _, other := range config.ConnConfig.Fallbacks {
		hosts[other.Host] = true
	}
	bound := config.ConnConfig.ConnectTimeout * time.Duration(len(hosts))
	within, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	if err := pool.Ping(within); err != nil {
		pool.Close()
		switch {
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		case errors.Is(err, context.DeadlineExceeded): // of the bound or of one attempt, which may be as long
			err = fmt.Errorf("no answer within %v, connect_timeout in the DSN gives it longer: %w", bound, err)
		}
		return nil, &unreachableError{err}
	}
	return pool, nil
}

// client returns a client whose server has answered; done closes it and what it
// may hold.
func (a *app) client(ctx context.Context, opts ...pglock.Option) (client *pglock.Client, done func(), err error) {
	pool, err := a.connect(ctx)
	if err != nil {
		return nil, nil, err
	}
	client = pglock.New(pool, opts...)
	pool.Close() // the client's connections are its own
	return client, func() {
		_ = client.Close(context.WithoutCancel(ctx)) // verbs release what they hold, and look at that error
	}, nil
}

// ask calls a function that waits for nobody, so that a server which doesn't
// answer is one that can't be reached.
func ask(ctx context.Context, question func(context.Context) error) error {
	within, cancel := context.WithTimeout(ctx, answerBound)
	defer cancel()
	err := question(within)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return errors.Join(context.Cause(ctx), err)
	case within.Err() != nil:
		return &unreachableError{fmt.Errorf("no answer within %v: %w", answerBound, err)}
	}
	return err
}
