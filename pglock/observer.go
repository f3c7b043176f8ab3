package pglock

import (
	"context"
	"time"
)

// Observer is told what happens to a client's leases, for metrics and traces:
// one event after the other, in the order in which they happened, on a goroutine
// of its own. Nothing waits for it: while it blocks, leases are acquired, renewed,
// lost and released as ever, and a panic of its own is swallowed. Watching a lock
// must not break it. Client.Close waits a second at most for all to be told.
//
// The context has the values of the call that the event belongs to, and may have
// ended. An Observer that is 10,000 events behind is told nothing new until it has
// caught up: of a tenure neither the beginning nor the end.
type Observer interface {
	Observe(ctx context.Context, event Event)
}

// Event is one of the structs below. There may be more of them later, with more
// fields: an Observer passes over what it doesn't know.
type Event interface{ event() }

// Acquired: a lease was granted. Each is followed by one Lost or one Released.
// Its Lease says by Err whether it is held at this moment, sooner than any event
// does; it is the caller's to release.
type Acquired struct {
	Name   string
	Token  Token
	Waited time.Duration // since the call
	Lease  *Lease
}

// Waited: a call of Acquire that had to wait has ended, granted or not.
type Waited struct {
	Name   string
	Waited time.Duration // since the call
	Err    error         // nil: granted
	GaveUp bool          // the call's context ended, or the client was closed: Err is no failure
}

// CampaignFailed: Elect could not stand for the lease, because nobody could be asked or
// nobody there grants. It tries again.
type CampaignFailed struct {
	Name string
	Err  error
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
	Lease *Lease
}

// Released: a lease was released by its holder.
type Released struct {
	Name  string
	Token Token
	Held  time.Duration
	Lease *Lease
}

// Fenced: the database has refused a write that came after the end of the lease
// it was made under. Told by Lease.Guard and Lease.InTx, the latter also of what
// Fence and protected tables refuse to the function that it runs, if that returns
// the error. Fence, Present and Explain know a transaction and no client, so that
// they tell nobody: who calls them outside InTx has the error, and can hand a
// Fenced to an Observer.
type Fenced struct {
	Name  string // of the lease
	Token Token
	Err   error // ErrFenced or ErrLost
}

// Fallback: waiters are not woken by notifications, and look again every 50 ms.
// Err says why: nothing comes through to a client behind a transaction pooler,
// for as long as it lives; a connection that was lost is made again.
type Fallback struct {
	Err error
}

func (Acquired) event()       {}
func (Waited) event()         {}
func (CampaignFailed) event() {}
func (Renewed) event()        {}
func (Lost) event()           {}
func (Released) event()       {}
func (Fenced) event()         {}
func (Fallback) event()       {}
