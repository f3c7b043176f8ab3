package pglock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Client takes what outlives a transaction: leases and session advisory locks.
// It is safe for concurrent use. A program needs one for each database.
//
// Its statements go over a few connections of its own, made from the
// configuration of the pool that it was given: code that has taken every
// connection of that pool starves no renewal. A statement that is not answered in 5 s
// goes over another connection, three times all in all.
//
// A call made while the client does nothing else is a statement of its own, sent
// at once. Leases that are tried and released while one is under way go together
// in the next, with one commit for all; each call has its own answer, and its
// context ends it alone. Of those that try one name the first asks for all:
//
//	SELECT * FROM pglock.exchange('{accounts/42}', '{17}', '{accounts/43}', '{30 s}', '{NULL}', claim, owner)
type Client struct {
	config  *pgxpool.Config
	owner   string
	teller  *teller // nil: no observer
	polling bool

	// life ends when Close begins; calls in flight end with it.
	life    context.Context
	endLife context.CancelCauseFunc

	calls    *ownPool // acquires and releases
	courier  *courier // the same, several at a time
	keeper   *keeper  // renewals
	listener *listener
	bank     *bank  // session advisory locks
	releases alarms // at the bounds of those under way

	mu      sync.Mutex
	closed  bool
	handles map[handle]struct{}
	pending sync.WaitGroup // calls that may yet add a handle
	tails   sync.WaitGroup // of calls that have returned: they give back what nobody wants
	running sync.WaitGroup // functions of WithLease, WithLock and Elect
}

// handle is what Close releases one by one.
type handle interface {
	Release(context.Context) error
}

const (
	// callConns bounds the connections for acquires and releases. Each is one
	// short statement: more connections would queue in the server instead.
	callConns = 4

	// renewConns bounds the connections for renewals. They go one after the other,
	// but an attempt to connect that hangs must not be in the way of the next.
	renewConns = 3

	// grace is how long a release goes on after the caller's context has ended.
	grace = 5 * time.Second

	// attempts is how often a call is sent when its answer was lost.
	attempts = 3
)

// New returns a client for the database that pool is connected to. It does no
// I/O and never closes pool; closing pool doesn't stop the client, whose
// connections are its own: Close it first.
func New(pool *pgxpool.Pool, opts ...Option) *Client {
	c := &Client{config: pool.Config(), owner: defaultOwner(), handles: map[handle]struct{}{}}
	for _, opt := range opts {
		opt(c)
	}
	c.life, c.endLife = context.WithCancelCause(context.Background())
	c.calls = &ownPool{client: c, max: callConns}
	c.courier = &courier{client: c}
	c.keeper = newKeeper(&ownPool{client: c, max: renewConns})
	c.keeper.tell = func(e Event) { tell(context.Background(), c, e) }
	c.listener = newListener(c)
	c.bank = newBank(c)
	return c
}

// Close ends the contexts of the functions that WithLease, WithLock and Elect are
// running, and waits for them to return until ctx ends. Then it releases every
// lease and lock that the client holds, the leases in one statement, and closes
// the client's own connections. Waiting calls end with ErrClosed, and so do later
// ones. A release goes on for up to 5 s after ctx has ended; what could not be
// released is in the error, and what is a lease then ends with its TTL. A second
// Close returns nil. Observers have been told all of it, or are waited for no
// longer than a second.
func (c *Client) Close(ctx context.Context) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	c.closed = true
	c.mu.Unlock()

	c.endLife(ErrClosed)
	c.pending.Wait()
	returned := make(chan struct{})
	go func() { c.running.Wait(); close(returned) }()
	select {
	case <-returned:
	case <-ctx.Done():
	}

	c.mu.Lock()
	held := make([]handle, 0, len(c.handles))
	for h := range c.handles {
		held = append(held, h)
	}
	c.mu.Unlock()

	errs := make([]error, len(held)+1)
	var wg sync.WaitGroup
	wg.Go(func() { errs[len(held)] = c.releaseAll(ctx, c.keeper.held()) })
	for i, h := range held {
		wg.Go(func() { errs[i] = h.Release(ctx) })
	}
	wg.Wait()
	c.tails.Wait()
	c.listener.stop()
	c.keeper.stop()
	c.calls.close()
	c.bank.close()
	if c.teller != nil {
		c.teller.drain()
	}
	return errors.Join(errs...)
}

// enter admits a call that may add a lease or a lock; its context ends when
// the caller's does or Close begins. leave must be called, after the lease or
// lock was added.
func (c *Client) enter(ctx context.Context) (_ context.Context, leave func(), _ error) {
	if err := ctx.Err(); err != nil {
		return nil, nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, nil, ErrClosed
	}
	c.pending.Add(1)
	ctx, cancel := join(ctx, c.life)
	return ctx, func() { cancel(); c.pending.Done() }, nil
}

// begin admits a function that Close waits for; leave must be called when it has
// returned and its lease or lock is released.
func (c *Client) begin() (leave func(), _ error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, ErrClosed
	}
	c.running.Add(1)
	return c.running.Done, nil
}

// under returns the context of a function that runs under a lease or a lock: it
// ends with the caller's, with the lease's or lock's, and when Close begins.
func (c *Client) under(ctx, held context.Context) (context.Context, context.CancelFunc) {
	both, cancel := join(ctx, held)
	all, stop := join(both, c.life)
	return all, func() { stop(); cancel() }
}

// keep adds what Close is to release.
func (c *Client) keep(h handle) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.handles[h] = struct{}{}
}

// drop forgets what was released or lost.
func (c *Client) drop(h handle) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.handles, h)
}

// locks returns the session locks that are held.
func (c *Client) locks() (locks []*Lock) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for h := range c.handles {
		if l, ok := h.(*Lock); ok {
			locks = append(locks, l)
		}
	}
	return locks
}

// dial opens a connection outside any pool.
func (c *Client) dial(ctx context.Context) (*pgx.Conn, error) {
	config := c.config.ConnConfig.Copy()
	config.OnNotification = nil // pgx would hand it what we wait for
	if c.config.BeforeConnect != nil {
		if err := c.config.BeforeConnect(ctx, config); err != nil {
			return nil, fmt.Errorf("pglock: connect: %w", err)
		}
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("pglock: connect: %w", err)
	}
	if c.config.AfterConnect != nil {
		if err := c.config.AfterConnect(ctx, conn); err != nil {
			closeConn(conn)
			return nil, fmt.Errorf("pglock: connect: %w", err)
		}
	}
	return conn, nil
}

// closeConn closes a connection without waiting long for the server.
func closeConn(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // the socket is closed whatever it says
}

// join returns a context with ctx's values that ends with whichever of the two
// ends first, and with that one's cause.
func join(ctx, other context.Context) (context.Context, context.CancelFunc) {
	both, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(other, func() { cancel(context.Cause(other)) })
	return both, func() { stop(); cancel(context.Canceled) }
}

// linger returns a context that outlives ctx by d.
func linger(ctx context.Context, d time.Duration) (context.Context, context.CancelCauseFunc) {
	longer, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		select {
		case <-longer.Done():
		case <-time.After(d):
			cancel(ctx.Err())
		}
	})
	return longer, func(cause error) { stop(); cancel(cause) }
}
