package optimistic

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// DB is where a statement runs. *pgxpool.Pool, *pgxpool.Conn, *pgx.Conn and
// pgx.Tx satisfy it; SQL and SQLTx make one of a *sql.DB and a *sql.Tx. Given a
// transaction, or a connection inside one, the functions of this package join
// that transaction and never end it; given anything else they commit what they
// do.
type DB interface {
	Begin(ctx context.Context) (pgx.Tx, error)
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// checkDB refuses what would end in a panic inside pgx, and a context that is
// over, so that no SQL is sent for it.
func checkDB(ctx context.Context, db DB) error {
	if v := reflect.ValueOf(db); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return fmt.Errorf("optimistic: db is nil (%T): pass a pool, a connection or a transaction", db)
	}
	return ctx.Err()
}

// joined says whether db stands in a transaction that the caller began.
func joined(db DB) bool {
	switch d := db.(type) {
	case pgx.Tx, *sqlTx:
		return true
	case *pgx.Conn:
		return d.PgConn().TxStatus() != 'I'
	case *pgxpool.Conn:
		return d.Conn().PgConn().TxStatus() != 'I'
	}
	return false
}

// each runs one statement and calls fn for each row that it returns. The rows
// are read to their end, because an error at the end (a deferred constraint, a
// commit that failed) comes after them.
func each(ctx context.Context, db DB, sql string, args []any, fn func(pgx.Rows) error) error {
	if tx, ok := db.(*sqlTx); ok {
		return tx.each(ctx, sql, args, fn)
	}
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := fn(rows); err != nil {
			return &decodeError{err}
		}
	}
	return rows.Err()
}

// A decodeError is a row that came and couldn't be put into a T. It ends the
// reading, so what the server said after the row was never seen.
type decodeError struct{ err error }

func (e *decodeError) Error() string { return "decode: " + e.err.Error() }
func (e *decodeError) Unwrap() error { return e.err }

// write runs one writing statement. In the caller's transaction an error needs
// no thought: nothing was committed. Elsewhere the statement is its own commit,
// and an error counts as known only if the server itself reported the statement
// as failed or if it was never sent. The pool's connection is taken here, and
// not by the pool's own Query, because only the connection tells the two kinds
// of other errors apart: one that couldn't encode an argument stays open, one
// that lost the answer doesn't.
func write(ctx context.Context, db DB, stmt func(DB) error) error {
	if joined(db) {
		return stmt(db)
	}
	var conn *pgx.Conn
	switch d := db.(type) {
	case *pgxpool.Pool:
		c, err := d.Acquire(ctx)
		if err != nil {
			return err
		}
		defer c.Release()
		db, conn = c, c.Conn()
	case *sqlDB:
		c, release, err := d.acquire(ctx)
		if err != nil {
			return err
		}
		defer release()
		db, conn = c, c
	case *pgxpool.Conn:
		conn = d.Conn()
	case *pgx.Conn:
		conn = d
	}
	err := stmt(db)
	var decode *decodeError
	if err == nil || known(err) || conn != nil && !conn.IsClosed() && !errors.As(err, &decode) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnknownCommit, err)
}

// known says whether err by itself proves that the statement it answers was not
// committed. FATAL doesn't: a server process that is told to go may do so after
// its commit.
func known(err error) bool {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		severity := pg.SeverityUnlocalized
		return severity != "FATAL" && severity != "PANIC"
	}
	return pgconn.SafeToRetry(err) || errors.Is(err, pgx.ErrTxCommitRollback) || errors.Is(err, pgx.ErrTxClosed)
}

// within runs fn in a transaction of its own at READ COMMITTED, whatever the
// database's default: above it a row lock that had to wait is 40001. Inside a
// transaction of the caller's it is a savepoint, so that a lock timeout leaves
// that transaction usable. What fn did stays only if it returns true and nil.
func within(ctx context.Context, db DB, fn func(DB) (bool, error)) error {
	if joined(db) {
		return withinSavepoint(ctx, db, fn)
	}
	var tx pgx.Tx
	var err error
	if b, ok := db.(interface {
		BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error)
	}); ok {
		tx, err = b.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	} else {
		tx, err = db.Begin(ctx)
	}
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer rollback(ctx, tx)
	if keep, err := fn(tx); err != nil || !keep {
		return err
	}
	return commit(ctx, tx)
}

// withinSavepoint spells the savepoint out: pgx has one only for a pgx.Tx, and
// Begin on a connection whose transaction was begun by hand would commit it.
func withinSavepoint(ctx context.Context, db DB, fn func(DB) (bool, error)) error {
	if _, err := db.Exec(ctx, "SAVEPOINT pawl_optimistic"); err != nil {
		return fmt.Errorf("savepoint: %w", err)
	}
	kept := false
	defer func() {
		if !kept {
			ctx, cancel := detached(ctx)
			defer cancel()
			// An error here is a broken connection, and with it the caller's
			// transaction: the error that led here says so already.
			_, _ = db.Exec(ctx, "ROLLBACK TO SAVEPOINT pawl_optimistic")
			_, _ = db.Exec(ctx, "RELEASE SAVEPOINT pawl_optimistic")
		}
	}()
	keep, err := fn(db)
	if err != nil || !keep {
		return err
	}
	if _, err := db.Exec(ctx, "RELEASE SAVEPOINT pawl_optimistic"); err != nil {
		return fmt.Errorf("release savepoint: %w", err)
	}
	kept = true
	return nil
}

// commit commits tx and says so when the answer doesn't tell whether it did.
func commit(ctx context.Context, tx pgx.Tx) error {
	err := tx.Commit(ctx)
	switch {
	case err == nil:
		return nil
	case known(err):
		return fmt.Errorf("commit: %w", err)
	}
	return fmt.Errorf("commit: %w: %w", ErrUnknownCommit, err)
}

// rollback ends tx, if it is still open, even when ctx is over: the row lock in
// it holds up others.
func rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := detached(ctx)
	defer cancel()
	_ = tx.Rollback(ctx) // nothing was to be kept; a broken connection rolls back too
}

// detached is ctx without its end, bounded.
func detached(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
}
