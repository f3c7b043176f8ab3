package pglock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// bank has the sessions that hold a client's advisory locks, many locks in one.
// A session that holds any is only sent what never waits; a call that has to
// wait gets an empty one for as long as it does. So a release waits for no
// acquire, and to give up a wait can cost the connection but no lock.
type bank struct {
	client *Client

	mu       sync.Mutex
	sessions map[*session]struct{}
	dialing  *dialing
	most     int // locks at once; 0: not known yet
	closed   bool

	running sync.WaitGroup // goroutines of its own
}

// dialing is an attempt to connect that everybody waits for who has a key to try.
type dialing struct {
	done chan struct{} // closed at its end
	err  error
}

const (
	// spare is how long a session without a lock is kept for the next.
	spare = time.Second

	// pollPause is how long, on average, a call that polls waits between tries.
	pollPause = 50 * time.Millisecond
)

func newBank(c *Client) *bank { return &bank{client: c, sessions: map[*session]struct{}{}} }

// try takes key where it is free. The error is a *BlockedError where it isn't,
// with the backends in the way if look is set. A session that turns out to be
// dead held nothing for this call, which goes on with the next, but not for ever
// with new ones.
func (b *bank) try(ctx context.Context, key Key, look bool) (*Lock, error) {
	begun := time.Now()
	for n := 1; ; {
		s, err := b.claim(ctx)
		if err != nil {
			return nil, err
		}
		l, err := s.try(ctx, key, look)
		if _, gone := errors.AsType[*goneError](err); !gone || n == attempts || ctx.Err() != nil {
			return l, err
		}
		if s.born.After(begun) {
			n++
		}
	}
}

// wait takes key when its turn has come in the server's line.
func (b *bank) wait(ctx context.Context, key Key) (*Lock, error) {
	for {
		s, fresh, err := b.claimEmpty(ctx, key)
		// No room for a connection, or too many asked for one at once: better late
		// than not at all. Where the server is away the tries say so.
		if _, refused := errors.AsType[*pgconn.ConnectError](err); refused && ctx.Err() == nil {
			return b.poll(ctx, key)
		}
		if err != nil {
			return nil, err
		}
		if fresh || s.alive() {
			return s.wait(ctx, key)
		}
	}
}

// poll takes key by trying again and again, which holds no snapshot while it
// waits and takes no connection, but keeps no order either.
func (b *bank) poll(ctx context.Context, key Key) (*Lock, error) {
	for {
		select {
		case <-ctx.Done():
			return nil, &BlockedError{What: key.what(), Err: ctx.Err()}
		case <-time.After(pollPause/2 + rand.N(pollPause)):
		}
		l, err := b.try(ctx, key, false)
		if err != nil && ctx.Err() != nil {
			err = &BlockedError{What: key.what(), Err: err}
		} else if errors.Is(err, ErrLocked) {
			continue
		}
		return l, err
	}
}

// claim returns a session on which to try a key: the fullest, so that the others
// run empty and are closed. Where there is none, one connection is made for all
// who ask, whoever of them gives up.
func (b *bank) claim(ctx context.Context) (*session, error) {
	for {
		s, d, err := b.find(ctx)
		if s != nil || err != nil {
			return s, err
		}
		select {
		case <-d.done:
			if d.err != nil {
				return nil, d.err
			}
		case <-ctx.Done():
			return nil, fmt.Errorf("pglock: connect: %w", ctx.Err())
		}
	}
}

func (b *bank) find(ctx context.Context) (*session, *dialing, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var fullest *session
	for s := range b.sessions {
		if s.waits == nil && (fullest == nil || s.claims > fullest.claims) {
			fullest = s
		}
	}
	if fullest != nil {
		if err := b.full(); err != nil {
			return nil, nil, err
		}
		fullest.claims++
		return fullest, nil, nil
	}
	if b.dialing == nil {
		d := &dialing{done: make(chan struct{})}
		b.dialing = d
		b.running.Go(func() {
			ctx, cancel := join(context.WithoutCancel(ctx), b.client.life)
			defer cancel()
			ctx, stop := context.WithTimeout(ctx, connectBound)
			defer stop()
			_, d.err = b.open(ctx, nil)
			b.mu.Lock()
			b.dialing = nil
			b.mu.Unlock()
			close(d.done)
		})
	}
	return nil, b.dialing, nil
}

// claimEmpty returns a session that holds nothing, to wait in.
func (b *bank) claimEmpty(ctx context.Context, key Key) (_ *session, fresh bool, _ error) {
	b.mu.Lock()
	if err := b.full(); err != nil {
		b.mu.Unlock()
		return nil, false, err
	}
	for s := range b.sessions {
		if s.claims == 0 {
			s.claims, s.waits = 1, &key
			b.mu.Unlock()
			return s, false, nil
		}
	}
	b.mu.Unlock()
	s, err := b.open(ctx, &key)
	return s, true, err
}

// full refuses what could leave no room for others. b.mu is held.
func (b *bank) full() error {
	claims := 0
	for s := range b.sessions {
		claims += s.claims
	}
	if b.most > 0 && claims >= b.most {
		return &FullError{Held: claims, Most: b.most}
	}
	return nil
}

// open makes a session, claimed for who waits for a key if one is given.
func (b *bank) open(ctx context.Context, waits *Key) (*session, error) {
	conn, err := b.client.dial(ctx)
	if err != nil {
		return nil, err
	}
	err = prove(ctx, conn)
	b.mu.Lock()
	most := b.most
	b.mu.Unlock()
	if err == nil && most == 0 {
		most, err = room(ctx, conn)
	}
	if err != nil {
		endSession(conn)
		return nil, err
	}
	keepAlive(conn)
	s := newSession(b, conn)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		closeConn(conn)
		return nil, ErrClosed
	}
	b.most = most
	b.sessions[s] = struct{}{}
	if waits != nil {
		s.claims, s.waits = 1, waits
	} else {
		b.expire(s)
	}
	b.running.Go(s.run)
	return s, nil
}

// granted makes a session in which somebody has waited one like the others.
func (b *bank) granted(s *session) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s.waits = nil
}

// give ends a claim.
func (b *bank) give(s *session) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s.claims--
	s.waits = nil
	if s.claims == 0 {
		b.expire(s)
	}
}

// expire closes a session when it has been without a claim for as long as a spare
// is kept. b.mu is held.
func (b *bank) expire(s *session) {
	s.emptied = time.Now()
	if s.expiry != nil {
		s.expiry.Reset(spare)
		return
	}
	s.expiry = time.AfterFunc(spare, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if s.claims == 0 && time.Since(s.emptied) >= spare {
			delete(b.sessions, s)
			s.stop()
		}
	})
}

// forget takes a lost session out.
func (b *bank) forget(s *session) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.sessions, s)
}

// close ends all sessions, whose locks have been released before.
func (b *bank) close() {
	b.mu.Lock()
	b.closed = true
	for s := range b.sessions {
		s.stop()
	}
	clear(b.sessions)
	b.mu.Unlock()
	b.running.Wait()
}
