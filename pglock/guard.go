package pglock

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// SQLSTATEs that the schema's functions and triggers raise.
const (
	codeFenced      = "PW001" // a higher token was accepted
	codeLost        = "PW002" // the tenure has ended
	codeUnpresented = "PW004" // a protected table, and no lease was presented
	codeMismatch    = "PW005" // a protected table, and none of those matches
	codeCutOff      = "25P03" // idle_in_transaction_session_timeout, which Guard and Fence lower
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
	return l.proven(guarded(l.name, l.token, err))
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
	return fmt.Errorf("guard lease %q: %w", name, explain(err))
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

// Explain turns the error with which a protected table refused a statement into
// this package's: a *FencedError (ErrFenced) if a later holder has been granted
// the lease that was presented, a *LostError (ErrLost) if it ended otherwise,
// and ErrUnpresented if no lease was presented, or none that matches the
// table's pattern. Any other error it returns as it is.
func Explain(err error) error {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || errors.Is(err, ErrFenced) || errors.Is(err, ErrLost) {
		return err
	}
	switch pg.Code {
	case codeFenced:
		if pg.TableName == "" { // pglock.fence, called by hand
			_, name, _ := strings.Cut(pg.Message, `"`)
			return fenced(name[:max(0, strings.LastIndex(name, `"`))], pg, err)
		}
		return fenced(pg.SchemaName+"."+pg.TableName, pg, err)
	case codeLost:
		lost := &LostError{Cause: guardCause(pg.Detail), Err: err}
		if m := notHeld.FindStringSubmatch(pg.Message); m != nil {
			lost.Name = m[1]
			n, _ := strconv.ParseInt(m[2], 10, 64)
			lost.Token = Token(n)
		}
		return lost
	case codeUnpresented, codeMismatch:
		return fmt.Errorf("%w: %w. %s %s", ErrUnpresented, err, pg.Detail, pg.Hint)
	case codeCutOff:
		return fmt.Errorf("pglock: the transaction was idle for longer than the lease's TTL, and was cut off (SetHoldTimeout, first thing in it, sets another bound): %w", err)
	}
	return err
}

// notHeld finds the lease and the token in what guards and triggers say.
var notHeld = regexp.MustCompile(`(?s)lease "(.*)" with token (-?\d+) is not held$`)

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

// InTx runs fn in a transaction of its own under the lease, at the pool's default
// isolation level: it begins, guards and presents (Guard, Present), runs fn and
// commits. The context of fn ends with ctx and with the lease's. When fn returns
// an error or panics the transaction is rolled back; the error is fn's, turned
// by Explain. Otherwise InTx returns COMMIT's error, turned likewise: only nil
// says that the write is in. Three round trips and fn's.
//
// With synchronous standbys nil says less: a COMMIT whose wait for them is
// cancelled (pg_cancel_backend, a shutdown) succeeds, with a WARNING that the
// write may not be replicated. It reaches only the OnNotice of the pool's
// ConnConfig, which is the caller's to set.
func (l *Lease) InTx(ctx context.Context, pool *pgxpool.Pool, fn func(context.Context, pgx.Tx) error) error {
	proven := false
	err := Explain(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := l.proven(Present(ctx, tx, l.name, l.token)); err != nil {
			return err
		}
		proven = true
		both, cancel := join(ctx, l.Context())
		defer cancel()
		return fn(both, tx)
	}))
	if lost := l.Err(); err != nil && !proven && errors.Is(lost, ErrLost) && !errors.Is(err, ErrLost) {
		return fmt.Errorf("%w: %w", lost, err) // nobody could be asked, and this process knows by itself
	}
	return err
}
