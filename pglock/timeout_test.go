package pglock_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

type setTimeout func(context.Context, pgx.Tx, time.Duration) error

func TestSetTimeouts_BadDurations(t *testing.T) {
	t.Parallel()
	for name, set := range map[string]setTimeout{"lock timeout": pglock.SetLockTimeout, "hold timeout": pglock.SetHoldTimeout} {
		for d, want := range map[time.Duration]string{
			0:                    "0s: want at least 1ms",
			-time.Second:         "-1s: want at least 1ms",
			time.Millisecond - 1: "999.999µs: want at least 1ms",
			25 * 24 * time.Hour:  "600h0m0s: want at most 596h31m23.647s",
			math.MaxInt64:        "want at most",
			math.MinInt64:        "want at least",
		} {
			// The transaction would panic at any use.
			err := set(t.Context(), &recorder{}, d)
			if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), name) {
				t.Errorf("%s of %v: %v", name, d, err)
			}
		}
	}
}

// The settings last as long as the transaction, and a savepoint takes them back.
func TestSetTimeouts_Scope(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	conn := newConn(t, pool)
	exec(t, conn, `SET lock_timeout = '1min'; SET idle_in_transaction_session_timeout = '1h'`)
	settings := func() string {
		return one[string](t, conn, `SELECT concat_ws(' ', current_setting('lock_timeout'), current_setting('idle_in_transaction_session_timeout'),
			nullif(current_setting('transaction_timeout', true), '0'), current_setting('pglock.hold_timeout', true))`)
	}
	want := func(what, want string) {
		t.Helper()
		if one[bool](t, conn, `SELECT current_setting('server_version_num')::int >= 170000`) {
			want = strings.Replace(want, " 5s 5000", " 5s 5s 5000", 1)
		}
		if got := strings.TrimSpace(settings()); got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	set := func(tx pgx.Tx, lock, hold time.Duration) {
		t.Helper()
		if err := pglock.SetLockTimeout(t.Context(), tx, lock); err != nil {
			t.Fatal(err)
		}
		if err := pglock.SetHoldTimeout(t.Context(), tx, hold); err != nil {
			t.Fatal(err)
		}
	}
	tx := begin(t, conn)
	set(tx, 1500*time.Millisecond+1, 5*time.Second)
	want("set", "1501ms 5s 5000")
	inner := begin(t, tx)
	set(inner, 7*time.Millisecond, time.Minute)
	if err := inner.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	want("after a savepoint", "1501ms 5s 5000")
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	want("after the transaction", "1min 1h")
	inTx(t, conn, pgx.ReadCommitted, func(tx pgx.Tx) {
		if err := pglock.SetHoldTimeout(t.Context(), tx, math.MaxInt32*time.Millisecond); err != nil {
			t.Errorf("the longest: %v", err)
		}
	})
}

// A holder that is paused inside its transaction is cut off: its late COMMIT
// fails, its write is gone, and who waited has the row. Without SetHoldTimeout
// the waiter waits in vain and the late COMMIT is good.
func TestSetHoldTimeout_PausedHolder(t *testing.T) {
	t.Parallel()
	for _, bounded := range []bool{true, false} {
		pool := accounts(t, 1)
		holder, waiter := begin(t, pool), begin(t, pool)
		lockAccount(t, holder, pglock.ForNoKeyUpdate, 1)
		exec(t, holder, `UPDATE accounts SET balance = 0`)
		patience := limit
		if bounded {
			if err := pglock.SetHoldTimeout(t.Context(), holder, 100*time.Millisecond); err != nil {
				t.Fatal(err)
			}
		} else {
			patience = 500 * time.Millisecond
		}
		if err := pglock.SetLockTimeout(t.Context(), waiter, patience); err != nil {
			t.Fatal(err)
		}
		balance, err := pglock.LockRow(t.Context(), waiter, pglock.ForNoKeyUpdate, pgx.RowTo[int], oneAccount, 1)
		late := holder.Commit(t.Context())
		if !bounded {
			if !errors.Is(err, pglock.ErrLocked) || late != nil {
				t.Errorf("unbounded: the waiter got %v, the late COMMIT %v", err, late)
			}
			continue
		}
		if err != nil || balance != 100 {
			t.Errorf("the waiter got %d, %v", balance, err)
		}
		if state := sqlState(late); late == nil || state != "" && state != "25P03" && state != "25P04" {
			t.Errorf("the late COMMIT says %v", late)
		}
		exec(t, waiter, `UPDATE accounts SET balance = 50`)
		if err := waiter.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := one[int](t, pool, oneAccount, 1); got != 50 {
			t.Errorf("the balance is %d, want the waiter's 50", got)
		}
	}
}

// From PostgreSQL 17 on a holder that is busy is cut off as well, counted from
// the call, also where the session came with a timer of its own that runs.
func TestSetHoldTimeout_BusyHolder(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	if one[bool](t, pool, `SELECT current_setting('server_version_num')::int < 170000`) {
		// Here it goes on: what bounds only idleness doesn't end it.
		inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
			if err := pglock.SetHoldTimeout(t.Context(), tx, 50*time.Millisecond); err != nil {
				t.Fatal(err)
			}
			exec(t, tx, `SELECT pg_sleep(0.2)`)
		})
		return
	}
	for _, before := range []string{"0", "1h"} {
		conn := newConn(t, pool)
		exec(t, conn, `SELECT set_config('transaction_timeout', $1, false)`, before)
		inTx(t, conn, pgx.ReadCommitted, func(tx pgx.Tx) {
			exec(t, tx, `SELECT pg_sleep(0.1)`)
			if err := pglock.SetHoldTimeout(t.Context(), tx, 500*time.Millisecond); err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec(t.Context(), `SELECT pg_sleep(60)`); sqlState(err) != "25P04" {
				t.Errorf("transaction_timeout %s: a busy holder got %v", before, err)
			}
		})
	}
}

// Guard, Fence and Present lower the idle timeout, but not where it was chosen.
func TestSetHoldTimeout_StaysBesideFence(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	const idle = `SELECT current_setting('idle_in_transaction_session_timeout')`
	inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
		if err := pglock.SetHoldTimeout(t.Context(), tx, time.Hour); err != nil {
			t.Fatal(err)
		}
		if err := pglock.Fence(t.Context(), tx, "accounts/42", 1); err != nil {
			t.Fatal(err)
		}
		if got := one[string](t, tx, idle); got != "1h" {
			t.Errorf("after Fence it is %s, want 1h", got)
		}
	})
	inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
		if err := pglock.Fence(t.Context(), tx, "accounts/42", 1); err != nil {
			t.Fatal(err)
		}
		if got := one[string](t, tx, idle); got != "30s" {
			t.Errorf("Fence alone set it to %s, want 30s", got)
		}
	})
}
