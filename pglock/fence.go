package pglock

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// SQLSTATEs that the schema's functions raise.
const (
	codeFenced = "PW001"
	codeLost   = "PW002"
)

// Guard proves in the caller's transaction that the lease is held, and lets
// nobody take it until that transaction ends: it may expire meanwhile, but is
// granted to nobody. Renewals pass. Call it before the first read that the
// write depends on.
//
// When the lease is lost the error is a *LostError (ErrLost) and the
// transaction is aborted: nothing of it can commit. At REPEATABLE READ and
// above a tenure that ended after the snapshot fails with SQLSTATE 40001
// instead, which is the caller's to retry as a whole; and there a lease that
// has expired and was not taken passes. Guard also lowers
// idle_in_transaction_session_timeout for this transaction to the lease's TTL,
// unless SetHoldTimeout was called before: a writer that is paused inside its
// transaction is cut off. One statement:
//
//	SELECT pglock.guard('accounts/42', 17)
func (l *Lease) Guard(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, `SELECT pglock.guard($1::text, $2::bigint)`, l.name, int64(l.token))
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.Code == codeLost {
		cause := guardCause(pg.Detail)
		l.client.keeper.drop(l)
		l.lose(cause, err)
		return l.lost(cause, err)
	}
	if err != nil {
		return fmt.Errorf("guard lease %q: %w", l.name, explain(err))
	}
	return nil
}

// guardCause reads the first word of the server's detail.
func guardCause(detail string) Cause {
	switch word, _, _ := strings.Cut(detail, ":"); word {
	case "taken":
		return Taken
	case "idle":
		return ForceReleased
	}
	return Expired
}

// InTx runs fn in a transaction of its own that Guard has admitted, at the
// pool's default isolation level. The context of fn ends with ctx and with the
// lease's. When fn returns an error or panics the transaction is rolled back;
// otherwise InTx returns COMMIT's error: only nil says that the write is in.
// Four round trips and fn's.
func (l *Lease) InTx(ctx context.Context, pool *pgxpool.Pool, fn func(context.Context, pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := l.Guard(ctx, tx); err != nil {
			return err
		}
		both, cancel := join(ctx, l.Context())
		defer cancel()
		return fn(both, tx)
	})
}

// Fence accepts the token for the resource in the caller's transaction, and
// returns a *FencedError (ErrFenced) when a higher one was accepted before: the
// transaction is then aborted, and nothing of it can commit. Call it before the
// first read that the write depends on, in the transaction of the write; it
// holds others with a higher token up until that transaction ends. Fence
// several resources in the order of their names.
//
// The token may come from any lock service whose numbers only go up. For a
// lease of this database Guard and InTx are stronger: they refuse a stale
// holder before the next one has written. Fence also lowers
// idle_in_transaction_session_timeout for this transaction to 30 s, unless
// SetHoldTimeout was called before. One statement:
//
//	SELECT pglock.fence('accounts/42', 17)
func Fence(ctx context.Context, tx pgx.Tx, resource string, token Token) error {
	if err := checkName("resource", resource); err != nil {
		return err
	}
	if token <= 0 {
		return fmt.Errorf("pglock: token %d was never granted: a token is the positive number that came with the lock", token)
	}
	_, err := tx.Exec(ctx, `SELECT pglock.fence($1::text, $2::bigint)`, resource, int64(token))
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.Code == codeFenced {
		fenced := &FencedError{Resource: resource, Token: token, Err: err}
		_, _ = fmt.Sscanf(pg.Detail, "presented %d, accepted %d", new(Token), &fenced.Highest)
		return fenced
	}
	if err != nil {
		return fmt.Errorf("fence resource %q: %w", resource, explain(err))
	}
	return nil
}
