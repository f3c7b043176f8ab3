package pglock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// A protected table takes no write without a lease, whoever wrote the SQL.
func TestProtect(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE accounts (id int PRIMARY KEY, balance int); INSERT INTO accounts VALUES (1, 100);
		SELECT pglock.protect('accounts', 'accounts/%')`)
	c := newClient(t, pool)
	write := func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE accounts SET balance = balance - 1`)
		return err
	}
	balance := func(want int32) {
		t.Helper()
		if got := one[int32](t, pool, `SELECT balance FROM accounts`); got != want {
			t.Errorf("the balance is %d, want %d", got, want)
		}
	}
	l := acquire(t, c, "accounts/1", time.Hour)
	if err := l.InTx(t.Context(), pool, write); err != nil {
		t.Fatal(err)
	}
	balance(99)
	if err := acquire(t, c, "other", time.Hour).InTx(t.Context(), pool, write); !errors.Is(err, pglock.ErrUnpresented) {
		t.Errorf("with another lease: %v, want ErrUnpresented", err)
	}
	for _, sql := range []string{
		`UPDATE accounts SET balance = 0`, `DELETE FROM accounts`, `INSERT INTO accounts VALUES (2, 0)`, `TRUNCATE accounts`,
		`INSERT INTO accounts VALUES (1, 0) ON CONFLICT (id) DO UPDATE SET balance = 0`,
		`WITH gone AS (DELETE FROM accounts RETURNING *) SELECT * FROM gone`,
	} {
		_, err := pool.Exec(t.Context(), sql)
		if !errors.Is(pglock.Explain(err), pglock.ErrUnpresented) || sqlState(err) != "PW004" {
			t.Errorf("%s without a lease: %v, want ErrUnpresented", sql, err)
		}
	}
	balance(99)

	// Presented, then taken over while the transaction has written nothing yet:
	// that can't be, for present is a guard. But a setting can be forged.
	for _, level := range levels {
		inTx(t, pool, level, func(tx pgx.Tx) {
			exec(t, tx, `SELECT set_config('pglock.presented', '[["accounts/1", 1]]', true)`)
			expire(t, pool, "accounts/1")
			next := acquire(t, newClient(t, pool), "accounts/1", time.Hour)
			err := pglock.Explain(write(t.Context(), tx))
			if fenced, ok := errors.AsType[*pglock.FencedError](err); level == pgx.ReadCommitted && (!ok || fenced.Token != 1 || fenced.Highest != next.Token()) {
				t.Errorf("a stale token at %s: %v, want that %d was accepted", level, err, next.Token())
			} else if err == nil {
				t.Errorf("a stale token at %s was let through", level)
			}
			if err := next.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	exec(t, pool, `SELECT pglock.unprotect('accounts')`)
	exec(t, pool, `UPDATE accounts SET balance = 0`)
	balance(0)
}
