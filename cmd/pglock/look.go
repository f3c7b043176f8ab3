package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/pglock"
)

const (
	// lockPatience bounds each wait of what only looks: with several of them, and
	// the question who is in the way, it stays below answerBound.
	lockPatience = 300 * time.Millisecond

	// lookBound is what all of them get together.
	lookBound = answerBound - 200*time.Millisecond
)

// beginLook sets the timeouts in the same round trip, and before the statement is
// sent: the server already opens tables to parse it.
var beginLook = pgx.TxOptions{BeginQuery: fmt.Sprintf("BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY; SET LOCAL lock_timeout = %d; SET LOCAL statement_timeout = %d",
	lockPatience.Milliseconds(), lookBound.Milliseconds())}

// look runs what only reads in a transaction of its own, which waits for nobody
// for long and leaves nothing behind on a pooler's connection. Where it had to
// wait, the error says for whom. Give statements pgx.QueryExecModeExec, for the
// same pooler's sake.
func look(ctx context.Context, pool *pgxpool.Pool, read func(context.Context, pgx.Tx) error) error {
	within, cancel := context.WithTimeout(ctx, lookBound)
	defer cancel()
	err := pgx.BeginTxFunc(within, pool, beginLook, func(tx pgx.Tx) error { return read(within, tx) })
	return explain(ctx, pool, err)
}

// explain turns errors of look that an operator can mend into ones that say how.
func explain(ctx context.Context, pool *pgxpool.Pool, err error) error {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return err
	}
	switch pg.Code {
	case "3F000", "42883", "42P01": // no such schema, function, table
		return fmt.Errorf("%w: %w", pglock.ErrNoSchema, err)
	case "42501":
		return &unseenError{pg}
	case "55P03":
		within, cancel := context.WithTimeout(ctx, lockPatience)
		defer cancel()
		if holders, err := tableHolders(within, pool); err == nil && len(holders) > 0 {
			return &waitError{holders, err}
		}
		return &waitError{err: err}
	}
	return err
}

// unseenError says that the role may not see something.
type unseenError struct{ *pgconn.PgError }

func (e *unseenError) Error() string { return e.Message }
func (e *unseenError) Unwrap() error { return e.PgError }

// waitError says who has a table that was to be read.
type waitError struct {
	holders []tableHolder
	err     error
}

func (e *waitError) Error() string {
	if len(e.holders) == 0 {
		return fmt.Sprintf("a table was locked for more than %v (pglock blocked shows who waits for whom)", lockPatience)
	}
	h := e.holders[0]
	s := fmt.Sprintf("table %s is locked by backend %d (%s)", h.Table, h.Pid, h.who())
	if !h.Granted {
		s = fmt.Sprintf("backend %d (%s) waits to lock table %s, and all others behind it (pglock blocked shows who is in its way)", h.Pid, h.who(), h.Table)
	}
	return s + fmt.Sprintf(": SELECT pg_terminate_backend(%d) ends it", h.Pid)
}

func (e *waitError) Unwrap() error { return e.err }

// Is makes it what exits as busy.
func (e *waitError) Is(target error) bool { return target == pglock.ErrLocked }

// tableHolder is a backend with a lock that keeps readers off a table.
type tableHolder struct {
	Table   string
	Pid     int32
	Granted bool
	Program string
	State   string
	Query   string
	Since   *time.Time
}

func (h tableHolder) who() string {
	s := cut(oneLine(h.Query), 60)
	if h.State != "" {
		s = h.State + ": " + s
	}
	if h.Since != nil {
		s = "for " + brief(time.Since(*h.Since)) + ", " + s
	}
	if h.Program != "" {
		s = h.Program + ", " + s
	}
	return s
}

// Who waits for such a lock is in the way of readers too. Nothing of the schema
// is opened.
const tableHoldersSQL = `SELECT c.oid::regclass::text, l.pid, l.granted, coalesce(a.application_name, ''), coalesce(a.state, ''),
	coalesce(a.query, ''), a.xact_start
FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock' AND l.pid <> pg_backend_pid()
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (n.nspname = 'pglock' OR EXISTS (SELECT FROM pg_trigger t WHERE t.tgrelid = c.oid AND t.tgname LIKE 'pglock\_protect%'))
ORDER BY l.granted DESC, a.xact_start, l.pid`

func tableHolders(ctx context.Context, pool *pgxpool.Pool) ([]tableHolder, error) {
	rows, _ := pool.Query(ctx, tableHoldersSQL, pgx.QueryExecModeExec) // its error comes with the rows
	return pgx.CollectRows(rows, pgx.RowToStructByPos[tableHolder])
}

// count is a number of things, in English.
func count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}
