package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// floor is the least that a lease with a token costs on PostgreSQL: two
// statements by hand, no queue, no renewal, no repeat of what was lost. It never
// waits, and so takes part only where nobody has to.
var floor = contender{
	name:  "floor",
	about: "two hand-written statements over pgxpool, prepared, a connection for each goroutine; PostgreSQL as for pawl",
	in:    []string{"pairs", "losing"},
	start: func(ctx context.Context, h *host) (*server, error) {
		s, err := h.database(ctx, "floor")
		if err != nil {
			return nil, err
		}
		conn, err := pgx.Connect(ctx, s.address)
		if err != nil {
			return nil, err
		}
		defer conn.Close(context.WithoutCancel(ctx))
		_, err = conn.Exec(ctx, `
			CREATE TABLE leases (
				name text COLLATE "C" PRIMARY KEY, token bigserial, holder text,
				expires_at timestamptz NOT NULL DEFAULT '-infinity'
			) WITH (fillfactor = 50)`)
		return s, err
	},
	dial: func(ctx context.Context, address string, goroutines int, ttl time.Duration) (client, error) {
		pool, err := poolOf(ctx, address, goroutines)
		if err != nil {
			return nil, err
		}
		return &floorClient{pool, ttl}, nil
	},
}

type floorClient struct {
	pool *pgxpool.Pool
	ttl  time.Duration
}

func (c *floorClient) acquire(ctx context.Context, name string) (func(context.Context) error, error) {
	token, err := c.take(ctx, name)
	if errors.Is(err, pgx.ErrNoRows) {
		if _, err := c.pool.Exec(ctx, `INSERT INTO leases (name, token) VALUES ($1, 0) ON CONFLICT DO NOTHING`, name); err != nil {
			return nil, err
		}
		token, err = c.take(ctx, name)
	}
	if err != nil {
		return nil, fmt.Errorf("take %q: %w", name, err)
	}
	return func(ctx context.Context) error {
		_, err := c.pool.Exec(ctx, `UPDATE leases SET expires_at = '-infinity' WHERE name = $1 AND token = $2`, name, token)
		return err
	}, nil
}

func (c *floorClient) take(ctx context.Context, name string) (token int64, err error) {
	err = c.pool.QueryRow(ctx, `UPDATE leases
		SET token = nextval('leases_token_seq'), holder = $2, expires_at = clock_timestamp() + $3::interval
		WHERE name = $1 AND expires_at <= clock_timestamp() RETURNING token`, name, "bench", c.ttl).Scan(&token)
	return token, err
}

func (c *floorClient) try(ctx context.Context, name string) (bool, error) {
	_, err := c.take(ctx, name)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}

func (c *floorClient) close() { c.pool.Close() }
