package optimistic

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// txAttempts bounds RunInTx. With the pauses below that is about three seconds
// of waiting before it gives up.
const txAttempts = 20

// A TxOption changes a default of RunInTx.
type TxOption func(*pgx.TxOptions)

// WithTxOptions sets how the transaction is begun; the zero pgx.TxOptions is a
// plain BEGIN, at the database's default isolation. Default: SERIALIZABLE.
func WithTxOptions(o pgx.TxOptions) TxOption { return func(tx *pgx.TxOptions) { *tx = o } }

// RunInTx runs fn in a transaction and commits it, and runs the whole again, on
// a new snapshot, whenever fn or COMMIT fails with a serialization failure or a
// deadlock (40001, 40P01, ErrRetryOutside): twenty times at most, with a random
// pause before each that ctx survives. Then it is ErrExhausted, holding the last
// failure. Any other error of fn rolls back and is returned as it is. A COMMIT
// whose answer was lost is ErrUnknownCommit and is not repeated.
//
// The transaction is SERIALIZABLE unless WithTxOptions says otherwise: who
// retries whole transactions wants the database to find the conflicts, and at
// READ COMMITTED a plain read-then-write in fn would lose updates without any
// error to retry on.
//
// fn may run several times, so it must do nothing outside tx, and it must not
// end tx. It takes a pool and not a transaction or a connection, because inside
// a transaction there is no whole to run again.
func RunInTx(ctx context.Context, pool *pgxpool.Pool, fn func(context.Context, pgx.Tx) error, opts ...TxOption) error {
	if err := checkDB(ctx, pool); err != nil {
		return err
	}
	if fn == nil {
		return errors.New("optimistic: run in transaction: fn is nil")
	}
	o := pgx.TxOptions{IsoLevel: pgx.Serializable}
	for _, opt := range opts {
		opt(&o)
	}
	for n := 1; ; n++ {
		err := runOnce(ctx, pool, o, fn)
		if err == nil || errors.Is(err, ErrUnknownCommit) || !wholeAgain(err) {
			return err
		}
		if n == txAttempts || !pause(ctx, n) {
			gaveUp := ErrExhausted
			if ctx.Err() != nil {
				gaveUp = ctx.Err()
			}
			return fmt.Errorf("run in transaction: %w after %d attempts: %w", gaveUp, n, err)
		}
	}
}

// wholeAgain says whether a new transaction may succeed.
func wholeAgain(err error) bool {
	code := sqlState(err)
	return code == serializationFailure || code == deadlockDetected || errors.Is(err, ErrRetryOutside)
}

func runOnce(ctx context.Context, pool *pgxpool.Pool, o pgx.TxOptions, fn func(context.Context, pgx.Tx) error) error {
	tx, err := pool.BeginTx(ctx, o)
	if err != nil {
		return fmt.Errorf("run in transaction: begin: %w", err)
	}
	defer rollback(ctx, tx)
	if err := fn(ctx, tx); err != nil {
		return err
	}
	// COMMIT belongs to what is retried: it is where SERIALIZABLE says no. An fn
	// that dropped a statement's error shows here too, as pgx's
	// ErrTxCommitRollback: not retried, since nothing tells what went wrong.
	if err := commit(ctx, tx); err != nil {
		return fmt.Errorf("run in transaction: %w", err)
	}
	return nil
}

// pause sleeps before retry n, which counts from 1, for a random time between
// nothing and a bound that doubles ("full jitter": writers that collided once
// are not to meet again). It returns false, at once, when ctx would not survive
// the sleep, and when it ends during it.
func pause(ctx context.Context, n int) bool {
	const first, most = 4 * time.Millisecond, 250 * time.Millisecond
	d := rand.N(min(most, first<<min(n, 10)))
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= d {
		return false
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
