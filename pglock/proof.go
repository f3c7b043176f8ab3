package pglock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"time"

	"github.com/jackc/pgx/v5"
)

// A server's own keepalive settings leave the locks of a client that is gone
// from the network in place for more than two hours. These free them in 15 s:
// a silent client is probed after 5 s, and given up after two more without an
// answer or when what was sent to it stays unconfirmed. They are three
// heartbeats, so that the holder knows before anybody else can have the lock.
// A unix socket takes them and has no use for them.
//
// Waiting is the context's to bound, and lock_timeout's where the caller's
// configuration sets it; a limit on statements is not meant for a statement
// whose work is to wait.
const sessionSQL = `SELECT set_config('tcp_keepalives_idle', '5', false),
	set_config('tcp_keepalives_interval', '5', false),
	set_config('tcp_keepalives_count', '2', false),
	set_config('tcp_user_timeout', '15000', false),
	set_config('statement_timeout', '0', false),
	CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL
		THEN set_config('transaction_timeout', '0', false) END`

// Without it a waiter whose client is gone stays in the line until it is
// granted. Not every system has it.
const checkClientSQL = `SELECT set_config('client_connection_check_interval', '5000', false)`

// keepAlive has the client's system ask after the server as the server's does
// after the client: a call that waits sends nothing, and would never learn that
// the network has gone silent. Where the connection is something else than TCP,
// that is its own to notice.
func keepAlive(conn *pgx.Conn) {
	c := conn.PgConn().Conn()
	if secured, ok := c.(interface{ NetConn() net.Conn }); ok {
		c = secured.NetConn()
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: heartbeat, Interval: heartbeat, Count: 2})
	}
}

const stubProbeSQL = `SELECT count(*) FROM pg_locks
WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted AND mode = 'ExclusiveLock'
  AND classid = $1::bigint::oid AND objid = $2::bigint::oid AND objsubid = 1`

// prove asks the server what a session lock relies on, before the first.
func prove(ctx context.Context, conn *pgx.Conn) error {
	var pid uint32
	var standby bool
	if err := conn.QueryRow(ctx, "SELECT pg_backend_pid(), pg_is_in_recovery()").Scan(&pid, &standby); err != nil {
		return fmt.Errorf("pglock: open a session: %w", err)
	}
	switch {
	case pid != conn.PgConn().PID():
		return fmt.Errorf("pglock: a pooler stands between client and server (backend %d answers for %d), where a session lock excludes nobody and may never be freed: "+
			"connect to the server itself, or use LockTx or a lease", pid, conn.PgConn().PID())
	case standby:
		return errors.New("pglock: the server is a standby, whose advisory locks are not the primary's: connect to the primary (target_session_attrs=read-write)")
	}
	for _, sql := range []string{sessionSQL, checkClientSQL} {
		// What the server doesn't know or allow, it does without.
		if _, err := conn.Exec(ctx, sql); err != nil && conn.IsClosed() {
			return fmt.Errorf("pglock: open a session: %w", err)
		}
	}

	var taken, freed bool
	var before, after int
	probe := KeyInt64(rand.Int64())
	classid, objid := probe.halves()
	batch := &pgx.Batch{}
	batch.Queue("SELECT pg_try_advisory_lock($1::bigint)", probe.number).QueryRow(func(row pgx.Row) error { return row.Scan(&taken) })
	batch.Queue(stubProbeSQL, int64(classid), int64(objid)).QueryRow(func(row pgx.Row) error { return row.Scan(&before) })
	batch.Queue("SELECT pg_advisory_unlock($1::bigint)", probe.number).QueryRow(func(row pgx.Row) error { return row.Scan(&freed) })
	batch.Queue(stubProbeSQL, int64(classid), int64(objid)).QueryRow(func(row pgx.Row) error { return row.Scan(&after) })
	if err := conn.SendBatch(ctx, batch).Close(); err != nil {
		return full(fmt.Errorf("pglock: try an advisory lock: %w", err))
	}
	if !taken || before != 1 || !freed || after != 0 {
		return fmt.Errorf("pglock: the server's advisory locks are not PostgreSQL's: it says that it locked (%t) and unlocked (%t) a key nobody uses, and pg_locks shows it %d times while held and %d times after: use a lease",
			taken, freed, before, after)
	}
	return nil
}

// roomSQL is how many locks of all kinds the server's table of locks is made
// for (PostgreSQL manual, 20.12 Lock Management).
const roomSQL = `SELECT current_setting('max_locks_per_transaction')::int *
	(current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int)`

// room returns how many locks a client may hold: half of the table. The rest is
// for what everybody's transactions lock, the rows of pg_class above all.
func room(ctx context.Context, conn *pgx.Conn) (most int, err error) {
	if err := conn.QueryRow(ctx, roomSQL).Scan(&most); err != nil {
		return 0, fmt.Errorf("pglock: open a session: %w", err)
	}
	return max(most/2, 1), nil
}

// endSession closes a connection and sees to it that nothing stays locked. The
// session's locks go when the server ends it, which it does in its own time:
// where the connection still works they are freed before; where it doesn't, pgx
// is closing it, and the wait is for that, up to a second.
//
// An error is no proof that a lock was not granted: a timeout or a cancel can
// cross the grant.
func endSession(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if !conn.IsClosed() {
		_, _ = conn.Exec(ctx, "SELECT pg_advisory_unlock_all()")
		_ = conn.Close(ctx)
	}
	select {
	case <-conn.PgConn().CleanupDone():
	case <-ctx.Done():
	}
}
