package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// advisory is PostgreSQL's own session lock, by hand. It has no time limit and
// no token, writes nothing, and keeps a connection for as long as it is held.
var advisory = contender{
	name:  "advisory",
	about: "pg_advisory_lock by hand over pgxpool: in memory, no time limit, no token, a connection for each lock",
	in:    []string{"pairs", "losing", "handoff", "takeover"},
	start: func(ctx context.Context, h *host) (*server, error) { return h.database(ctx, "advisory") },
	dial: func(ctx context.Context, address string, goroutines int, _ time.Duration) (client, error) {
		pool, err := poolOf(ctx, address, goroutines)
		if err != nil {
			return nil, err
		}
		return &advisoryClient{pool}, nil
	},
}

type advisoryClient struct{ pool *pgxpool.Pool }

func (c *advisoryClient) acquire(ctx context.Context, name string) (func(context.Context) error, error) {
	conn, err := c.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Exec(ctx, `SELECT pg_advisory_lock(hashtextextended($1, 0))`, name); err != nil {
		// It may be held nevertheless: only the session's end is sure.
		_ = conn.Conn().Close(context.WithoutCancel(ctx))
		conn.Release()
		return nil, err
	}
	return func(ctx context.Context) error {
		defer conn.Release()
		var freed bool
		err := conn.QueryRow(ctx, `SELECT pg_advisory_unlock(hashtextextended($1, 0))`, name).Scan(&freed)
		if err == nil && !freed {
			err = fmt.Errorf("%q was not locked", name)
		}
		return err
	}, nil
}

func (c *advisoryClient) try(ctx context.Context, name string) (won bool, err error) {
	err = c.pool.QueryRow(ctx, `SELECT pg_try_advisory_lock(hashtextextended($1, 0))`, name).Scan(&won)
	return won, err
}

func (c *advisoryClient) close() { c.pool.Close() }
