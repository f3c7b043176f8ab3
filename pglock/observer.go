package pglock

import (
	"context"
	"time"
)

// Observer is told what happens to a client's leases, for metrics and traces.
// It is called on the goroutine to which it happens, with the context of the
// call that it belongs to or of the lease, and must return quickly. A panic of
// its own is swallowed: watching a lock must not break it.
type Observer interface {
	Observe(ctx context.Context, event Event)
}

// Event is one of the structs below. There may be more of them later, with more
// fields: an Observer passes over what it doesn't know.
type Event interface{ event() }

// Acquired: a lease was granted. Each is followed by one Lost or one Released.
type Acquired struct {
	Name   string
	Token  Token
	Waited time.Duration // since the call
}

// Waited: a call of Acquire that had to wait has ended, granted or not.
type Waited struct {
	Name   string
	Waited time.Duration // since the call
	Err    error         // nil: granted
}

// Renewed: a renewal statement has ended.
type Renewed struct {
	Leases, Tickets int           // that it was for
	Took            time.Duration // from when it was sent
	Err             error         // they are tried again while their time lasts
}

// Lost: a lease was lost.
type Lost struct {
	Name  string
	Token Token
	Held  time.Duration
	Err   *LostError
}

// Released: a lease was released by its holder.
type Released struct {
	Name  string
	Token Token
	Held  time.Duration
}

// Fallback: waiters are not woken by notifications, and look again every 50 ms.
// Err says why: nothing comes through to a client behind a transaction pooler,
// for as long as it lives; a connection that was lost is made again.
type Fallback struct {
	Err error
}

func (Acquired) event() {}
func (Waited) event()   {}
func (Renewed) event()  {}
func (Lost) event()     {}
func (Released) event() {}
func (Fallback) event() {}

// tell tells the observer, if there is one.
func (c *Client) tell(ctx context.Context, event Event) {
	if c.observer == nil {
		return
	}
	defer func() { _ = recover() }()
	c.observer.Observe(ctx, event)
}
