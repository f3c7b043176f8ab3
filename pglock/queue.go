package pglock

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
)

// ticket is one call of Acquire that waits in line. The keeper refreshes it.
type ticket struct {
	request *request
	beat    beat       // the keeper's
	sent    time.Time  // of the statement that its expiry comes from; the keeper's
	looks   int        // in a row that found the lease free, but its row locked; the keeper's
	granted chan grant // holds one
}

// grant is what a ticket is told: that it was granted, or that it is gone and
// another has to be drawn. Told by a notification, a grant lasts as long as the
// ticket would have; told by a refresh, as long as that says.
type grant struct {
	gone      bool
	token     Token
	sent      time.Time
	remaining time.Duration
}

// deliver tells the ticket; one that has been told already keeps what it has:
// the same grant is told by a notification and by a refresh.
func (t *ticket) deliver(g grant) {
	select {
	case t.granted <- g:
	default:
	}
}

// recheck is how soon a waiter looks again where nobody will wake it: without
// notifications, and where another transaction has the lease row.
const recheck = 50 * time.Millisecond

const enqueueSQL = `SELECT granted, token, holder, remaining, expires_at, ticket
	FROM pglock.enqueue($1::text, $2::interval, $3::uuid, $4::text, $5::text, $6::jsonb)`

const cancelSQL = `SELECT pglock.cancel($1::text, $2::uuid)`

// queueUp waits in line for a grant. The listener is subscribed before the
// ticket is drawn, and drawing it looks at the lease again. known is who had it
// when it was tried, if it was.
func (c *Client) queueUp(ctx context.Context, r *request, known *HeldError) (*Lease, error) {
	for {
		l, held, err := c.standInLine(ctx, r)
		if err != nil && ctx.Err() != nil && known != nil && !errors.Is(err, ErrLocked) && !errors.Is(err, ErrClosed) {
			err = c.givenUp(ctx, known)
		}
		if l != nil || err != nil {
			if r.waited {
				tell(r.values, c, Waited{Name: r.name, Waited: time.Since(r.called), Err: err, GaveUp: err != nil && ctx.Err() != nil})
			}
			return l, err
		}
		if held != nil { // another transaction has had the row all the time
			known = held
			select {
			case <-time.After(recheck):
			case <-ctx.Done():
				return nil, c.givenUp(ctx, held)
			}
		}
		// A claim of its own for each ticket: what was told about the one before,
		// and comes late, must not be taken for a grant of this one.
		again := *r
		again.claim = newClaim()
		r = &again
	}
}

// standInLine draws a ticket and waits until it is granted. It returns nothing, or who
// holds the lease, where another ticket has to be drawn.
func (c *Client) standInLine(ctx context.Context, r *request) (*Lease, *HeldError, error) {
	t := &ticket{request: r, beat: beat{index: -1}, granted: make(chan grant, 1)}
	c.listener.expect(t)
	defer c.listener.forget(t)
	c.courier.setOut()
	a, err := c.ask(ctx, enqueueSQL, r.name, r.ttl, r.claim, c.listener.channel, r.owner, r.encoded)
	c.courier.back()
	switch {
	case err != nil:
		r.waited = r.waited || ctx.Err() != nil // given up before the ticket was told
		c.takeBack(r)
		return nil, nil, c.ended(ctx, err)
	case a.granted:
		if l := c.lease(r, a.token, a.sent, a.remaining); l.Err() == nil {
			return l, nil, nil
		}
		c.takeBack(r) // told too late: the grant's time has run out
		return nil, nil, nil
	case a.ticket == 0:
		c.takeBack(r)
		return nil, a.held(r.name), nil
	}
	c.keeper.watch(t, a.sent, a.left())
	defer c.keeper.drop(t)
	r.waited = true
	select {
	case g := <-t.granted:
		if g.gone {
			return nil, nil, nil
		}
		if g.sent.IsZero() {
			g.sent, g.remaining = c.keeper.refreshed(t), r.ttl
		}
		if c.calls.replicated.Load() {
			// Whoever handed the lease on may have given up waiting for the standby.
			// A repeat of the claim writes, and waits for all that was written before.
			if a, err = c.tryOne(ctx, r, r.claim); err != nil || !a.granted {
				c.takeBack(r)
				return nil, nil, c.ended(ctx, err)
			}
			g = grant{token: a.token, sent: a.sent, remaining: a.remaining}
		}
		l := c.lease(r, g.token, g.sent, g.remaining)
		if l.Err() == nil {
			return l, nil, nil
		}
		c.takeBack(r) // told too late: the grant's time has run out
		return nil, nil, nil
	case <-ctx.Done():
		c.keeper.drop(t)
		c.takeBack(r)
		return nil, nil, c.givenUp(ctx, a.held(r.name))
	}
}

// takeBack gives a ticket back, or the lease that it was granted meanwhile, or
// an acquire whose answer was lost. The caller, who has given up, waits a
// second for it at most; what can't be taken back then ends with its TTL.
func (c *Client) takeBack(r *request) {
	done := make(chan struct{})
	c.tails.Go(func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.values), grace)
		defer cancel()
		_, _ = c.calls.repeat(ctx, func(ctx context.Context) error {
			_, err := c.calls.call(ctx, func(pgx.Rows) error { return nil }, cancelSQL, r.name, r.claim)
			return err
		})
	})
	select {
	case <-done:
	case <-time.After(time.Second):
	}
}
