package optimistic_test

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/optimistic"
)

// conflicts is an Observer that keeps what it is told, and then panics.
type conflicts struct{ told []optimistic.Conflict }

func (c *conflicts) Conflict(_ context.Context, conflict optimistic.Conflict) {
	c.told = append(c.told, conflict)
	panic("boom")
}

// Each conflict is told once, also those that Update retries, and nothing else is.
func TestObserver(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	ctx := t.Context()
	told := &conflicts{}
	watched := optimistic.NewTable[account]("accounts", optimistic.WithObserver(told))
	expect := func(what string, err, as error, want ...optimistic.Conflict) {
		t.Helper()
		if !errors.Is(err, as) {
			t.Errorf("%s: %v, want %v", what, err, as)
		}
		if diff := cmp.Diff(want, told.told); diff != "" {
			t.Errorf("%s (-want +got):\n%s", what, diff)
		}
		told.told = nil
	}
	bump := func() { exec(t, pool, `UPDATE accounts SET version = version + 1 WHERE id = 1`) }
	conflict := func(attempt int) optimistic.Conflict {
		return optimistic.Conflict{Table: "accounts", Key: 1, Attempt: attempt}
	}

	_, err := watched.CompareAndSet(ctx, pool, 1, 99, account{})
	expect("compare and set", err, optimistic.ErrConflict, conflict(1))
	_, err = watched.Touch(ctx, pool, 1, 99)
	expect("touch", err, optimistic.ErrConflict, conflict(1))
	expect("delete", watched.Delete(ctx, pool, 1, 99), optimistic.ErrConflict, conflict(1))
	_, err = watched.CompareAndSetMany(ctx, pool, []optimistic.Change[account]{{Key: 1, Version: 99}, {Key: 2, Version: 1}})
	expect("many", err, optimistic.ErrConflict, conflict(1))
	calls := 0
	_, err = watched.Update(ctx, pool, 1, func(a account) (account, error) {
		if calls++; calls <= 2 {
			bump()
		}
		return a, nil
	})
	expect("update", err, nil, conflict(1), conflict(2))
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		_, err := watched.Update(ctx, tx, 1, func(a account) (account, error) { bump(); return a, nil })
		return err
	})
	expect("update at REPEATABLE READ", err, optimistic.ErrRetryOutside, conflict(1))

	_, err = watched.CompareAndSet(ctx, pool, 3, 1, account{})
	expect("no such row", err, optimistic.ErrNotFound)
	_, err = watched.Touch(ctx, pool, 2, 1)
	expect("no conflict", err, nil)
	_, err = watched.Update(ctx, pool, 2, func(a account) (account, error) { return a, optimistic.ErrConflict })
	expect("the function's own error", err, optimistic.ErrConflict)
}
