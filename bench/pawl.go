package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/migrations"
	"github.com/pawl-go/pawl/pglock"
)

var pawl = contender{
	name:  "pawl",
	about: "pglock.Client leases; PostgreSQL with fsync and synchronous_commit",
	in:    []string{"pairs", "losing", "handoff", "holding", "takeover"},
	start: func(ctx context.Context, h *host) (*server, error) { return pawlIn(ctx, h, "pawl") },
	dial: func(ctx context.Context, address string, goroutines int, ttl time.Duration) (client, error) {
		pool, err := poolOf(ctx, address, goroutines)
		if err != nil {
			return nil, err
		}
		return &pawlClient{pool, pglock.New(pool), ttl}, nil
	},
}

// pawlIn makes a database with the migrations.
func pawlIn(ctx context.Context, h *host, database string) (*server, error) {
	s, err := h.database(ctx, database)
	if err != nil {
		return nil, err
	}
	pool, err := pgxpool.New(ctx, s.address)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	return s, migrations.Up(ctx, pool)
}

type pawlClient struct {
	pool *pgxpool.Pool
	*pglock.Client
	ttl time.Duration
}

func (c *pawlClient) acquire(ctx context.Context, name string) (func(context.Context) error, error) {
	lease, err := c.Acquire(ctx, name, c.ttl)
	if err != nil {
		return nil, err
	}
	return lease.Release, nil
}

func (c *pawlClient) try(ctx context.Context, name string) (bool, error) {
	_, err := c.TryAcquire(ctx, name, c.ttl)
	if errors.Is(err, pglock.ErrLocked) {
		return false, nil
	}
	return err == nil, err
}

func (c *pawlClient) remaining(ctx context.Context, name string) (time.Duration, error) {
	infos, err := c.Leases(ctx)
	if err != nil {
		return 0, err
	}
	for _, info := range infos {
		if info.Name == name {
			return info.Remaining, nil
		}
	}
	return 0, fmt.Errorf("nobody holds %q", name)
}

func (c *pawlClient) close() {
	ctx, cancel := context.WithTimeout(context.Background(), goodbye)
	defer cancel()
	_ = c.Client.Close(ctx)
	c.pool.Close()
}

// goodbye is how long a client may take to close.
const goodbye = 10 * time.Second

// poolOf is a pool with a connection for each goroutine.
func poolOf(ctx context.Context, address string, goroutines int) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(address)
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(goroutines)
	return pgxpool.NewWithConfig(ctx, config)
}
