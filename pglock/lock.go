package pglock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// Lock is a session advisory lock: held by a connection of the client's own, for
// as long as that lives or until Release or Client.Close. It has no token: a
// holder that is cut off learns it within seconds, but what it has sent to a
// resource meanwhile is not refused there. Whoever needs that takes a lease. Safe
// for concurrent use.
//
// Many locks share a connection, and end together if it is lost. It is in no pool
// and in no transaction: MaxConnLifetime doesn't retire it, and it holds back no
// vacuum. A client that holds no lock closes it after a second.
type Lock struct {
	client  *Client
	key     Key
	session *session
	since   time.Time

	ctx context.Context
	end context.CancelCauseFunc

	mu       sync.Mutex // orders Release calls, and guards what follows
	released bool
	outcome  error
}

// Lock waits until key is free, in the order of arrival that the server keeps,
// and locks it. It may be held longer than ctx: Release frees it.
//
// A Client's locks don't know each other: who asks again for a key that the
// same Client holds exclusively waits like anybody else. A call that waits has a
// connection to itself until it is granted, so that no release is behind it; and
// so the server sees no deadlock between two programs that lock two keys
// crosswise: lock in one order, or with LockAll. A holder that is stopped, but
// not dead, keeps the lock for as long as its system answers the server's
// keepalives: a lease ends.
//
// On an error nothing is held. A wait that ctx ended is a *BlockedError that
// matches ErrLocked and ctx.Err(); so is one longer than the lock_timeout in
// the pool's configuration, if there is one. A *FullError (ErrFull) says that
// more locks would leave the server no room. Refused before anything is locked:
// an invalid key, a closed client (ErrClosed), a server behind a pooler, a
// standby, and a server that only claims to have advisory locks.
//
// While it waits, its session holds a snapshot, which CREATE INDEX CONCURRENTLY
// in the holder would wait for in turn: see WithPolling. One statement where the
// key is free, and else one more, in which it waits; before the first, those that
// prove a new connection (PostgreSQL manual, 9.27.10 Advisory Lock Functions);
// see KeyOf for the number of a name:
//
//	SELECT pg_try_advisory_lock($1)
//	SELECT pg_advisory_lock($1)
func (c *Client) Lock(ctx context.Context, key Key) (*Lock, error) {
	return c.lock(ctx, key, func(ctx context.Context) (*Lock, error) {
		l, err := c.bank.try(ctx, key, false)
		switch {
		case !errors.Is(err, ErrLocked):
			return l, err
		case c.polling:
			return c.bank.poll(ctx, key)
		}
		return c.bank.wait(ctx, key)
	})
}

// TryLock is Lock that doesn't wait: where somebody else holds the key, another
// Lock of the same Client included, or waits for it, it returns a *BlockedError
// (ErrLocked) with the backends that hold it.
//
//	SELECT pg_try_advisory_lock($1)
func (c *Client) TryLock(ctx context.Context, key Key) (*Lock, error) {
	return c.lock(ctx, key, func(ctx context.Context) (*Lock, error) { return c.bank.try(ctx, key, true) })
}

// LockAll waits for every key like Lock, one after the other in the order of
// their values, so that no two callers wait for each other. The locks come in
// that order, each key once and in the stronger of the modes asked for. On an
// error it has released what it had.
func (c *Client) LockAll(ctx context.Context, keys ...Key) ([]*Lock, error) {
	keys, err := forCall(ctx, keys)
	if err != nil {
		return nil, err
	}
	var locks []*Lock
	for _, key := range keys {
		l, err := c.Lock(ctx, key)
		if err != nil {
			errs := []error{err}
			for _, l := range locks {
				errs = append(errs, l.Release(ctx))
			}
			return nil, errors.Join(errs...)
		}
		locks = append(locks, l)
	}
	return locks, nil
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

func (c *Client) lock(ctx context.Context, key Key, take func(context.Context) (*Lock, error)) (*Lock, error) {
	if err := key.check(); err != nil {
		return nil, err
	}
	call, leave, err := c.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	l, err := take(call)
	if err == nil {
		return l, nil
	}
	if cause := context.Cause(call); cause != nil && !errors.Is(err, cause) {
		err = fmt.Errorf("%w: %w", cause, err)
	}
	return nil, err
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

func (l *Lock) lost(err error) error {
	return &LostError{Name: l.key.String(), Cause: Unreachable, Err: err}
}

// Release frees the lock. It returns nil when the lock was held until then, also
// when it is called again; and a *LostError (ErrLost) when the session had ended
// before, or when the server can't be asked: the lock then ends with its
// connection. Nothing is held after either.
//
// It goes on for up to 5 s, whether ctx has ended or not. Call it after the
// work that the lock protects has ended. One statement, but none for a shared
// lock that another Lock of the same client still holds:
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
	var err error
	select {
	case err = <-l.session.free(l):
	case <-ctx.Done():
		err = ctx.Err()
	}
	if before := l.Err(); err != nil && errors.Is(before, ErrLost) {
		return before
	} else if err != nil {
		return l.lost(err)
	}
	return nil
}
