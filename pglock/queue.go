package pglock

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// ticket is one call of Acquire that waits in line. The keeper refreshes it.
type ticket struct {
	request *request
	beat    beat       // the keeper's
	sent    time.Time  // of the statement that its expiry comes from; the keeper's
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

const enqueueSQL = `SELECT granted, token, holder, remaining, expires_at, ticket
	FROM pglock.enqueue($1::text, $2::interval, $3::uuid, $4::text, $5::text, $6::jsonb)`

const cancelSQL = `SELECT pglock.cancel($1::text, $2::uuid)`

// queueUp waits in line for a grant. The listener is subscribed before the
// ticket is drawn, and drawing it looks at the lease again.
func (c *Client) queueUp(ctx context.Context, r *request) (*Lease, error) {
	for {
		l, held, err := c.line(ctx, r)
		if l != nil || err != nil {
			if r.waited {
				c.tell(r.values, Waited{Name: r.name, Waited: time.Since(r.called), Err: err})
			}
			return l, err
		}
		if held != nil { // another transaction has had the row all the time
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

// line draws a ticket and waits until it is granted. It returns nothing, or who
// holds the lease, where another ticket has to be drawn.
func (c *Client) line(ctx context.Context, r *request) (*Lease, *HeldError, error) {
	t := &ticket{request: r, beat: beat{index: -1}, granted: make(chan grant, 1)}
	c.listener.expect(t)
	defer c.listener.forget(t)
	a, err := c.ask(ctx, enqueueSQL, r.name, r.ttl, r.claim, c.listener.channel, r.owner, r.encoded)
	switch {
	case err != nil:
		c.takeBack(r)
		return nil, nil, c.ended(ctx, err)
	case a.granted:
		return c.lease(r, *a.token, a.sent, *a.remaining), nil, nil
	case a.ticket == nil:
		c.takeBack(r)
		return nil, a.held(r.name), nil
	}
	c.keeper.watch(t, a.sent, a.remaining)
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
	c.pending.Go(func() {
		defer close(done)
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.values), grace)
		defer cancel()
		_, _ = repeat(ctx, func() error {
			_, err := c.calls.call(ctx, func(pgx.Rows) error { return nil }, cancelSQL, r.name, r.claim)
			return err
		})
	})
	select {
	case <-done:
	case <-time.After(time.Second):
	}
}

// listener hears for a client that its tickets were granted, on one connection
// whatever their number. It begins with the first that waits.
type listener struct {
	client  *Client
	channel string

	mu      sync.Mutex
	tickets map[string]*ticket // by claim
	begun   bool
	quit    context.Context
	stopRun context.CancelFunc
	runs    sync.WaitGroup
	first   chan struct{} // closed once it is known whether it hears
}

const (
	// listenBound is how long the listener's connection may be silent before it
	// is tried, and how long such a try may take.
	listenBound = 5 * time.Second

	// echoBound is how long a notification to oneself may take. Through a
	// transaction pooler it never comes.
	echoBound = time.Second
)

func newListener(c *Client) *listener {
	l := &listener{client: c, channel: "pglock_" + strings.ReplaceAll(newClaim(), "-", ""),
		tickets: map[string]*ticket{}, first: make(chan struct{})}
	l.quit, l.stopRun = context.WithCancel(context.Background())
	return l
}

// begin starts the listener, and waits until it is known whether it hears.
func (l *listener) begin(ctx context.Context) {
	l.mu.Lock()
	if !l.begun {
		l.begun = true
		l.runs.Go(l.run)
	}
	l.mu.Unlock()
	select {
	case <-l.first:
	case <-ctx.Done():
	}
}

// ready says whether begin has been called and has its answer.
func (l *listener) ready() bool {
	select {
	case <-l.first:
		return true
	default:
		return false
	}
}

func (l *listener) expect(t *ticket) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tickets[t.request.claim] = t
}

func (l *listener) forget(t *ticket) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.tickets, t.request.claim)
}

func (l *listener) stop() {
	l.stopRun()
	l.runs.Wait()
}

func (l *listener) run() {
	keeper := l.client.keeper
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, listenBound) {
		conn, err := l.subscribe()
		hears := err == nil
		if hears {
			pause = 10 * time.Millisecond
		} else if !keeper.deaf.Load() && l.quit.Err() == nil {
			l.client.tell(l.quit, Fallback{Err: err})
		}
		keeper.deaf.Store(!hears)
		select {
		case <-l.first:
		default:
			close(l.first)
		}
		if errors.Is(err, errDeaf) {
			return // tickets are looked after more often instead
		}
		if hears {
			keeper.lookAgain()
			err = l.hear(conn)
			closeConn(conn)
			if l.quit.Err() == nil {
				l.client.tell(l.quit, Fallback{Err: err})
			}
			keeper.deaf.Store(true)
			keeper.lookAgain()
		}
		select {
		case <-l.quit.Done():
			return
		case <-time.After(pause):
		}
	}
}

// errDeaf says that notifications don't come through.
var errDeaf = errors.New("pglock: notifications don't come through: a transaction pooler stands between")

// subscribe opens a connection that listens, and proves by a notification to
// itself that it hears.
func (l *listener) subscribe() (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(l.quit, listenBound)
	defer cancel()
	conn, err := l.client.dial(ctx)
	if err != nil {
		return nil, err
	}
	if _, err = conn.Exec(ctx, "LISTEN "+l.channel); err == nil {
		_, err = conn.Exec(ctx, "SELECT pg_notify($1::text, '')", l.channel)
	}
	if err == nil {
		heard, cancel := context.WithTimeout(ctx, echoBound)
		_, err = conn.WaitForNotification(heard)
		cancel()
		if err != nil && ctx.Err() == nil && !conn.IsClosed() {
			err = errDeaf
		}
	}
	if err != nil {
		closeConn(conn)
		return nil, err
	}
	return conn, nil
}

// hear passes on what comes until the connection is lost. A notification is a
// hint that anybody may send: only one that names a claim counts, which no
// other client knows.
func (l *listener) hear(conn *pgx.Conn) error {
	for {
		ctx, cancel := context.WithTimeout(l.quit, listenBound)
		n, err := conn.WaitForNotification(ctx)
		cancel()
		switch {
		case err == nil:
			l.pass(n.Payload)
		case conn.IsClosed() || l.quit.Err() != nil:
			return err
		default: // silent for a while: is it alive?
			ctx, cancel := context.WithTimeout(l.quit, listenBound)
			err := conn.Ping(ctx)
			cancel()
			if err != nil {
				return err
			}
		}
	}
}

// pass tells a ticket of its grant, which lasts as long as the ticket would
// have: its winner needs no statement.
func (l *listener) pass(payload string) {
	claim, token, ok := parseGrant(payload)
	if !ok {
		return
	}
	l.mu.Lock()
	t := l.tickets[claim]
	l.mu.Unlock()
	if t != nil {
		t.deliver(grant{token: token})
	}
}

// parseGrant reads "claim token".
func parseGrant(payload string) (claim string, token Token, ok bool) {
	claim, digits, _ := strings.Cut(payload, " ")
	n, err := strconv.ParseInt(digits, 10, 64)
	return claim, Token(n), err == nil
}
