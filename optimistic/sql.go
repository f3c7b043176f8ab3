package optimistic

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// SQL makes a DB of a *sql.DB whose driver is pgx's stdlib, so that a program on
// database/sql needs no second pool:
//
//	row, err := accounts.Update(ctx, optimistic.SQL(db), 1, fn)
//
// Each call takes a connection out of db's pool and gives it back. With another
// driver every method is an error, before any SQL.
func SQL(db *sql.DB) DB { return &sqlDB{db} }

// SQLTx makes a DB of a *sql.Tx whose driver is pgx's stdlib. The functions of
// this package join the transaction and leave COMMIT to its owner, as they do
// for a pgx.Tx. Where that one has ended they return sql.ErrTxDone.
func SQLTx(tx *sql.Tx) DB { return &sqlTx{tx} }

type sqlDB struct{ db *sql.DB }

// acquire reserves a connection. database/sql leaves it alone until it is given
// back, and then finds out by itself whether it is broken.
func (s *sqlDB) acquire(ctx context.Context) (*pgx.Conn, func(), error) {
	if s.db == nil {
		return nil, nil, errors.New("optimistic: SQL was given a nil *sql.DB")
	}
	reserved, err := s.db.Conn(ctx)
	if err != nil {
		return nil, nil, err
	}
	var conn *pgx.Conn
	err = reserved.Raw(func(driver any) error {
		c, ok := driver.(interface{ Conn() *pgx.Conn })
		if !ok {
			return fmt.Errorf("optimistic: the *sql.DB's driver connection is %T: open it with pgx's stdlib", driver)
		}
		conn = c.Conn()
		return nil
	})
	if err != nil {
		return nil, nil, errors.Join(err, reserved.Close())
	}
	return conn, func() { _ = reserved.Close() }, nil // nothing is open on it any more
}

func (s *sqlDB) Exec(ctx context.Context, query string, args ...any) (pgconn.CommandTag, error) {
	conn, release, err := s.acquire(ctx)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	defer release()
	return conn.Exec(ctx, query, args...)
}

func (s *sqlDB) Query(ctx context.Context, query string, args ...any) (pgx.Rows, error) {
	conn, release, err := s.acquire(ctx)
	if err != nil {
		return nil, err
	}
	rows, err := conn.Query(ctx, query, args...)
	if err != nil {
		release()
		return nil, err
	}
	return &releasingRows{rows, release}, nil
}

func (s *sqlDB) Begin(ctx context.Context) (pgx.Tx, error) {
	return s.BeginTx(ctx, pgx.TxOptions{})
}

func (s *sqlDB) BeginTx(ctx context.Context, o pgx.TxOptions) (pgx.Tx, error) {
	conn, release, err := s.acquire(ctx)
	if err != nil {
		return nil, err
	}
	tx, err := conn.BeginTx(ctx, o)
	if err != nil {
		release()
		return nil, err
	}
	return &releasingTx{tx, release}, nil
}

// releasingRows give their connection back when they are closed.
type releasingRows struct {
	pgx.Rows
	release func()
}

func (r *releasingRows) Close() {
	r.Rows.Close()
	r.release() // a second time it is nothing
}

// releasingTx gives its connection back when it ends.
type releasingTx struct {
	pgx.Tx
	release func()
}

func (t *releasingTx) Commit(ctx context.Context) error {
	defer t.release()
	return t.Tx.Commit(ctx)
}

func (t *releasingTx) Rollback(ctx context.Context) error {
	defer t.release()
	return t.Tx.Rollback(ctx)
}

type sqlTx struct{ tx *sql.Tx }

// on runs fn on the transaction's connection. A *sql.Tx has no Raw, but pgx asks
// an argument that is a QueryRewriter for the statement to send, and lends it
// the connection for that. fn runs inside, where database/sql holds its own lock
// on the connection: a context that ends would otherwise roll back in the middle
// of fn, on the same socket. The statement itself is never sent.
func (s *sqlTx) on(ctx context.Context, fn func(*pgx.Conn) error) error {
	if s.tx == nil {
		return errors.New("optimistic: SQLTx was given a nil *sql.Tx")
	}
	l := &lender{fn: fn}
	_, err := s.tx.ExecContext(ctx, "/* optimistic */", l)
	if l.ran {
		return l.err
	}
	if err == nil {
		err = errors.New("optimistic: the *sql.Tx's driver is not pgx's stdlib")
	}
	return err
}

type lender struct {
	fn  func(*pgx.Conn) error
	ran bool
	err error
}

var errLent = errors.New("optimistic: not sent")

func (l *lender) RewriteQuery(_ context.Context, conn *pgx.Conn, _ string, _ []any) (string, []any, error) {
	l.ran = true
	l.err = l.fn(conn)
	return "", nil, errLent
}

func (s *sqlTx) Exec(ctx context.Context, query string, args ...any) (tag pgconn.CommandTag, err error) {
	err = s.on(ctx, func(conn *pgx.Conn) error {
		tag, err = conn.Exec(ctx, query, args...)
		return err
	})
	return tag, err
}

// each runs a query to its end while it has the connection.
func (s *sqlTx) each(ctx context.Context, query string, args []any, fn func(pgx.Rows) error) error {
	return s.on(ctx, func(conn *pgx.Conn) error { return each(ctx, conn, query, args, fn) })
}

// Query would have to hold the connection until its rows are closed. Nothing
// here calls it: see each.
func (s *sqlTx) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, fmt.Errorf("optimistic: rows of a *sql.Tx: %w: use its own QueryContext", errors.ErrUnsupported)
}

// Begin has no use in a transaction that somebody else began.
func (s *sqlTx) Begin(context.Context) (pgx.Tx, error) {
	return nil, fmt.Errorf("optimistic: begin in a *sql.Tx: %w", errors.ErrUnsupported)
}
