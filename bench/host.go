package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgserver"
)

// host is what the servers of a run share: a folder, and one PostgreSQL, which
// the first to want it starts.
type host struct {
	dir      string
	postgres *pgserver.Server
}

func newHost() (*host, error) {
	dir, err := os.MkdirTemp("", "pawl-bench-")
	return &host{dir: dir}, err
}

func (h *host) close() error {
	err := os.RemoveAll(h.dir)
	if h.postgres != nil {
		err = errors.Join(err, h.postgres.Stop())
	}
	return err
}

// folder makes an empty one.
func (h *host) folder(name string) (string, error) {
	dir := filepath.Join(h.dir, name)
	return dir, os.Mkdir(dir, 0o700)
}

// connections is max_connections of the PostgreSQL: its default of 100 is too
// few for 128 goroutines with one each.
const connections = 400

// database makes a database in the PostgreSQL, which runs with its defaults,
// fsync and synchronous_commit included. The extension that counts statements
// counts only those of connections that ask for it.
func (h *host) database(ctx context.Context, name string) (*server, error) {
	if h.postgres == nil {
		var err error
		h.postgres, err = pgserver.Start(ctx,
			pgserver.With("max_connections", strconv.Itoa(connections)),
			pgserver.With("shared_preload_libraries", "pg_stat_statements"),
			pgserver.With("pg_stat_statements.track", "none"))
		if err != nil {
			return nil, err
		}
	}
	pid, err := h.postmaster()
	if err != nil {
		return nil, err
	}
	version, err := h.create(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("create database %s: %w", name, err)
	}
	dsn, err := url.Parse(h.postgres.DSN())
	if err != nil {
		return nil, err
	}
	dsn.Path = "/" + name
	counted := *dsn
	query := dsn.Query()
	query.Set("pg_stat_statements.track", "top")
	counted.RawQuery = query.Encode()
	return &server{
		address: dsn.String(), counted: counted.String(), version: "PostgreSQL " + version, pid: pid,
		stop: func() error { return nil },
		statements: func(ctx context.Context) (n int64, err error) {
			conn, err := pgx.Connect(ctx, h.postgres.DSN())
			if err != nil {
				return 0, err
			}
			defer conn.Close(context.WithoutCancel(ctx))
			err = conn.QueryRow(ctx, `SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements s
				JOIN pg_database d ON d.oid = s.dbid WHERE d.datname = $1`, name).Scan(&n)
			return n, err
		},
	}, nil
}

func (h *host) create(ctx context.Context, name string) (version string, err error) {
	conn, err := pgx.Connect(ctx, h.postgres.DSN())
	if err != nil {
		return "", err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for _, sql := range []string{"CREATE EXTENSION IF NOT EXISTS pg_stat_statements", "CREATE DATABASE " + name} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return "", err
		}
	}
	return version, conn.QueryRow(ctx, "SHOW server_version").Scan(&version)
}

func (h *host) postmaster() (int, error) {
	if h.postgres.DataDir() == "" {
		return 0, nil // in a container: its processes are not ours to read
	}
	text, err := os.ReadFile(filepath.Join(h.postgres.DataDir(), "postmaster.pid"))
	if err != nil {
		return 0, err
	}
	first, _, _ := strings.Cut(string(text), "\n")
	return strconv.Atoi(first)
}
