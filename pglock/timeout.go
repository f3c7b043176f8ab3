package pglock

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
)

// SetLockTimeout bounds how long each later statement of tx waits for a lock:
// LockRow, LockRows and LockTx then return a *BlockedError. It ends with tx, or
// with the savepoint that it was called under when that is rolled back; another
// call replaces it. One statement (PostgreSQL manual, 20.11 Client Connection
// Defaults, lock_timeout):
//
//	SELECT set_config('lock_timeout', '1500', true)
//
// d counts in milliseconds, rounded up, up to 2,147,483,647. Less than one is
// an error before any SQL and leaves tx usable: PostgreSQL would read 0, which
// is what a setting that was never set holds, as no limit.
func SetLockTimeout(ctx context.Context, tx pgx.Tx, d time.Duration) error {
	ms, err := milliseconds("lock timeout", d)
	if err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, "SELECT set_config('lock_timeout', $1, true)", ms); err != nil {
		return fmt.Errorf("pglock: set lock timeout: %w", err)
	}
	return nil
}

// A timer of transaction_timeout that already runs, because the session came
// with one, keeps its time when the setting changes: only by way of 0 does the
// new one begin to count.
const holdTimeoutSQL = `SELECT set_config('pglock.hold_timeout', $1, true),
	set_config('idle_in_transaction_session_timeout', $1, true),
	CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL
		THEN set_config('transaction_timeout', '0', true) || set_config('transaction_timeout', $1, true) END`

// SetHoldTimeout bounds how long a holder that makes no progress may keep the
// locks of tx. A writer that is paused inside its transaction is cut off: the
// server ends its session once tx has been idle for d, whoever waits gets the
// locks, and the late COMMIT fails: with SQLSTATE 25P03 (25P04 for what follows),
// or with a broken connection where the server's word doesn't get through.
//
// From PostgreSQL 17 on the server also ends it when d has passed since this
// call, idle or not: that catches the holder who is stuck while the server
// sends to it, which counts as busy. There the time spent waiting for a lock
// counts too, so call it after the lock was granted, and choose d for the whole
// rest of tx.
//
// It replaces what the session had set, and Guard, Fence and Present leave its
// choice alone. It ends with tx, or with the savepoint that it was called under
// when that is rolled back; another call replaces it. One statement (PostgreSQL
// manual, 20.11 Client Connection Defaults):
//
//	SELECT set_config('pglock.hold_timeout', '5000', true),
//	       set_config('idle_in_transaction_session_timeout', '5000', true)
//
// and, from 17 on, with set_config('transaction_timeout', '5000', true).
//
// d counts in milliseconds, rounded up, up to 2,147,483,647. Less than one is
// an error before any SQL and leaves tx usable: PostgreSQL would read 0 as no
// limit.
func SetHoldTimeout(ctx context.Context, tx pgx.Tx, d time.Duration) error {
	ms, err := milliseconds("hold timeout", d)
	if err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, holdTimeoutSQL, ms); err != nil {
		return fmt.Errorf("pglock: set hold timeout: %w", err)
	}
	return nil
}

// milliseconds writes a duration as the settings of a server read it. It rounds
// up, so that no holder is cut off before its time.
func milliseconds(what string, d time.Duration) (string, error) {
	ms := int64(d / time.Millisecond)
	if d%time.Millisecond > 0 {
		ms++
	}
	switch {
	case d < time.Millisecond:
		return "", fmt.Errorf("pglock: %s of %v: want at least 1ms", what, d)
	case ms > math.MaxInt32:
		return "", fmt.Errorf("pglock: %s of %v: want at most %v", what, d, math.MaxInt32*time.Millisecond)
	}
	return strconv.FormatInt(ms, 10), nil
}
