package pglock

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"
)

// Lock is a session advisory lock: held by a connection of its own, for as long
// as that lives or until Release or Client.Close. It has no token: a holder
// that is cut off learns it within seconds, but what it has sent to a resource
// meanwhile is not refused there. Whoever needs that takes a lease. Safe for
// concurrent use.
//
// The connection is in no pool and in no transaction: MaxConnLifetime doesn't
// retire it, and it holds back no vacuum.
type Lock struct {
	client *Client
	key    Key
	conn   *pgx.Conn // the watch's, and after that Release's

	ctx context.Context
	end context.CancelCauseFunc

	unwatch context.CancelFunc // asks the watch to end
	watched chan struct{}      // closed when it has

	mu       sync.Mutex // orders Release calls, and guards what follows
	released bool
	outcome  error
}

// Lock waits until key is free, in the order of arrival that the server keeps,
// and locks it. It may be held longer than ctx: Release frees it.
//
// A Client's locks don't know each other: who asks again for a key that the
// same Client holds exclusively waits like anybody else. Each Lock takes a
// connection of its own, so that the server sees no deadlock between two
// programs that lock two keys crosswise: lock in one order. A holder that is
// stopped, but not dead, keeps the lock for as long as its system answers the
// server's keepalives: a lease ends.
//
// On an error nothing is held. A wait that ctx ended is a *BlockedError that
// matches ErrLocked and ctx.Err(); so is one longer than the lock_timeout in
// the pool's configuration, if there is one. Refused before anything is locked:
// an invalid key, a closed client (ErrClosed), a server behind a pooler, a
// standby, and a server that only claims to have advisory locks.
//
// While it waits, its session holds a snapshot, which CREATE INDEX CONCURRENTLY
// in the holder would wait for in turn. One statement on a new connection, after
// those that prove it (PostgreSQL manual, 9.27.10 Advisory Lock Functions); see
// KeyOf for the number of a name:
//
//	SELECT pg_advisory_lock($1)
func (c *Client) Lock(ctx context.Context, key Key) (*Lock, error) {
	return c.lock(ctx, key, func(ctx context.Context, conn *pgx.Conn) error {
		sql, args := key.call("pg_advisory_lock")
		if _, err := conn.Exec(ctx, sql, args...); err != nil {
			return waited(ctx, fmt.Sprintf("advisory lock %q", key), err)
		}
		return nil
	})
}

// TryLock is Lock that doesn't wait: where somebody else holds the key, another
// Lock of the same Client included, it returns a *BlockedError (ErrLocked) with
// the backends that do.
//
//	SELECT pg_try_advisory_lock($1)
func (c *Client) TryLock(ctx context.Context, key Key) (*Lock, error) {
	return c.lock(ctx, key, func(ctx context.Context, conn *pgx.Conn) error {
		sql, args := key.call("pg_try_advisory_lock")
		var locked bool
		if err := conn.QueryRow(ctx, sql, args...).Scan(&locked); err != nil {
			return fmt.Errorf("pglock: advisory lock %q: %w", key, err)
		}
		if locked {
			return nil
		}
		blocked := &BlockedError{What: fmt.Sprintf("advisory lock %q", key)}
		batch := &pgx.Batch{}
		key.queueHolders(batch, blocked)
		if err := conn.SendBatch(ctx, batch).Close(); err != nil {
			blocked.Err = err // locked it is all the same
		}
		return blocked
	})
}

// WithLock waits for key like Lock, runs fn and releases. The context that fn
// gets ends with ctx, and when the lock is lost or the client closed; fn has
// returned before the lock is freed, also when it panics. WithLock returns the
// errors of both: a loss while fn ran is ErrLost whatever fn returned.
func (c *Client) WithLock(ctx context.Context, key Key, fn func(context.Context) error) (err error) {
	leave, err := c.begin()
	if err != nil {
		return err
	}
	defer leave()
	l, err := c.Lock(ctx, key)
	if err != nil {
		return err
	}
	defer func() {
		if failed := l.Release(ctx); failed != nil {
			err = errors.Join(err, failed)
		}
	}()
	both, cancel := c.under(ctx, l.Context())
	defer cancel()
	return fn(both)
}

func (c *Client) lock(ctx context.Context, key Key, take func(context.Context, *pgx.Conn) error) (*Lock, error) {
	if err := key.check(); err != nil {
		return nil, err
	}
	call, leave, err := c.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	conn, err := c.openSession(call)
	if err == nil {
		if err = take(call, conn); err == nil {
			return c.hold(ctx, key, conn), nil
		}
		endSession(conn)
	}
	if cause := context.Cause(call); cause != nil && !errors.Is(err, cause) {
		err = fmt.Errorf("%w: %w", cause, err)
	}
	return nil, err
}

// hold makes the handle of what conn has locked.
func (c *Client) hold(ctx context.Context, key Key, conn *pgx.Conn) *Lock {
	l := &Lock{client: c, key: key, conn: conn, watched: make(chan struct{})}
	l.ctx, l.end = context.WithCancelCause(context.WithoutCancel(ctx))
	idle, unwatch := context.WithCancel(context.Background())
	l.unwatch = unwatch
	c.keep(l)
	go l.watch(idle)
	return l
}

// Key returns the key that was locked.
func (l *Lock) Key() Key { return l.key }

// Context ends when the lock is released, or within 5 s of the loss of its
// session, with the cause that Err returns. It carries the values of Lock's
// context, but does not end with it.
func (l *Lock) Context() context.Context { return l.ctx }

// Err returns nil while the lock is held, as far as is known; ErrReleased once
// Release has begun; and a *LostError, which matches ErrLost, when the session
// that held it has ended or was not heard of for 5 s.
func (l *Lock) Err() error { return context.Cause(l.ctx) }

// watch reads from the connection, so that the end of the session is seen at
// once, and asks for an answer twice a heartbeat, so that a silent network is
// seen within one. It has the connection until it returns.
func (l *Lock) watch(idle context.Context) {
	defer close(l.watched)
	defer l.unwatch()
	for {
		look, cancel := context.WithTimeout(idle, heartbeat/2)
		_, err := l.conn.WaitForNotification(look)
		cancel()
		if err != nil && !l.conn.IsClosed() {
			if idle.Err() != nil {
				return
			}
			// Not idle's: a Release must not break a connection that works.
			ask, cancel := context.WithTimeout(context.Background(), heartbeat/2)
			err = l.conn.Ping(ask)
			cancel()
		}
		if err != nil {
			l.end(l.lost(err))
			endSession(l.conn)
			l.client.drop(l)
			return
		}
	}
}

func (l *Lock) lost(err error) error {
	return &LostError{Name: l.key.String(), Cause: Unreachable, Err: err}
}

// Release frees the lock and closes its connection. It returns nil when the
// lock was held until then, also when it is called again; and a *LostError
// (ErrLost) when the session had ended before, or when the server can't be
// asked: the lock then ends with its connection. Nothing is held after either.
//
// It goes on for up to 5 s, whether ctx has ended or not. Call it after the
// work that the lock protects has ended. One statement:
//
//	SELECT pg_advisory_unlock($1)
func (l *Lock) Release(ctx context.Context) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.released {
		l.released = true
		l.end(ErrReleased)
		l.outcome = l.release(ctx)
	}
	return l.outcome
}

func (l *Lock) release(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), grace)
	defer cancel()
	defer l.client.drop(l)
	l.unwatch()
	<-l.watched // half a heartbeat away at the most
	if err := l.Err(); errors.Is(err, ErrLost) {
		return err
	}
	sql, args := l.key.call("pg_advisory_unlock")
	var held bool
	err := l.conn.QueryRow(ctx, sql, args...).Scan(&held)
	if err == nil && held {
		closeConn(l.conn)
		return nil
	}
	if err == nil {
		err = errors.New("its session did not hold it any more")
	}
	endSession(l.conn)
	return l.lost(err)
}
