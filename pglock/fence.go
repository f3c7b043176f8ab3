package pglock

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Fence accepts the token for the resource in the caller's transaction, and
// returns a *FencedError (ErrFenced) when a higher one was accepted before: the
// transaction is then aborted, and nothing of it can commit, unless it goes
// back to a savepoint, which undoes the fence too. Call it before the first
// read that the write depends on, in the transaction of the write; it holds
// others with a higher token up until that transaction ends. Fence several
// resources in the order of their names.
//
// The token may come from any lock service whose numbers only go up. Fence
// believes any token from any role that may execute it: one call with a huge
// number shuts the resource out until an administrator sets it back
// (pglock.list_fences and pglock.reset_fence, which application roles are not
// granted). Where the service's numbers begin again lower, as those of an etcd
// that was restored or of a Redis that lost its counter, the rightful holder is
// refused too: one that acquires anew gets ErrFenced again, with the same
// Highest, above all that the service now gives. (Where the resource is named
// after a lease of this database, and the token refused is the one held, the
// error is the server's "token regression", SQLSTATE PW003, and no ErrFenced.)
// Once no holder of before can
// still write, an administrator sets the resources back to the highest token of
// the new count:
//
//	SELECT pglock.reset_fence(resource, 3) FROM pglock.list_fences() WHERE resource LIKE 'accounts/%'
//
// For a lease of this database Guard and InTx are stronger: they
// believe only the lease row, and refuse a stale holder before the next one has
// written. Fence also lowers idle_in_transaction_session_timeout for this
// transaction to 30 s, unless SetHoldTimeout was called before. One statement:
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
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Code == codeFenced {
		return fenced(resource, pg, err)
	}
	if err != nil {
		return fmt.Errorf("fence resource %q: %w", resource, advise(err))
	}
	return nil
}

// fenced reads the tokens from the server's detail.
func fenced(resource string, pg *pgconn.PgError, err error) *FencedError {
	e := &FencedError{Resource: resource, Err: err}
	_, _ = fmt.Sscanf(pg.Detail, "presented %d, accepted %d", &e.Token, &e.Highest)
	return e
}
