package pglock_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// A connection that goes silent is given up in time for a renewal on another.
func TestFault_L05_AHungConnectionIsReplaced(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	direct, wire := pgtest.PoolOn(t, dsn), pgtest.Proxy(t, dsn)
	far, err := pgx.ParseConfig(wire.DSN())
	if err != nil {
		t.Fatal(err)
	}
	var broken atomic.Bool
	mine := poolBy(t, dsn, func(config *pgxpool.Config) {
		config.BeforeConnect = func(_ context.Context, conn *pgx.ConnConfig) error {
			if !broken.Load() {
				conn.Host, conn.Port = far.Host, far.Port
			}
			return nil
		}
	})
	c := newClient(t, mine)
	l := acquire(t, c, "held", 3*time.Second)
	renewed(t, direct, "held")
	broken.Store(true)
	wire.Silence()
	for range 4 {
		renewed(t, direct, "held")
	}
	if l.Err() != nil {
		t.Errorf("lost: %v", l.Err())
	}
}
