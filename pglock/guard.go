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
	return l.refused(ctx, l.proven(guarded(l.name, l.token, err)))
}

// Present does what Guard does, and presents the lease to the protected tables
// (SELECT pglock.protect('accounts', 'accounts/%')) that the transaction will
// write to; several presents add up. It takes a name and a token, for code that
// was handed a token and has no *Lease; the role must be the one that acquired.
// What is presented may expire before the transaction ends, and its writes are
// still accepted: nobody is granted the lease meanwhile. A statement that a
// protected table refuses aborts the transaction with an error that Explain turns
// into this package's. One statement:
//
//	SELECT pglock.present('accounts/42', 17)
func Present(ctx context.Context, tx pgx.Tx, name string, token Token) error {
	if err := checkName("lease", name); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `SELECT pglock.present($1::text, $2::bigint)`, name, int64(token))
	return guarded(name, token, err)
}

// guarded turns the error of a guard into this package's.
func guarded(name string, token Token, err error) error {
	if err == nil {
		return nil
	}
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Code == codeLost {
		return &LostError{Name: name, Token: token, Cause: guardCause(pg.Detail), Err: fmt.Errorf("%s: %w", pg.Detail, err)}
	}
	return fmt.Errorf("guard lease %q: %w", name, advise(err))
}

// proven ends the lease for this process when the server says that it is lost.
func (l *Lease) proven(err error) error {
	lost, ok := errors.AsType[*LostError](err)
	if !ok {
		return err
	}
	if context.Cause(l.Context()) == ErrReleased {
		return l.lost(GivenBack, fmt.Errorf("%w: %w", ErrReleased, lost.Err))
	}
	l.client.keeper.drop(l)
	l.lose(lost.Cause, lost.Err)
	return err
}

// InTx runs fn in a transaction of its own under the lease, at the pool's default
// isolation level: it begins, guards and presents (Guard, Present), runs fn and
// commits. The context of fn ends with ctx and with the lease's. When fn returns
// an error or panics the transaction is rolled back; the error is fn's, turned
// by Explain. Otherwise InTx returns COMMIT's error, turned likewise: only nil
// says that the write is in. Two round trips and fn's, as many as without the
// lease; a refused one costs the pool its connection.
//
// With synchronous standbys nil says less: a COMMIT whose wait for them is
// cancelled (pg_cancel_backend, a shutdown) succeeds, with a WARNING that the
// write may not be replicated. It reaches only the OnNotice of the pool's
// ConnConfig, which is the caller's to set.
func (l *Lease) InTx(ctx context.Context, pool *pgxpool.Pool, fn func(context.Context, pgx.Tx) error) error {
	proven := false
	begin := fmt.Sprintf("BEGIN; SELECT pglock.present(%s, %d)", asLiteral(l.name), l.token)
	err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{BeginQuery: begin}, func(tx pgx.Tx) error {
		proven = true
		both, cancel := join(ctx, l.Context())
		defer cancel()
		return fn(both, tx)
	})
	if proven {
		return l.refused(ctx, Explain(err))
	}
	err = l.proven(guarded(l.name, l.token, err))
	if lost := l.Err(); errors.Is(lost, ErrLost) && !errors.Is(err, ErrLost) {
		return fmt.Errorf("%w: %w", lost, err) // nobody could be asked, and this process knows by itself
	}
	return l.refused(ctx, err)
}

// refused tells the observer of a write under the lease that the server has
// refused. A loss of another lease is told by that one's Guard.
func (l *Lease) refused(ctx context.Context, err error) error {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return err
	}
	lost, _ := errors.AsType[*LostError](err)
	if pg.Code == codeFenced || pg.Code == codeLost && lost != nil && lost.Token == l.token {
		tell(ctx, l.client, Fenced{Name: l.name, Token: l.token, Err: err})
	}
	return err
}

// asLiteral quotes a name for SQL, whatever standard_conforming_strings says.
func asLiteral(name string) string {
	return "E'" + strings.NewReplacer(`\`, `\\`, `'`, `''`).Replace(name) + "'"
}
