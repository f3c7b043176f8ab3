package pglock

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// recheck is how soon a waiter looks again where nobody will wake it: without
// notifications, and where another transaction has the lease row.
const recheck = 50 * time.Millisecond

// Acquire waits in line until it has the lease: waiters are granted it in the
// order in which they came. When ctx ends first the error matches ErrLocked and
// ctx.Err(); nothing is held then, but for a grant that was under way, which
// ends after one TTL. For TTL and other errors see TryAcquire. A goroutine that
// acquires a name twice waits for itself: each Lease is a tenure of its own,
// also within one Client. One statement, and one for each third of the TTL that
// it waits:
//
//	SELECT * FROM pglock.enqueue('accounts/42', '30 s', claim, channel)
func (c *Client) Acquire(ctx context.Context, name string, ttl time.Duration, opts ...LeaseOption) (*Lease, error) {
	r, err := c.request(ctx, name, ttl, opts)
	if err != nil {
		return nil, err
	}
	ctx, leave, err := c.enter(ctx)
	if err != nil {
		return nil, fmt.Errorf("acquire lease %q: %w", name, err)
	}
	defer leave()
	var held *HeldError
	if !c.listener.ready() { // nobody has waited yet: maybe nobody has to
		l, err := c.try(ctx, r)
		if !errors.As(err, &held) {
			return l, err
		}
		c.listener.begin(ctx)
		if ctx.Err() != nil {
			return nil, c.givenUp(ctx, held)
		}
	}
	return c.queueUp(ctx, r, held)
}

// WithLease acquires the lease, waiting in line, runs fn and releases it. The
// context of fn is ctx, and ends with the lease too and when the client is closed.
// fn must return when it does: the lease is
// released after that, also when fn panics. The error joins fn's with the
// release's: one that matches ErrLost says that the lease ended while fn ran,
// even if fn returned nil.
func (c *Client) WithLease(ctx context.Context, name string, ttl time.Duration, fn func(context.Context, *Lease) error, opts ...LeaseOption) (err error) {
	leave, err := c.begin()
	if err != nil {
		return err
	}
	defer leave()
	l, err := c.Acquire(ctx, name, ttl, opts...)
	if err != nil {
		return err
	}
	defer func() {
		released := l.Release(ctx)
		l.abandon() // fn left a guarded transaction open: nobody else has the handle
		err = errors.Join(err, released)
	}()
	both, cancel := c.under(ctx, l.Context())
	defer cancel()
	return fn(both, l)
}
