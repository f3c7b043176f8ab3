package pglock

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// RowLock says how to lock rows (PostgreSQL manual, 13.3.2 Row-Level Locks):
// what else it keeps out, and what to do about a row that is locked already.
// The zero RowLock is ForNoKeyUpdate.
type RowLock struct {
	strength strength
	wait     wait
}

type (
	strength uint8 // an index into strengths
	wait     uint8 // an index into waits
)

const (
	noKeyUpdate strength = iota
	update
	share
	keyShare
)

const (
	untilFree wait = iota
	noWait
	skipLocked
)

var (
	strengths = [...]string{"FOR NO KEY UPDATE", "FOR UPDATE", "FOR SHARE", "FOR KEY SHARE"}
	waits     = [...]string{"", " NOWAIT", " SKIP LOCKED"}
)

// The row locks. Each waits for a row that is locked in a way that it can't
// stand beside; NoWait and SkipLocked don't.
var (
	// ForNoKeyUpdate is for rows about to be updated. It keeps out every other
	// writer and locker but ForKeyShare, which is what the foreign key check of
	// a child row's INSERT takes: children can be added meanwhile.
	ForNoKeyUpdate = RowLock{strength: noKeyUpdate}

	// ForUpdate is for rows about to be deleted, or to have their key changed.
	// It keeps out everything, and every INSERT of a child row too.
	ForUpdate = RowLock{strength: update}

	// ForShare is for rows that must not change. It stands beside itself and
	// ForKeyShare.
	ForShare = RowLock{strength: share}

	// ForKeyShare is for rows that must not go away. It keeps out only
	// ForUpdate, DELETE and changes of the key.
	ForKeyShare = RowLock{strength: keyShare}
)

// NoWait returns the same lock, refused at once with a *BlockedError where a
// row is locked. It replaces SkipLocked.
//
// A refusal, and only that, costs a statement more, which asks who is in the
// way: it runs the query again, twice, under a savepoint, and looks into
// pg_locks. Pids is empty where FROM is anything but the name of a table, where
// nobody is in the way any more, and where the row was locked under a savepoint
// that was released since, as NoWait does, and several backends may have it.
func (r RowLock) NoWait() RowLock {
	r.wait = noWait
	return r
}

// SkipLocked returns the same lock, which leaves out rows that are locked, as
// if they were not there: for taking work from a table, not for reading it. It
// replaces NoWait.
func (r RowLock) SkipLocked() RowLock {
	r.wait = skipLocked
	return r
}

// String returns the clause in SQL.
func (r RowLock) String() string {
	return strengths[r.strength] + waits[r.wait]
}

// LockRow runs a SELECT for one row, locks the row until tx ends and returns it
// as it stands under the lock. It adds the lock clause itself:
//
//	SELECT balance FROM accounts WHERE id = $1
//	FOR NO KEY UPDATE
//
// scan reads the row: pgx.RowTo, pgx.RowToStructByName and their kin. args are
// as for tx.Query.
//
// These errors leave tx usable:
//
//   - No such row is ErrNotFound (and pgx.ErrNoRows). With SkipLocked, so is a
//     row that is locked.
//   - More rows than one is pgx.ErrTooManyRows. All of them stay locked until
//     tx ends: select by a unique key, or use LockRows.
//   - A query whose rows a clause would not lock, or not as they are returned,
//     is refused before any SQL: one with GROUP BY, HAVING, DISTINCT, UNION and
//     the like, aggregates, window functions, functions that return a set (but
//     in FROM), an outer join that makes up rows of a table, a WITH query that
//     writes, a FOR clause of its own, no table in its FROM, or another
//     statement behind it; SkipLocked with WITH TIES; and any of these in a
//     sub-select in FROM.
//   - With NoWait, a locked row is a *BlockedError (ErrLocked), and then, as
//     after any error but a broken connection, no row stays locked: it runs
//     between SAVEPOINT and RELEASE, at the price of two round trips, a
//     transaction id of its own, and a multixact when the row is then updated.
//
// These abort tx, which can only be rolled back (or back to a savepoint of the
// caller's: tx.Begin makes one):
//
//   - A wait longer than lock_timeout (SetLockTimeout) is a *BlockedError,
//     without Pids: who was in the way can't be asked in a transaction that is
//     aborted. A savepoint for every wait, against a timeout that is the
//     exception, would cost all the others. While the wait lasts,
//     pg_blocking_pids tells any other session.
//   - ctx ended before the answer came: a *BlockedError that matches ctx.Err()
//     too, and the connection is closed. Whether a lock was waited for, or the
//     query is slow, can't be told from here; the message says that it was
//     given up. A statement_timeout is the server's error as it is, 57014.
//   - A query whose text doesn't show that its rows can't be locked (a view
//     that groups, an aggregate of the user's own, a materialized view) is
//     refused by the server.
//   - A transaction that the server has ended for its hold timeout
//     (SetHoldTimeout) is ErrLost, where the server's word of it gets through.
//   - A deadlock, which PostgreSQL resolves at the expense of one side, is
//     named as one; a row changed since the snapshot at REPEATABLE READ and
//     above is 40001. In both cases the whole transaction is to be run again.
//
// A lock on the whole table (ALTER TABLE, say) is waited for even with NoWait
// and SkipLocked. Rows of WITH queries and functions are not locked; those of a
// sub-select in FROM are, in each table that it names. More rows are locked than
// returned with OFFSET, with a sub-select in FROM that has a LIMIT and a WHERE
// outside it, and with SkipLocked on a join, where one row was free and its
// partner was not.
func LockRow[T any](ctx context.Context, tx pgx.Tx, how RowLock, scan pgx.RowToFunc[T], sql string, args ...any) (T, error) {
	return lock(ctx, tx, how, false, sql, args, func(rows pgx.Rows) (T, error) {
		row, err := pgx.CollectExactlyOneRow(rows, scan)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			err = fmt.Errorf("%w: %w", ErrNotFound, err)
		case errors.Is(err, pgx.ErrTooManyRows):
			err = fmt.Errorf("pglock: %w: LockRow is for one, select it by a unique key", err)
		}
		return row, err
	})
}

// LockRows runs a SELECT, locks the rows until tx ends, in the order of its
// ORDER BY, and returns them as they stand under the lock. No rows is an empty
// slice and no error. Everything else is as with LockRow.
//
// It refuses a query without ORDER BY before any SQL: two callers that lock the
// same rows in different orders wait for each other for ever. Order by what
// can't change, such as the primary key, and alike everywhere. With SkipLocked,
// which waits for no row, the order is the caller's to leave out:
//
//	SELECT id, payload FROM jobs WHERE done_at IS NULL ORDER BY id LIMIT 10
//	FOR UPDATE SKIP LOCKED
//
// At READ COMMITTED a row that another transaction has just changed is judged
// and returned anew after the wait, in the place of the old: the answer may
// then be out of order, and one that no longer fits is left out of a LIMIT
// (PostgreSQL manual, SELECT, The Locking Clause).
func LockRows[T any](ctx context.Context, tx pgx.Tx, how RowLock, scan pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	return lock(ctx, tx, how, how.wait != skipLocked, sql, args, func(rows pgx.Rows) ([]T, error) {
		return pgx.CollectRows(rows, scan)
	})
}

func lock[R any](ctx context.Context, tx pgx.Tx, how RowLock, order bool, sql string, args []any, collect func(pgx.Rows) (R, error)) (R, error) {
	var none R
	if err := ctx.Err(); err != nil {
		return none, err
	}
	q, err := lockable(sql)
	if err != nil {
		return none, err
	}
	if order && !q.ordered {
		return none, fmt.Errorf("pglock: can't lock the rows of %.80q: without ORDER BY two callers can lock them in different orders and wait for each other", sql)
	}
	if q.ties && how.wait == skipLocked {
		return none, fmt.Errorf("pglock: can't lock the rows of %.80q: WITH TIES can't tell what a row that SkipLocked leaves out would tie with: use LIMIT", sql)
	}
	// The clause has a line of its own: behind a comment it would be part of it.
	sql = q.sql + "\n" + how.String()

	if how.wait != noWait {
		return query(ctx, tx, sql, args, collect)
	}
	if _, err := tx.Exec(ctx, "SAVEPOINT pglock"); err != nil {
		return none, fmt.Errorf("pglock: savepoint: %w", err)
	}
	answer, err := query(ctx, tx, sql, args, collect)
	if err == nil {
		_, err = tx.Exec(ctx, "RELEASE SAVEPOINT pglock")
		return answer, err
	}
	var blocked *BlockedError
	var back error
	if errors.As(err, &blocked) {
		// Who asks may not wait long for a lock on the table.
		if _, back = tx.Exec(ctx, "ROLLBACK TO SAVEPOINT pglock; SET LOCAL lock_timeout = '100ms'"); back == nil {
			q.blockers(ctx, tx, how, args, blocked)
		}
	}
	if back == nil {
		_, back = tx.Exec(ctx, "ROLLBACK TO SAVEPOINT pglock; RELEASE SAVEPOINT pglock")
	}
	if back != nil && ctx.Err() == nil {
		err = errors.Join(err, back)
	}
	return none, err
}

func query[R any](ctx context.Context, tx pgx.Tx, sql string, args []any, collect func(pgx.Rows) (R, error)) (R, error) {
	rows, err := tx.Query(ctx, sql, args...)
	if err == nil {
		var answer R
		if answer, err = collect(rows); err == nil {
			return answer, nil
		}
	}
	var none R
	var pg *pgconn.PgError
	if errors.As(err, &pg) && (pg.Code == "0A000" || pg.Code == "42809") { // feature_not_supported, wrong_object_type
		return none, fmt.Errorf("pglock: can't lock the rows of %.80q: %w", sql, err)
	}
	return none, waited(ctx, "a row", err)
}

// waited says what an error means to a caller who asked for a lock.
func waited(ctx context.Context, what string, err error) error {
	var pg *pgconn.PgError
	errors.As(err, &pg)
	ended := ctx.Err()
	switch {
	case pg != nil && pg.Code == "55P03": // lock_not_available
		if pg.Where != "" {
			what += " (" + pg.Where + ")"
		}
		return &BlockedError{What: what, Err: err}
	case pg != nil && pg.Code == "40P01":
		return fmt.Errorf("pglock: deadlock, which aborts this transaction; %s: %w", pg.Detail, err)
	case pg != nil && (pg.Code == "25P03" || pg.Code == "25P04"): // idle_in_transaction_session_timeout, transaction_timeout
		return fmt.Errorf("%w: the server has ended a transaction that was kept open too long (SetHoldTimeout), with its locks and writes: %w", ErrLost, err)
	case ended != nil && pg != nil && pg.Code == "57014": // query_canceled, on behalf of ctx
		return &BlockedError{What: what, Err: fmt.Errorf("%w: %w", ended, err)}
	case ended != nil && errors.Is(err, ended):
		return &BlockedError{What: what, Err: err}
	}
	return err
}
