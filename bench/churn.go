package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// churned is how many names are taken and freed again and again.
const churned = 1000

// churns are the circumstances: what an old snapshot still sees, PostgreSQL can
// remove neither by vacuum nor when a page is full.
var churns = []struct {
	name string
	old  bool
}{
	{"nothing else", false},
	{"beside an old snapshot", true},
}

var churn = scenario{
	name:  "churn",
	title: "Churn: what many pairs leave behind",
	says: fmt.Sprintf("One client, %d goroutines, %d names. The old snapshot is that of a transaction which is open all the time. "+
		"HOT: updates that touched no index. Heap and index: of the table of leases, at the end.", acquirers, churned),
	metrics: []metric{{"pairs", 0, ""}, {"pairs/s", 0, ""}, {"in the last tenth", 0, ""}, {"HOT, %", 1, ""}, {"heap, MiB", 1, ""}, {"index, KiB", 0, ""}},
	rounds:  func(plan) int { return 1 },
	trials: func(_ context.Context, b *bench) []trial {
		if !slices.Contains(names(b.wanted), pawl.name) {
			return nil
		}
		var trials []trial
		for i, circumstance := range churns {
			trials = append(trials, trial{circumstance.name, pawl.name, 10 * slack, func(ctx context.Context) (sample, error) {
				s, err := pawlIn(ctx, b.host, fmt.Sprint("churn", i))
				if err != nil {
					return nil, err
				}
				return stir(ctx, s.address, b.churn, circumstance.old)
			}})
		}
		return trials
	},
}

// stir makes so many pairs in a database, and says what they left.
func stir(ctx context.Context, address string, pairs int, old bool) (sample, error) {
	conn, err := pgx.Connect(ctx, address)
	if err != nil {
		return nil, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if old {
		if _, err := conn.Exec(ctx, `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM pglock.leases`); err != nil {
			return nil, err
		}
	}
	c, err := pawl.dial(ctx, address, acquirers, generous)
	if err != nil {
		return nil, err
	}
	makePairs := func(n int) (perSecond float64, err error) {
		began := time.Now()
		err = spread(ctx, n, func(ctx context.Context, i int) error {
			release, err := c.acquire(ctx, fmt.Sprint("churn-", i%churned))
			if err != nil {
				return err
			}
			return release(ctx)
		})
		return float64(n) / time.Since(began).Seconds(), err
	}
	first, err := makePairs(pairs - pairs/10)
	if err != nil {
		return nil, err
	}
	last, err := makePairs(pairs / 10)
	c.close() // and its backends report what they have counted
	if err != nil {
		return nil, err
	}
	if old {
		if _, err := conn.Exec(ctx, `COMMIT`); err != nil {
			return nil, err
		}
	}
	var updates, hot, heap, index float64
	err = conn.QueryRow(ctx, `SELECT n_tup_upd, n_tup_hot_upd, pg_relation_size(relid), pg_indexes_size(relid)
		FROM pg_stat_user_tables WHERE relid = 'pglock.leases'::regclass`).Scan(&updates, &hot, &heap, &index)
	return sample{
		"pairs": float64(pairs), "pairs/s": 1 / (0.9/first + 0.1/last), "in the last tenth": last,
		"HOT, %": 100 * hot / updates, "heap, MiB": heap / (1 << 20), "index, KiB": index / (1 << 10),
	}, err
}
