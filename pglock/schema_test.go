package pglock_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
	"github.com/pawl-go/pawl/pglock"
)

// A database that lacks the schema, or has an older one, is told apart from a
// lease that somebody has.
func TestNoSchema(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		what  string
		dsn   func(testing.TB) string
		spoil string
		want  []string // in the error
	}{
		{"no schema", pgtest.EmptyDSN, `SELECT`, []string{"pglock migrate up"}},
		{"an empty schema", pgtest.EmptyDSN, `CREATE SCHEMA pglock`, []string{"pglock migrate up"}},
		{"an older version", pgtest.DSN, `DELETE FROM pglock.goose_db_version WHERE version_id > 1`,
			[]string{"pglock migrate up", "at version 1, and this package needs "}},
		{"a newer version", pgtest.DSN, `INSERT INTO pglock.goose_db_version (version_id, is_applied) VALUES (9000, true)`, nil},
	} {
		t.Run(tt.what, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.PoolOn(t, tt.dsn(t))
			exec(t, pool, tt.spoil)
			c := newClient(t, pool)
			_, tried := c.TryAcquire(t.Context(), "n", time.Minute)
			_, again := c.TryAcquire(t.Context(), "n2", time.Minute)
			if tt.want == nil {
				if tried != nil || again != nil {
					t.Errorf("refused: %v, %v", tried, again)
				}
				return
			}
			for _, err := range []error{tried, again} {
				if !errors.Is(err, pglock.ErrNoSchema) || errors.Is(err, pglock.ErrLocked) {
					t.Fatalf("TryAcquire says %v, want ErrNoSchema", err)
				}
				for _, part := range tt.want {
					if !strings.Contains(err.Error(), part) {
						t.Errorf("it says %q, which lacks %q", err, part)
					}
				}
			}
		})
	}
	t.Run("Fence", func(t *testing.T) {
		t.Parallel()
		pool := pgtest.PoolOn(t, pgtest.EmptyDSN(t))
		inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
			if err := pglock.Fence(t.Context(), tx, "r", 1); !errors.Is(err, pglock.ErrNoSchema) {
				t.Errorf("Fence says %v, want ErrNoSchema", err)
			}
		})
	})
	// Functions that run in the caller's transaction ask for no version: what an
	// older schema lacks is named.
	t.Run("an older schema, in a transaction", func(t *testing.T) {
		t.Parallel()
		pool := pgtest.Pool(t)
		l := acquire(t, newClient(t, pool), "n", time.Minute)
		for name, call := range map[string]func(pgx.Tx) error{
			"fence":   func(tx pgx.Tx) error { return pglock.Fence(t.Context(), tx, "r", 1) },
			"present": func(tx pgx.Tx) error { return pglock.Present(t.Context(), tx, "n", l.Token()) },
			"guard":   func(tx pgx.Tx) error { return l.Guard(t.Context(), tx) },
		} {
			inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
				if err := call(tx); err != nil {
					t.Errorf("%s: %v", name, err)
				}
				exec(t, tx, `DROP FUNCTION pglock.`+name)
				if err := call(tx); !errors.Is(err, pglock.ErrNoSchema) || errors.Is(err, pglock.ErrLost) || !strings.Contains(err.Error(), name) {
					t.Errorf("without the function %s: %v, want ErrNoSchema", name, err)
				}
			})
		}
	})
	// The client that was refused works as soon as the schema is there.
	t.Run("applied later", func(t *testing.T) {
		t.Parallel()
		pool := pgtest.PoolOn(t, pgtest.EmptyDSN(t))
		c := newClient(t, pool)
		if _, err := c.TryAcquire(t.Context(), "n", time.Minute); !errors.Is(err, pglock.ErrNoSchema) {
			t.Errorf("TryAcquire says %v, want ErrNoSchema", err)
		}
		if err := migrations.Up(t.Context(), pool); err != nil {
			t.Fatal(err)
		}
		acquire(t, c, "n", time.Minute)
	})
}

// asRole returns a pool whose sessions are those of a new role with the given
// grants; ROLE stands for its name.
func asRole(t *testing.T, owner *pgxpool.Pool, grants string) *pgxpool.Pool {
	t.Helper()
	role := "app_" + one[string](t, owner, `SELECT substr(md5(random()::text), 1, 12)`)
	exec(t, owner, `CREATE ROLE `+role)
	t.Cleanup(func() { exec(t, owner, `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	exec(t, owner, strings.ReplaceAll(grants, "ROLE", role))
	config := owner.Config()
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SET SESSION AUTHORIZATION `+role)
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// What a role lacks is named by the statement that grants it.
func TestGrants(t *testing.T) {
	t.Parallel()
	owner := pgtest.Pool(t)
	for _, tt := range []struct{ what, grants, want string }{
		{"nothing", `SELECT`, "GRANT USAGE ON SCHEMA pglock"},
		{"USAGE alone", `GRANT USAGE ON SCHEMA pglock TO ROLE`, "GRANT EXECUTE ON FUNCTION pglock."},
	} {
		t.Run(tt.what, func(t *testing.T) {
			pool := asRole(t, owner, tt.grants)
			_, tried := newClient(t, pool).TryAcquire(t.Context(), "n", time.Minute)
			var fenced error
			inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) { fenced = pglock.Fence(t.Context(), tx, "r", 1) })
			for verb, err := range map[string]error{"TryAcquire": tried, "Fence": fenced} {
				if sqlState(err) != "42501" || !strings.Contains(err.Error(), tt.want) ||
					errors.Is(err, pglock.ErrNoSchema) || errors.Is(err, pglock.ErrLocked) {
					t.Errorf("%s says %v, want one that says %s", verb, err, tt.want)
				}
			}
		})
	}
	t.Run("both, and nothing on the tables", func(t *testing.T) {
		pool := asRole(t, owner, `GRANT USAGE ON SCHEMA pglock TO ROLE; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock TO ROLE`)
		l := acquire(t, newClient(t, pool), "app", 6*time.Second)
		until(t, owner, "a renewal", `SELECT expires_at > acquired_at + ttl FROM pglock.leases WHERE name = 'app'`)
		if err := l.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
			return pglock.Fence(ctx, tx, "app", l.Token())
		}); err != nil {
			t.Error(err)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := pool.Exec(t.Context(), `SELECT FROM pglock.leases`); sqlState(err) != "42501" {
			t.Errorf("the role may read the table (%v): this test shows nothing", err)
		}
	})
}

// A server that takes no writes is named as such, by the first call.
func TestUnfit_ReadOnlyAtConnect(t *testing.T) {
	t.Parallel()
	pool := poolBy(t, pgtest.DSN(t), func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
	})
	refusesLeases(t, pool, "default_transaction_read_only")
}

func TestUnfit_Standby(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t)
	primary, err := pgxpool.New(t.Context(), server.DSN())
	if err != nil {
		t.Fatal(err)
	}
	if err := migrations.Up(t.Context(), primary); err != nil {
		t.Fatal(err)
	}
	primary.Close()
	if err := server.Shutdown(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(server.DataDir(), "standby.signal"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := server.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	refusesLeases(t, pgtest.PoolOn(t, server.DSN()), "standby")
}

func refusesLeases(t *testing.T, pool *pgxpool.Pool, because string) {
	t.Helper()
	c := newClient(t, pool)
	for range 2 {
		_, err := c.TryAcquire(t.Context(), "n", time.Minute)
		if err == nil || errors.Is(err, pglock.ErrLocked) || errors.Is(err, pglock.ErrNoSchema) ||
			!strings.Contains(err.Error(), because) || !strings.Contains(err.Error(), "connect to") {
			t.Errorf("TryAcquire says %v, want one that says %s and what to do", err, because)
		}
	}
}
