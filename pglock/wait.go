package pglock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

// recheck bounds how long a waiter sleeps before it looks again.
const recheck = 50 * time.Millisecond

// Acquire waits until it has the lease. When ctx ends first the error matches
// ErrLocked, if somebody had the lease, and ctx.Err(); nothing is held then,
// but for a grant that was under way, which ends after one TTL. For TTL and
// other errors see TryAcquire. A goroutine that acquires a name twice waits
// for itself: each Lease is a tenure of its own, also within one Client.
func (c *Client) Acquire(ctx context.Context, name string, ttl time.Duration, opts ...LeaseOption) (*Lease, error) {
	r, err := c.request(ctx, name, ttl, opts)
	if err != nil {
		return nil, err
	}
	ctx, leave, err := c.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	for {
		l, left, err := c.try(ctx, r)
		if !errors.Is(err, ErrLocked) || ctx.Err() != nil {
			return l, err
		}
		// Until the expiry that the database told, or sooner: nobody says when
		// the lease is released. One already past means that someone has the row.
		if left <= 0 || left > recheck {
			left = recheck/2 + rand.N(recheck/2)
		}
		select {
		case <-ctx.Done():
			return nil, c.ended(ctx, fmt.Errorf("acquire: gave up waiting: %w", err))
		case <-time.After(left):
		}
	}
}

// WithLease acquires the lease, runs fn and releases it. The context of fn is
// ctx and ends with the lease's too. fn must return when it does: the lease is
// released after that, also when fn panics. The error joins fn's with the
// release's: one that matches ErrLost says that the lease ended while fn ran,
// even if fn returned nil.
func (c *Client) WithLease(ctx context.Context, name string, ttl time.Duration, fn func(context.Context, *Lease) error, opts ...LeaseOption) (err error) {
	l, err := c.Acquire(ctx, name, ttl, opts...)
	if err != nil {
		return err
	}
	defer func() {
		released := l.Release(ctx)
		l.abandon() // fn left a guarded transaction open: nobody else has the handle
		err = errors.Join(err, released)
	}()
	both, cancel := join(ctx, l.Context())
	defer cancel()
	return fn(both, l)
}
