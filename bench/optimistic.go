package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/optimistic"
)

type account struct {
	ID      int64
	Balance int64
}

const (
	updaters = 8
	accounts = 1000
)

// updates are the ways to add to a balance that are compared.
var updates = []struct {
	name string
	add  func(ctx context.Context, pool *pgxpool.Pool, table *optimistic.Table[account], id int64) error
}{
	{"Table.Update", func(ctx context.Context, pool *pgxpool.Pool, table *optimistic.Table[account], id int64) error {
		_, err := table.Update(ctx, pool, id, func(a account) (account, error) {
			a.Balance++
			return a, nil
		})
		return err
	}},
	{handwritten, func(ctx context.Context, pool *pgxpool.Pool, _ *optimistic.Table[account], id int64) error {
		for {
			var balance, version int64
			err := pool.QueryRow(ctx, `SELECT balance, version FROM accounts WHERE id = $1`, id).Scan(&balance, &version)
			if err != nil {
				return err
			}
			tag, err := pool.Exec(ctx, `UPDATE accounts SET balance = $3, version = version + 1 WHERE id = $1 AND version = $2`, id, version, balance+1)
			if err != nil || tag.RowsAffected() == 1 {
				return err
			}
		}
	}},
}

const handwritten = "hand-written loop"

var optimisticUpdates = scenario{
	name:    "optimistic",
	title:   "Optimistic updates: changes a second",
	says:    fmt.Sprintf("Read, add 1, write where the version is unchanged, else again; %d goroutines, on %d rows and on one.", updaters, accounts),
	wide:    true,
	metrics: []metric{{"changes/s", 0, handwritten}},
	rounds:  func(p plan) int { return p.rounds },
	trials: func(ctx context.Context, b *bench) []trial {
		if !slices.Contains(names(b.wanted), pawl.name) {
			return nil
		}
		pool, table, err := b.accounts(ctx)
		var trials []trial
		for _, rows := range []int64{accounts, 1} {
			for _, u := range updates {
				trials = append(trials, trial{fmt.Sprintf("rows=%d", rows), u.name, b.duration + slack, func(ctx context.Context) (sample, error) {
					if err != nil {
						return nil, err
					}
					rate, err := perSecond(ctx, updaters, b.duration, func(ctx context.Context, _ int) error {
						return u.add(ctx, pool, table, 1+rand.Int64N(rows))
					})
					return sample{"changes/s": rate}, err
				}})
			}
		}
		return trials
	},
}

func (b *bench) accounts(ctx context.Context) (*pgxpool.Pool, *optimistic.Table[account], error) {
	s, err := b.host.database(ctx, "optimistic")
	if err != nil {
		return nil, nil, err
	}
	pool, err := poolOf(ctx, s.address, updaters)
	if err != nil {
		return nil, nil, err
	}
	b.stopping = append(b.stopping, func() error { pool.Close(); return nil })
	for _, sql := range []string{
		`CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL, version bigint NOT NULL) WITH (fillfactor = 50)`,
		fmt.Sprintf(`INSERT INTO accounts SELECT n, 0, 1 FROM generate_series(1, %d) n`, accounts),
	} {
		if _, err := pool.Exec(ctx, sql); err != nil {
			return nil, nil, err
		}
	}
	return pool, optimistic.NewTable[account]("accounts"), nil
}
