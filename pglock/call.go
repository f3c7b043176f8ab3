package pglock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// call runs one of the schema's functions in a transaction of its own, in one
// round trip, and hands its rows to scan. It returns the time just before the
// statement was sent. An error leaves the outcome unknown unless it comes from
// the server.
func (p *ownPool) call(ctx context.Context, scan func(pgx.Rows) error, sql string, args ...any) (sent time.Time, err error) {
	pool, err := p.open()
	if err != nil {
		return sent, err
	}
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return sent, err
	}
	defer p.giveBack(conn)
	sent = time.Now()
	err = send(ctx, conn.Conn(), scan, false, sql, args)
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Code == "54000" {
		// The NOTIFY queue is full, which has rolled the call back.
		sent = time.Now()
		err = send(ctx, conn.Conn(), scan, true, sql, args)
	}
	if err != nil {
		if astray(err) {
			closeConn(conn.Conn())
		}
		if unanswered(err) && (ctx.Err() == nil || context.Cause(ctx) == errSilent) {
			p.distrust(pool)
		}
		return sent, advise(err)
	}
	return sent, nil
}

func send(ctx context.Context, conn *pgx.Conn, scan func(pgx.Rows) error, quiet bool, sql string, args []any) error {
	data := conn.PgConn().CustomData()
	delete(data, unconfirmed)
	if data[otherLevel] == nil && !quiet {
		rows, err := conn.Query(ctx, sql, args...)
		if err == nil {
			err = read(rows, scan)
		}
		if err != nil {
			return err
		}
	} else {
		batch := &pgx.Batch{}
		batch.Queue("BEGIN ISOLATION LEVEL READ COMMITTED")
		if quiet {
			batch.Queue("SELECT set_config('pglock.quiet', pg_current_xact_id()::text, true)")
		}
		batch.Queue(sql, args...).Query(func(rows pgx.Rows) error { return read(rows, scan) })
		batch.Queue("COMMIT")
		if err := conn.SendBatch(ctx, batch).Close(); err != nil {
			return err
		}
	}
	if data[unconfirmed] != nil {
		return errUnconfirmed
	}
	return nil
}

func read(rows pgx.Rows, scan func(pgx.Rows) error) error {
	defer rows.Close()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// advise turns the server's errors that the database's administrator can mend
// into ones that say how; others stay as they are.
func advise(err error) error {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return err
	}
	switch pg.Code {
	case "3F000", "42883", "42P01": // no such schema, function, table
		if strings.Contains(pg.Message, "pglock") {
			return fmt.Errorf("%w: %w", ErrNoSchema, err)
		}
	case "42501": // no privilege
		return fmt.Errorf("pglock: the role lacks a grant: GRANT USAGE ON SCHEMA pglock, GRANT EXECUTE ON FUNCTION pglock.… (README, The schema, has them all): %w", err)
	case "25006": // read-only transaction
		return fmt.Errorf("%w: it takes no writes (a standby, or default_transaction_read_only): connect to the primary: %w", errUnfit, err)
	}
	return err
}

// astray says whether an error shows that the connection leads to a server that
// is no longer the one to ask.
func astray(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (pg.Code == "25006" || strings.HasPrefix(pg.Code, "57P"))
}

// unanswered says whether the answer was lost, so that the call may have had its
// effect and is worth repeating: the connection broke, or the server is
// shutting down.
func unanswered(err error) bool {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return astray(err) || strings.HasPrefix(pg.Code, "08")
	}
	for _, known := range []error{ErrClosed, ErrNoSchema, errUnfit, errUnconfirmed} {
		if errors.Is(err, known) {
			return false
		}
	}
	return true
}

// answerBound is how long a statement is waited for, on a network that has gone silent
// for example. What it may wait for on the server takes a second at most.
const answerBound = 5 * time.Second

var errSilent error = silence{}

type silence struct{}

func (silence) Error() string {
	return fmt.Sprintf("pglock: the server did not answer within %v", answerBound)
}
func (silence) Timeout() bool { return true }

// timed calls with a context that ends after answerBound.
func (p *ownPool) timed(ctx context.Context, call func(context.Context) error) error {
	bound, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer p.bounds.at(time.Now().Add(answerBound), func() { cancel(errSilent) }).stop()
	err := call(bound)
	if err != nil && context.Cause(bound) == errSilent {
		return errSilent // what the context says is not said of the caller's
	}
	return err
}

// repeat calls until an answer comes, a few times: safe for calls that have
// the effect of one. It reports whether an earlier call may have had its effect.
func (p *ownPool) repeat(ctx context.Context, call func(context.Context) error) (repeated bool, err error) {
	for try := 1; ; try++ {
		if err = p.timed(ctx, call); err == nil || !unanswered(err) || ctx.Err() != nil || try == attempts {
			return repeated, err
		}
		repeated = true
		select {
		case <-ctx.Done():
			return repeated, err
		case <-time.After(time.Duration(try) * 20 * time.Millisecond):
		}
	}
}
