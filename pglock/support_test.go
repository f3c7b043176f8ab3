package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgserver"
	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
	"github.com/pawl-go/pawl/pglock"
)

// limit is long enough for the slowest machine: a test that reaches it hangs.
const limit = time.Minute

// newClient returns a client on pool that is closed when the test ends.
func newClient(t testing.TB, pool *pgxpool.Pool, opts ...pglock.Option) *pglock.Client {
	t.Helper()
	c := pglock.New(pool, opts...)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		if err := c.Close(ctx); err != nil && !errors.Is(err, pglock.ErrLost) {
			t.Errorf("close: %v", err)
		}
	})
	return c
}

// durable returns a database, with the migrations, on a server that is as careful
// with its disk as one in use is: those of other tests are not.
func durable(b *testing.B, opts ...pgserver.Option) *pgxpool.Pool {
	b.Helper()
	server, err := pgserver.Start(b.Context(), append(opts, pgserver.With("shared_buffers", "128MB"), pgserver.With("jit", "off"))...)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := server.Stop(); err != nil {
			b.Error(err)
		}
	})
	pool := pgtest.PoolOn(b, server.DSN())
	if err := migrations.Up(b.Context(), pool); err != nil {
		b.Fatal(err)
	}
	return pool
}

// newConn returns a connection of the test's own, by the pool's configuration.
func newConn(t testing.TB, pool *pgxpool.Pool) *pgx.Conn {
	t.Helper()
	conn, err := pgx.ConnectConfig(t.Context(), pool.Config().ConnConfig.Copy())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// one returns the single value that a query answers.
func one[T any](t testing.TB, db querier, sql string, args ...any) T {
	t.Helper()
	rows, err := db.Query(context.Background(), sql, args...)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

type executor interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

func exec(t testing.TB, db executor, sql string, args ...any) {
	t.Helper()
	if _, err := db.Exec(context.Background(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// until waits for a condition that another session brings about. It asks the
// server again and again, and fails the test when the answer never comes.
func until(t testing.TB, db querier, what, sql string, args ...any) {
	t.Helper()
	for end := time.Now().Add(limit); !one[bool](t, db, sql, args...); {
		if time.Now().After(end) {
			t.Fatalf("never saw %s", what)
		}
	}
}

// blockedBy waits until some session waits for a lock that pid holds.
func blockedBy(t testing.TB, db querier, pid uint32) {
	t.Helper()
	until(t, db, fmt.Sprintf("a session wait for backend %d", pid),
		`SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid)))`, int32(pid))
}

// expire makes a lease's time run out now. The keeper of its client, which
// asks every third of the TTL, finds that out only later.
func expire(t testing.TB, db executor, name string) {
	t.Helper()
	exec(t, db, `UPDATE pglock.leases SET expires_at = clock_timestamp() WHERE name = $1`, name)
}

func sqlState(err error) string {
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pg.Code
	}
	return ""
}

func acquire(t testing.TB, c *pglock.Client, name string, ttl time.Duration) *pglock.Lease {
	t.Helper()
	l, err := c.TryAcquire(t.Context(), name, ttl)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// inTx runs fn in a transaction at a level and rolls back.
func inTx(t testing.TB, db interface {
	BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error)
}, level pgx.TxIsoLevel, fn func(pgx.Tx)) {
	t.Helper()
	tx, err := db.BeginTx(context.Background(), pgx.TxOptions{IsoLevel: level})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	fn(tx)
}

var levels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// scale returns full, or a smaller number with -short.
func scale(full, short int) int {
	if testing.Short() {
		return short
	}
	return full
}
