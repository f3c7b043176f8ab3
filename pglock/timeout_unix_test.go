//go:build unix

package pglock_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// A process that is stopped by SIGSTOP while it holds a row is cut off, the
// next one in line writes, and when the first wakes its write and its COMMIT
// fail. The control has no SetHoldTimeout: the next one waits in vain, and the
// late write counts.
func TestSetHoldTimeout_StoppedProcess(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	exec(t, pool, `CREATE TABLE accounts (name text PRIMARY KEY, balance int NOT NULL DEFAULT 100)`)
	balance := func(name string) int { return one[int](t, pool, `SELECT balance FROM accounts WHERE name = $1`, name) }
	for _, tt := range []struct {
		name    string
		prepare []string
		waits   time.Duration
		late    []string // what becomes of the late write and its COMMIT
		balance int
	}{
		{"bounded", []string{"begin", "lock the row", "bound the hold"}, limit, []string{"cut off", "cut off"}, 50},
		{"unbounded", []string{"begin", "lock the row"}, time.Second, []string{"ok", "ok"}, 99},
	} {
		exec(t, pool, `INSERT INTO accounts (name) VALUES ($1)`, tt.name)
		child := spawn(t, dsn)
		held := child.ask(order{Name: tt.name, TTL: 300 * time.Millisecond, Steps: tt.prepare})
		child.stop()

		waiter := begin(t, pool)
		if err := pglock.SetLockTimeout(t.Context(), waiter, tt.waits); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		_, err := pglock.LockRow(t.Context(), waiter, pglock.ForNoKeyUpdate, pgx.RowTo[int], `SELECT balance FROM accounts WHERE name = $1`, tt.name)
		waited := time.Since(start)
		if refused := errors.Is(err, pglock.ErrLocked); refused == (tt.balance == 50) || err != nil && !refused {
			t.Errorf("%s: the next in line is told %v", tt.name, err)
		}
		if err == nil {
			exec(t, waiter, `UPDATE accounts SET balance = 50 WHERE name = $1`, tt.name)
			err = waiter.Commit(t.Context())
		} else {
			err = waiter.Rollback(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		child.send(order{Name: tt.name, Steps: []string{"write the row", "commit"}})
		child.wake()
		late := child.hear()
		t.Logf("%s: the process had done %v when it was stopped; the next in line waited %v; then: %v", tt.name, held.Fates, waited, late.Fates)
		if diff := cmp.Diff(tt.late, late.Fates); diff != "" {
			t.Errorf("%s: the late writer is told %s", tt.name, diff)
		}
		if got := balance(tt.name); got != tt.balance || !late.Sent {
			t.Errorf("%s: the balance is %d, want %d; the late write was sent: %v", tt.name, got, tt.balance, late.Sent)
		}
	}
}
