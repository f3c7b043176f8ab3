package pglock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// minSchema is the lowest version of the schema that has the functions this
// package calls.
const minSchema = 13

// connectBound is how long a connection of the client's own may take to be made.
const connectBound = 5 * time.Second

// ownPool is a small pool of the client's, made at its first use from the
// caller's configuration. The caller's hooks for taking and returning
// connections stay out: they belong to the caller's own use.
type ownPool struct {
	client *Client
	max    int32
	bounds alarms // of the calls under way

	// replicated says that a commit waits for a synchronous standby.
	replicated atomic.Bool

	mu      sync.Mutex
	pool    *pgxpool.Pool
	closed  bool
	closing sync.WaitGroup // of broken connections
}

func (p *ownPool) open() (*pgxpool.Pool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, ErrClosed
	}
	if p.pool == nil {
		config := p.client.config.Copy()
		config.MaxConns, config.MinConns, config.MinIdleConns = p.max, 0, 0
		// A connection attempt keeps its place in the pool until it is given up.
		if limit := &config.ConnConfig.ConnectTimeout; *limit <= 0 || *limit > connectBound {
			*limit = connectBound
		}
		config.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) { return true, nil }
		config.AfterRelease, config.BeforeClose = nil, nil
		// Every call may be repeated, so that stale connections cost a second try;
		// a ping before each would cost a round trip.
		config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
		after := config.AfterConnect
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			if after != nil {
				if err := after(ctx, conn); err != nil {
					return err
				}
			}
			return p.greet(ctx, conn)
		}
		notice := config.ConnConfig.OnNotice
		config.ConnConfig.OnNotice = func(conn *pgconn.PgConn, n *pgconn.Notice) {
			if n.File == "syncrep.c" { // the message is translated
				conn.CustomData()[unconfirmed] = true
			}
			if notice != nil {
				notice(conn, n)
			}
		}
		pool, err := pgxpool.NewWithConfig(context.Background(), config)
		if err != nil {
			return nil, fmt.Errorf("pglock: %w", err)
		}
		p.pool = pool
	}
	return p.pool, nil
}

// giveBack returns a connection to the pool, or takes it out for good if it is
// closed or its transaction still open. A pool that had to close it would keep its
// place taken until pgx has drained it, 15 s on a network that has gone silent.
func (p *ownPool) giveBack(conn *pgxpool.Conn) {
	if !conn.Conn().IsClosed() && conn.Conn().PgConn().TxStatus() == 'I' {
		conn.Release()
		return
	}
	p.discard(conn)
}

// discard takes a connection out of the pool, and closes it in its own time.
func (p *ownPool) discard(conn *pgxpool.Conn) {
	broken := conn.Hijack()
	p.closing.Go(func() { closeConn(broken) })
}

// distrust takes out what lies idle: a connection has just turned out to be dead, and
// those that are older than that are probably dead too.
func (p *ownPool) distrust(pool *pgxpool.Pool) {
	for _, conn := range pool.AcquireAllIdle(context.Background()) {
		p.discard(conn)
	}
}

func (p *ownPool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	if p.pool != nil {
		p.pool.Close()
	}
	p.closing.Wait()
}

// unconfirmed marks a connection whose last commit no synchronous standby has
// confirmed, because the wait for it was cancelled: PostgreSQL then reports
// success with a warning, and a failover may undo it.
const unconfirmed = "pglock: unconfirmed"

var errUnconfirmed = errors.New("pglock: the wait for the synchronous standby was cancelled: a failover may undo it")

// otherLevel marks a connection whose transactions don't begin at READ
// COMMITTED by themselves.
const otherLevel = "pglock: other isolation level"

// errUnfit says that the server answers, but can't grant leases.
var errUnfit = errors.New("pglock: the server can't grant leases")

const greeting = `SELECT pg_is_in_recovery(), current_setting('default_transaction_read_only')::bool,
	current_setting('default_transaction_isolation'), pglock.schema_version(),
	current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local')`

// greet asks a new connection once whether leases can be taken there.
func (p *ownPool) greet(ctx context.Context, conn *pgx.Conn) error {
	var standby, readOnly, replicated bool
	var level string
	var version int64
	if err := conn.QueryRow(ctx, greeting).Scan(&standby, &readOnly, &level, &version, &replicated); err != nil {
		return advise(err)
	}
	switch {
	case standby:
		return fmt.Errorf("%w: it is a standby: connect to the primary (target_session_attrs=read-write)", errUnfit)
	case readOnly:
		return fmt.Errorf("%w: default_transaction_read_only is on: connect to a primary that takes writes", errUnfit)
	case version < minSchema:
		return fmt.Errorf("%w: it is at version %d, and this package needs %d", ErrNoSchema, version, minSchema)
	}
	if level != "read committed" && level != "read uncommitted" {
		conn.PgConn().CustomData()[otherLevel] = true
	}
	p.replicated.Store(replicated)
	if _, err := conn.Exec(ctx, `SELECT pglock.check_epoch()`); err != nil {
		return advise(err)
	}
	return nil
}
