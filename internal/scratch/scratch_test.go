package scratch_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/internal/scratch"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The schema is there for fn and for whoever connects to it, and gone when fn
// has returned, also after an error, a panic, and with its context ended.
func TestIn_LeavesNoTrace(t *testing.T) {
	t.Parallel()
	dsn := pgtest.EmptyDSN(t)
	outside := pgtest.PoolOn(t, dsn)
	count := func(ctx context.Context, pool *pgxpool.Pool, sql string) (n int) {
		if err := pool.QueryRow(ctx, sql).Scan(&n); err != nil {
			t.Error(err)
		}
		return n
	}
	const schemas = `SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'trace\_%'`
	oops := errors.New("oops")
	for name, fn := range map[string]func(context.CancelFunc) error{
		"done":   func(context.CancelFunc) error { return nil },
		"failed": func(context.CancelFunc) error { return oops },
		"ended":  func(end context.CancelFunc) error { end(); return oops },
		"panics": func(context.CancelFunc) error { panic(oops) },
	} {
		t.Run(name, func(t *testing.T) {
			ctx, end := context.WithCancel(t.Context())
			defer end()
			ran := false
			err := func() (err error) {
				defer func() {
					if p := recover(); p != nil {
						err = p.(error)
					}
				}()
				return scratch.In(ctx, dsn, "trace", `CREATE TABLE jobs (id int)`, func(s scratch.Schema, pool *pgxpool.Pool) error {
					ran = true
					other, err := s.Connect(ctx)
					if err != nil {
						return err
					}
					defer other.Close()
					if _, err := pool.Exec(ctx, `INSERT INTO jobs VALUES (1)`); err != nil {
						return err
					}
					if n := count(ctx, other, `SELECT count(*) FROM jobs`); n != 1 {
						t.Errorf("another process finds %d jobs, want 1", n)
					}
					if n := count(ctx, outside, schemas); n != 1 {
						t.Errorf("%d schemas while it runs, want 1: this test shows nothing", n)
					}
					return fn(end)
				})
			}()
			if !ran || (err == nil) != (name == "done") || err != nil && !errors.Is(err, oops) {
				t.Errorf("ran: %t, error: %v", ran, err)
			}
			if n := count(t.Context(), outside, schemas); n != 0 {
				t.Errorf("%d schemas were left", n)
			}
		})
	}
}
