package pglock

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"time"
)

// courier carries a client's tries and releases to the server. Where nothing is
// under way a call goes at once, alone, and waits for nobody. What is asked for
// while something is under way goes together in the next exchange: one statement
// and one commit for all of it. Each caller has its own answer, and may give up
// by itself.
//
// Two exchanges at a time: the server works on one while the callers of the other
// have their answers and ask again. More would each carry less, and each costs the
// server as much as several calls. One that takes long, on a network that has
// gone silent or beside somebody's open transaction, is in the way of nobody: the
// next goes beside it.
type courier struct {
	client *Client

	mu      sync.Mutex
	pending []*errand // in the order in which they came
	alone   int       // statements under way that are one call's
	loads   int       // exchanges under way that others wait for

	overtakes alarms // of the next exchanges, where one is slow
}

// errand is one call: a try or, with a lease, a release.
type errand struct {
	request *request
	lease   *Lease

	// The courier's, guarded by its mutex.
	load   *load   // that carries it; nil: it waits
	behind *errand // a try of the same name in that load: this one loses where it wins
	gone   bool    // its caller has given up

	done     chan struct{} // closed when what follows is known
	bid      bid
	answer   answer
	repeated bool
	err      error
	alone    bool // the server refused the exchange: nothing has happened, ask alone
}

const (
	// abreast is how many exchanges are under way at a time.
	abreast = 2

	// slow is how long an exchange is waited for before the next goes beside it.
	slow = 20 * time.Millisecond
)

// try is one attempt that draws no ticket, with the claim that it leaves in the
// request. disowned says that its caller has given up, and that what it may yet
// be granted is given back.
func (c *courier) try(ctx context.Context, r *request) (a bid, disowned bool, err error) {
	e := &errand{request: r}
	if c.hand(e) {
		select {
		case <-e.done:
			if e.behind == nil {
				r.claim = e.load.claim
			}
		case <-ctx.Done():
			if c.withdraw(e) {
				c.client.tails.Go(func() { c.client.disown(e) })
			}
			return bid{}, true, fmt.Errorf("acquire lease %q: %w", r.name, ctx.Err())
		}
		if !e.alone {
			return e.bid, false, e.err
		}
		c.setOut()
	}
	defer c.back()
	a, err = c.client.tryOne(ctx, r, r.claim)
	return a, false, err
}

// disown gives back what a try is granted whose caller has given up, unless it has
// been passed on.
func (c *Client) disown(e *errand) {
	<-e.done
	if e.alone || e.err == nil && !e.bid.granted {
		return
	}
	r := *e.request
	r.claim = e.load.claim
	c.takeBack(&r)
}

// release ends a tenure. An exchange waits for nobody's row lock; what it finds
// locked is asked for alone, with the patience for one turn. So is what others of
// this client wait for: they may just be drawing tickets, and have the row.
func (c *courier) release(ctx context.Context, l *Lease, until time.Time) (a answer, repeated bool, err error) {
	e := &errand{lease: l}
	if c.client.listener.expects(l.name) {
		c.setOut()
	} else if c.hand(e) {
		if err := c.await(ctx, e, until); err != nil {
			return answer{}, false, err
		}
		if !e.alone && (e.err != nil || e.answer.state != "blocked") {
			return e.answer, e.repeated, e.err
		}
		c.setOut()
	}
	defer c.back()
	a, again, err := c.client.releaseOne(ctx, l, until)
	return a, e.repeated || again, err
}

// await waits for the answer to a release as long as outlive would, whose context
// would cost half as much again.
func (c *courier) await(ctx context.Context, e *errand, until time.Time) error {
	late := make(chan struct{})
	defer c.client.releases.at(until, func() { close(late) }).stop()
	err := context.DeadlineExceeded
	select {
	case <-e.done:
		return nil
	case <-late:
	case <-ctx.Done():
		err = ctx.Err()
		select {
		case <-e.done:
			return nil
		case <-late:
		case <-time.After(grace):
		}
	}
	c.withdraw(e)
	return err
}

// hand has an errand carried by the next exchange. Where nothing is under way it
// says false: the caller has set out alone, and is to say when it is back.
func (c *courier) hand(e *errand) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.underWay() {
		c.alone++
		return false
	}
	e.done = make(chan struct{})
	c.pending = append(c.pending, e)
	c.dispatch()
	return true
}

// busy says whether anything is under way.
func (c *courier) busy() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.underWay()
}

// underWay is busy for who holds the mutex. What is pending waits for something
// that is.
func (c *courier) underWay() bool { return c.alone > 0 || c.loads > 0 }

// setOut notes that a call's own statement is under way.
func (c *courier) setOut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.alone++
}

// back notes that it is no more.
func (c *courier) back() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.alone--
}

// withdraw takes back an errand whose caller has given up, and says whether it
// is under way and may be granted. An exchange that nobody waits for any more has a second to end by
// itself: what is cut short may be granted after it was given back.
func (c *courier) withdraw(e *errand) (sent bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e.gone = true
	if e.load == nil {
		return false
	}
	if e.load.waiting--; e.load.waiting == 0 {
		time.AfterFunc(time.Second, e.load.cancel)
	}
	return e.behind == nil
}

// dispatch sends an exchange if one is wanted and there is room beside those under
// way. The mutex is held.
func (c *courier) dispatch() {
	if len(c.pending) > 0 && c.loads < abreast {
		c.loads++
		go c.carry()
	}
}

// carry sends one exchange after the other while there is anything to carry.
func (c *courier) carry() {
	for {
		l := c.fill()
		if l == nil {
			return
		}
		overtake := c.overtakes.at(time.Now().Add(slow), func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.loads--
			c.dispatch()
		})
		c.deliver(l)
		l.cancel()
		if !overtake.stop() {
			return // another goes on
		}
		// Those who have just had their answers may have something for the next.
		runtime.Gosched()
	}
}
