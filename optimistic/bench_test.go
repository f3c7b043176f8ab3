package optimistic_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// A contender adds 1 to the balance of an account, thinks between reading and
// writing, and returns how often it tried.
type contender struct {
	name string
	add  func(ctx context.Context, pool *pgxpool.Pool, id int64, think func()) (attempts int, err error)
}

var contenders = []contender{
	{"bare", func(ctx context.Context, pool *pgxpool.Pool, id int64, think func()) (int, error) {
		think()
		_, err := pool.Exec(ctx, `UPDATE accounts SET balance = balance + 1, version = version + 1 WHERE id = $1`, id)
		return 1, err
	}},
	{"forupdate", func(ctx context.Context, pool *pgxpool.Pool, id int64, think func()) (int, error) {
		return 1, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			var balance int64
			if err := tx.QueryRow(ctx, `SELECT balance FROM accounts WHERE id = $1 FOR UPDATE`, id).Scan(&balance); err != nil {
				return err
			}
			think()
			_, err := tx.Exec(ctx, `UPDATE accounts SET balance = $2, version = version + 1 WHERE id = $1`, id, balance+1)
			return err
		})
	}},
	{"loop", func(ctx context.Context, pool *pgxpool.Pool, id int64, think func()) (int, error) {
		for n := 1; ; n++ {
			var balance, version int64
			if err := pool.QueryRow(ctx, `SELECT balance, version FROM accounts WHERE id = $1`, id).Scan(&balance, &version); err != nil {
				return n, err
			}
			think()
			err := pool.QueryRow(ctx, `UPDATE accounts SET balance = $3, version = version + 1
				WHERE id = $1 AND version = $2 RETURNING balance, version`, id, version, balance+1).Scan(&balance, &version)
			if !errors.Is(err, pgx.ErrNoRows) {
				return n, err
			}
		}
	}},
	{"update", func(ctx context.Context, pool *pgxpool.Pool, id int64, think func()) (attempts int, err error) {
		_, err = accounts.Update(ctx, pool, id, func(a account) (account, error) {
			attempts++
			think()
			a.Balance++
			return a, nil
		})
		return attempts, err
	}},
}

// Four ways to add to a number, side by side: on one row that all want and on
// 1,000 rows, without a pause between reading and writing and with one of 2 ms.
// Of each: attempts per success, latencies, and how evenly the successes fell to
// the goroutines (Jain's index: 1 is even, 1/n is one goroutine's alone).
func BenchmarkOptimistic(b *testing.B) {
	for _, rows := range []int{1, 1000} {
		for _, thinking := range []time.Duration{0, 2 * time.Millisecond} {
			for _, goroutines := range []int{1, 4, 16, 64} {
				for _, c := range contenders {
					name := fmt.Sprintf("rows=%d/think=%v/goroutines=%d/%s", rows, thinking, goroutines, c.name)
					b.Run(name, func(b *testing.B) { contend(b, c, rows, goroutines, thinking) })
				}
			}
		}
	}
}

func contend(b *testing.B, c contender, rows, goroutines int, thinking time.Duration) {
	pool := newPool(b, fmt.Sprintf(`
		CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL, version bigint NOT NULL) WITH (fillfactor = 50);
		INSERT INTO accounts SELECT n, 0, 1 FROM generate_series(1, %d) n`, rows),
		func(c *pgxpool.Config) { c.MaxConns = int32(goroutines) })
	// Connected before the clock runs: a new connection costs more than an update.
	conns := make([]*pgxpool.Conn, goroutines)
	for i := range conns {
		var err error
		if conns[i], err = pool.Acquire(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	for _, conn := range conns {
		conn.Release()
	}
	think := func() {
		if thinking > 0 {
			time.Sleep(thinking)
		}
	}
	var left, attempts atomic.Int64
	left.Store(int64(b.N))
	took := make([][]time.Duration, goroutines)
	b.ResetTimer()
	parallel(goroutines, func(i int) {
		for left.Add(-1) >= 0 {
			began := time.Now()
			n, err := c.add(b.Context(), pool, 1+rand.Int64N(int64(rows)), think)
			if err != nil {
				b.Error(err)
				return
			}
			attempts.Add(int64(n))
			took[i] = append(took[i], time.Since(began))
		}
	})
	b.StopTimer()
	if sum := query[int64](b, pool, `SELECT sum(balance)::bigint FROM accounts`); sum != int64(b.N) {
		b.Errorf("%d successes and a sum of %d", b.N, sum)
	}
	var sum, squares float64
	for _, t := range took {
		n := float64(len(t))
		sum, squares = sum+n, squares+n*n
	}
	all := slices.Sorted(slices.Values(slices.Concat(took...)))
	percentile := func(p int) float64 { return float64(all[(len(all)-1)*p/100]) / float64(time.Millisecond) }
	b.ReportMetric(float64(attempts.Load())/float64(b.N), "attempts/op")
	b.ReportMetric(percentile(50), "p50-ms")
	b.ReportMetric(percentile(99), "p99-ms")
	b.ReportMetric(sum*sum/(float64(goroutines)*squares), "jain")
}
