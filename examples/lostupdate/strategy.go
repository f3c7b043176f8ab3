package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/optimistic"
	"github.com/pawl-go/pawl/pglock"
)

// strategy is a way to withdraw 1 from the account.
type strategy struct {
	name     string
	waits    bool // for a lock; the others try again
	withdraw func(*bank, context.Context) error
}

const none = "none"

var strategies = []strategy{
	{name: none, withdraw: (*bank).unlocked},
	{name: "row", waits: true, withdraw: (*bank).underRowLock},
	{name: "advisory", waits: true, withdraw: (*bank).underAdvisoryLock},
	{name: "lease", waits: true, withdraw: (*bank).underLease},
	{name: "optimistic", withdraw: (*bank).byVersion},
}

// unlocked is in a transaction, and loses updates all the same: at READ
// COMMITTED two of them read the same balance, and the second to write undoes
// the first.
func (b *bank) unlocked(ctx context.Context) error {
	return pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error {
		return b.withdraw(ctx, tx)
	})
}

func (b *bank) underRowLock(ctx context.Context) error {
	return pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error {
		asked := time.Now()
		balance, err := pglock.LockRow(ctx, tx, pglock.ForNoKeyUpdate, pgx.RowTo[int64], b.account.readSQL, accountID)
		b.waited(asked)
		if err != nil {
			return err
		}
		if err := b.consider(ctx); err != nil {
			return err
		}
		return b.account.write(ctx, tx, balance-1)
	})
}

func (b *bank) underAdvisoryLock(ctx context.Context) error {
	return pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error {
		asked := time.Now()
		err := pglock.LockTx(ctx, tx, pglock.KeyOf(b.account.name))
		b.waited(asked)
		if err != nil {
			return err
		}
		return b.withdraw(ctx, tx)
	})
}

// underLease writes under ctx and not under the lease's: the fence refuses a
// late write, and to give up a COMMIT under way because the lease has ended
// would only make its outcome unknown.
func (b *bank) underLease(ctx context.Context) error {
	for {
		written := false
		asked := time.Now()
		err := b.locks.WithLease(ctx, b.account.name, b.ttl, func(_ context.Context, lease *pglock.Lease) error {
			b.waited(asked)
			err := pgx.BeginFunc(ctx, b.pool, func(tx pgx.Tx) error {
				if err := pglock.Fence(ctx, tx, b.account.name, lease.Token()); err != nil {
					return err
				}
				return b.withdraw(ctx, tx)
			})
			written = err == nil
			return err
		})
		switch {
		case errors.Is(err, pglock.ErrFenced):
			b.retries.Add(1)
			continue
		case written && errors.Is(err, pglock.ErrLost):
			return nil // it ended after the write was accepted
		}
		return err
	}
}

// funds is the row as the optimistic table reads and writes it.
type funds struct{ Balance int64 }

func (b *bank) byVersion(ctx context.Context) error {
	tries := 0
	_, err := b.table.Update(ctx, b.pool, accountID, func(f funds) (funds, error) {
		tries++
		f.Balance--
		return f, b.consider(ctx)
	})
	b.retries.Add(int64(max(0, tries-1)))
	return err
}

// bank is what the workers of a strategy share.
type bank struct {
	*database
	options
	locks *pglock.Client
	table *optimistic.Table[funds]
	counters
}

func newBank(db *database, locks *pglock.Client, o options) *bank {
	return &bank{database: db, options: o, locks: locks, table: optimistic.NewTable[funds](db.account.table)}
}

// withdraw reads the balance, considers it and writes it back less 1.
func (b *bank) withdraw(ctx context.Context, tx pgx.Tx) error {
	balance, err := b.account.read(ctx, tx)
	if err != nil {
		return err
	}
	if err := b.consider(ctx); err != nil {
		return err
	}
	return b.account.write(ctx, tx, balance-1)
}

// consider takes the time that an application takes between reading and
// writing.
func (b *bank) consider(ctx context.Context) error {
	if b.think == 0 {
		return ctx.Err()
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(b.think):
		return nil
	}
}
