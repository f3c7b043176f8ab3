package pglock

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// Token is the fencing token of a tenure. For one name, tokens only go up in
// the order of grants, and none is granted twice.
type Token int64

// Lease is one tenure of a name: a row with a deadline that the client's
// keeper moves on until Release, Client.Close or a loss. To acquire again is a
// new Lease. Safe for concurrent use.
type Lease struct {
	client *Client
	name   string
	token  Token
	ttl    time.Duration

	acquired time.Time
	queued   bool         // it was waited for, so that others may wait too
	told     bool         // the observer knows of it
	deadline atomic.Int64 // by the keeper's clock
	beat     beat         // the keeper's own

	mu  sync.Mutex // guards ctx and end
	ctx context.Context
	end context.CancelCauseFunc

	turn    sync.Mutex // one release at a time; guards what follows
	settled bool       // no release is to be sent any more
	verdict error      // what Release returns then
}

// Name returns the name that was acquired.
func (l *Lease) Name() string { return l.name }

// Owner returns the text by which others know the client (WithOwner).
func (l *Lease) Owner() string { return l.client.owner }

// Token returns the fencing token, to be attached to every write.
func (l *Lease) Token() Token { return l.token }

// Deadline returns the time until which the lease is known to be held, by this
// process's monotonic clock: the time before the last successful statement was
// sent, plus the time left that its answer gave, less a margin for the rates
// of two clocks. It moves on with each renewal.
func (l *Lease) Deadline() time.Time { return l.client.keeper.at(l.deadline.Load()) }

// Context ends when the lease is released or lost, with the cause that Err
// returns: at the deadline, whatever the network does. A process that was
// stopped may see it end some milliseconds after it wakes: code that must know
// asks Err, and what it writes is refused by the resource (Guard, Fence). It
// has the values of Acquire's context, but does not end with it.
//
// Release ends it before its statement is sent. Where that returns a
// *BlockedError the lease is held as before, and Context returns a new one.
func (l *Lease) Context() context.Context {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ctx
}

// Err returns nil while the lease is held, as far as this process can know by
// its own clock; ErrReleased once Release has begun; and a *LostError, which
// matches ErrLost, when it was lost.
func (l *Lease) Err() error {
	ctx := l.Context()
	if ctx.Err() == nil && !time.Now().Before(l.Deadline()) {
		l.client.keeper.drop(l)
		l.lose(l.client.keeper.why(l))
	}
	return context.Cause(ctx)
}

// String returns what the lease was granted as, for people to read.
func (l *Lease) String() string { return fmt.Sprintf("lease %q, token %d", l.name, l.token) }

// open gives the lease a context that has not ended.
func (l *Lease) open(values context.Context) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ctx, l.end = context.WithCancelCause(context.WithoutCancel(values))
}

// stop ends the context, unless it has ended before, and returns the cause.
func (l *Lease) stop(cause error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.end(cause)
	return context.Cause(l.ctx)
}

// lose ends the tenure for this process.
func (l *Lease) lose(cause Cause, err error) {
	if lost := l.lost(cause, err); l.stop(lost) == lost {
		l.tellEnd(lost)
	}
}

// tellEnd tells the observer how the tenure ended: lost, or released.
func (l *Lease) tellEnd(lost *LostError) {
	if !l.told {
		return
	}
	held := time.Since(l.acquired)
	var end Event = Released{Name: l.name, Token: l.token, Held: held, Lease: l}
	if lost != nil {
		end = Lost{Name: l.name, Token: l.token, Held: held, Err: lost, Lease: l}
	}
	l.client.teller.add(l.Context(), end, math.MaxInt)
}

func (l *Lease) lost(cause Cause, err error) *LostError {
	return &LostError{Name: l.name, Token: l.token, Cause: cause, Err: err}
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
