package pglock_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgserver"
)

// Pairs of acquire and release a second, of distinct names, by goroutines of one
// client, on a server that is as careful with its disk as one in use is. The floor
// is a lease's two least statements, written by hand, on a connection for each
// goroutine. The two take turns, so that a machine that slows down slows both.
func BenchmarkPairs(b *testing.B) {
	pool := durable(b, pgserver.With("max_connections", "200"))
	exec(b, pool, `CREATE SEQUENCE floor_token;
		CREATE TABLE floor (name text PRIMARY KEY, token bigint, expires_at timestamptz NOT NULL DEFAULT '-infinity') WITH (fillfactor = 50);
		INSERT INTO floor SELECT 'pair/' || n FROM generate_series(0, 127) n`)
	const turn = 250 * time.Millisecond
	for _, goroutines := range []int{1, 8, 32, 128} {
		b.Run(fmt.Sprint(goroutines), func(b *testing.B) {
			conns := poolBy(b, pool.Config().ConnString(), func(config *pgxpool.Config) { config.MaxConns = int32(goroutines) })
			floor := func(ctx context.Context, name string) error {
				var token int64
				err := conns.QueryRow(ctx, `UPDATE floor SET token = nextval('floor_token'), expires_at = now() + $2::interval
					WHERE name = $1 AND expires_at <= now() RETURNING token`, name, time.Minute).Scan(&token)
				if err != nil {
					return err
				}
				_, err = conns.Exec(ctx, `UPDATE floor SET expires_at = '-infinity' WHERE name = $1 AND token = $2`, name, token)
				return err
			}
			c := newClient(b, pool)
			lease := func(ctx context.Context, name string) error {
				l, err := c.TryAcquire(ctx, name, time.Minute)
				if err != nil {
					return err
				}
				return l.Release(ctx)
			}
			pairs(b, goroutines, turn, floor) // connects, and creates the names
			pairs(b, goroutines, turn, lease)
			var floors, leases int64
			rounds := 0
			for b.Loop() {
				floors += pairs(b, goroutines, turn, floor)
				leases += pairs(b, goroutines, turn, lease)
				rounds++
			}
			seconds := turn.Seconds() * float64(rounds)
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(float64(floors)/seconds, "floor-pairs/s")
			b.ReportMetric(float64(leases)/seconds, "pairs/s")
			b.ReportMetric(float64(leases)/float64(floors), "of-the-floor")
		})
	}
}

// pairs counts how many pairs goroutines make in a time.
func pairs(b *testing.B, goroutines int, d time.Duration, pair func(context.Context, string) error) int64 {
	var n atomic.Int64
	var wg sync.WaitGroup
	end := time.Now().Add(d)
	for i := range goroutines {
		name := fmt.Sprint("pair/", i)
		wg.Go(func() {
			for time.Now().Before(end) {
				if err := pair(b.Context(), name); err != nil {
					b.Error(err)
					return
				}
				n.Add(1)
			}
		})
	}
	wg.Wait()
	return n.Load()
}
