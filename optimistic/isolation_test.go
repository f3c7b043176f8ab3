package optimistic_test

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/optimistic"
)

// What a writer in its own transaction is told, at each level, when the row was
// changed before its snapshot, and after it.
func TestIsolation(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	ctx := t.Context()
	writers := map[string]func(tx pgx.Tx, version int64) error{
		"CompareAndSet": func(tx pgx.Tx, version int64) error {
			_, err := accounts.CompareAndSet(ctx, tx, 1, version, account{})
			return err
		},
		"Delete": func(tx pgx.Tx, version int64) error {
			return accounts.Delete(ctx, tx, 1, version)
		},
		"Exec": func(tx pgx.Tx, version int64) error {
			return optimistic.Exec(ctx, tx, `UPDATE accounts SET version = version + 1 WHERE id = 1 AND version = $1`, version)
		},
		"Update": func(tx pgx.Tx, _ int64) error {
			calls := 0
			_, err := accounts.Update(ctx, tx, 1, func(a account) (account, error) {
				if calls++; calls == 1 {
					bump(t, pool, 1)
				}
				return a, nil
			})
			return err
		},
	}
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		for name, write := range writers {
			after, before := optimistic.ErrRetryOutside, optimistic.ErrConflict
			switch {
			case level == pgx.ReadCommitted && name == "Update":
				after, before = nil, nil
			case level == pgx.ReadCommitted:
				after = optimistic.ErrConflict
			case name == "Update": // fn comes after the snapshot in any case
				before = optimistic.ErrRetryOutside
			}
			for when, wanted := range map[string]error{"before the snapshot": before, "after the snapshot": after} {
				version := stored(t, pool, 1).Version
				tx := begin(t, pool, level)
				if when == "before the snapshot" {
					bump(t, pool, 1)
				}
				usable(t, tx) // takes the snapshot
				if when == "after the snapshot" {
					bump(t, pool, 1)
				}
				err := write(tx, version)
				if !errors.Is(err, wanted) {
					t.Errorf("%s at %s, changed %s: %v, want %v", name, level, when, err, wanted)
				}
				if errors.Is(err, optimistic.ErrRetryOutside) {
					wantState(t, err, "40001")
					_, err = tx.Exec(ctx, `SELECT`)
					wantState(t, err, "25P02")
				} else {
					usable(t, tx)
				}
				want(t, tx.Rollback(ctx), nil)
			}
		}
	}
}

// Above READ COMMITTED a key that somebody inserted after the snapshot is
// neither free nor to be seen.
func TestIsolation_Insert(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	for id, level := range map[int64]pgx.TxIsoLevel{10: pgx.ReadCommitted, 11: pgx.RepeatableRead, 12: pgx.Serializable} {
		tx := begin(t, pool, level)
		usable(t, tx)
		_, _, err := accounts.Insert(t.Context(), pool, id, account{})
		want(t, err, nil)
		_, created, err := accounts.Insert(t.Context(), tx, id, account{})
		if level == pgx.ReadCommitted {
			want(t, err, nil)
		} else {
			want(t, err, optimistic.ErrRetryOutside)
		}
		if created {
			t.Errorf("%s: created twice", level)
		}
	}
}

// Two transactions that want each other's row: one is told to run again.
func TestIsolation_Deadlock(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts, runtimeParam("deadlock_timeout", "10ms"))
	a, b := begin(t, pool, pgx.ReadCommitted), begin(t, pool, pgx.ReadCommitted)
	set := func(tx pgx.Tx, id int64) error {
		_, err := accounts.CompareAndSet(t.Context(), tx, id, 1, account{})
		return err
	}
	want(t, set(a, 1), nil)
	want(t, set(b, 2), nil)
	done := make(chan error, 1)
	go func() {
		err := set(a, 2)
		_ = a.Rollback(t.Context())
		done <- err
	}()
	err := set(b, 1)
	_ = b.Rollback(t.Context())
	if other := receive(t, done); err == nil {
		err = other
	}
	want(t, err, optimistic.ErrRetryOutside)
	wantState(t, err, "40P01")
}
