package pglock

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
)

// request is what one call of Acquire asks for. Its claim makes a repeat have
// the effect of one.
type request struct {
	values   context.Context // the caller's, whose values the lease's context has
	called   time.Time
	waited   bool // it has drawn a ticket
	name     string
	ttl      time.Duration
	claim    string
	owner    string
	metadata map[string]string
	encoded  *string // metadata as JSON; nil: none
}

const (
	minTTL      = 100 * time.Millisecond
	maxTTL      = 24 * time.Hour
	maxMetadata = 4096 // bytes, as JSON
)

func (c *Client) request(ctx context.Context, name string, ttl time.Duration, opts []LeaseOption) (*request, error) {
	r := &request{values: ctx, called: time.Now(), name: name, ttl: ttl, owner: c.owner}
	for _, opt := range opts {
		opt(r)
	}
	if err := checkName("lease", name); err != nil {
		return nil, err
	}
	if err := checkName("owner", c.owner); err != nil {
		return nil, err
	}
	if ttl < minTTL || ttl > maxTTL {
		return nil, fmt.Errorf("pglock: TTL %v is out of range: it is between %v and %v", ttl, minTTL, maxTTL)
	}
	if r.metadata != nil {
		for k, v := range r.metadata {
			if strings.ContainsRune(k+v, 0) || !utf8.ValidString(k+v) {
				return nil, fmt.Errorf("pglock: metadata %q: %q has a NUL or is not UTF-8: encode it", k, v)
			}
		}
		encoded, err := json.Marshal(r.metadata)
		if err != nil {
			return nil, fmt.Errorf("pglock: metadata: %w", err)
		}
		if len(encoded) > maxMetadata {
			return nil, fmt.Errorf("pglock: metadata is %d bytes as JSON: it has at most %d", len(encoded), maxMetadata)
		}
		r.encoded = new(string(encoded))
	}
	r.claim = newClaim()
	return r, nil
}

// like says whether two requests have the same TTL and metadata.
func (r *request) like(other *request) bool {
	return r.ttl == other.ttl && (r.encoded == other.encoded ||
		r.encoded != nil && other.encoded != nil && *r.encoded == *other.encoded)
}

// newClaim returns a random uuid as PostgreSQL spells it.
func newClaim() string {
	var b [16]byte
	rand.Read(b[:]) // never fails
	text := make([]byte, 0, 36)
	for _, part := range [][]byte{b[:4], b[4:6], b[6:8], b[8:10], b[10:]} {
		if len(text) > 0 {
			text = append(text, '-')
		}
		text = hex.AppendEncode(text, part)
	}
	return string(text)
}

// TryAcquire acquires the lease if it is free or has expired, and never waits
// for a holder. A *HeldError (ErrLocked) says who has it and until when; a
// losing try writes nothing. TTL is between 100 ms and 24 h; the lease is
// renewed until it is released. After any other error the lease may be held by
// nobody for up to one TTL. One statement, or while the client is busy a part of
// one that its calls share (see Client), which is repeated with the same claim
// when its answer was lost:
//
//	SELECT * FROM pglock.acquire_one('accounts/42', '30 s', claim, owner, metadata)
func (c *Client) TryAcquire(ctx context.Context, name string, ttl time.Duration, opts ...LeaseOption) (*Lease, error) {
	r, err := c.request(ctx, name, ttl, opts)
	if err != nil {
		return nil, err
	}
	ctx, leave, err := c.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	return c.try(ctx, r)
}

// Acquire waits in line until it has the lease: waiters are granted it in the
// order in which they came. When ctx ends first the error matches ctx.Err(), and
// ErrLocked unless the server had not answered yet; nothing is held then, but
// for a grant that was under way, which ends after one TTL. For TTL and other
// errors see TryAcquire. A goroutine that acquires a name twice waits for itself:
// each Lease is a tenure of its own, also within one Client. A try as TryAcquire's,
// left out by a client that has waited before and isn't busy; then, where it was
// not granted, one statement, and one for each third of the TTL that it waits:
//
//	SELECT * FROM pglock.enqueue('accounts/42', '30 s', claim, channel, owner, metadata)
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
	// Nobody has waited yet, and maybe nobody has to; or others are under way, and
	// it can go with them, unless one of them waits in line for the same already.
	if !c.listener.ready() || c.courier.busy() && !c.listener.expects(name) {
		l, err := c.try(ctx, r)
		if !errors.As(err, &held) {
			return l, err
		}
		r.claim = newClaim() // that of the try may be others' too
		c.listener.begin(ctx)
		if ctx.Err() != nil {
			return nil, c.givenUp(ctx, held)
		}
	}
	return c.queueUp(ctx, r, held)
}

const acquireSQL = `SELECT granted, token, holder, remaining, expires_at, NULL::bigint
	FROM pglock.acquire_one($1::text, $2::interval, $3::uuid, $4::text, $5::jsonb)`

// try is one attempt that draws no ticket.
func (c *Client) try(ctx context.Context, r *request) (*Lease, error) {
	a, disowned, err := c.courier.try(ctx, r)
	if err != nil {
		if ctx.Err() != nil && !disowned || errors.Is(err, errUnconfirmed) {
			c.takeBack(r)
		}
		return nil, c.ended(ctx, err)
	}
	if !a.granted {
		return nil, a.held(r.name)
	}
	l := c.lease(r, a.token, a.sent, a.remaining)
	if err := l.Err(); err != nil { // the answer came when its time had run out
		c.takeBack(r)
		return nil, c.ended(ctx, err)
	}
	return l, nil
}

// bid is the answer to an attempt.
type bid struct {
	granted   bool
	token     Token // 0: nobody has it, but another transaction has its row
	holder    string
	remaining time.Duration
	expires   time.Time
	ticket    int64 // 0: none was drawn
	sent      time.Time
}

// bidScan receives what a bid is made of: types that pgx fills without
// reflection, of which every call pays otherwise.
type bidScan struct {
	granted   bool
	token     zeronull.Int8
	holder    zeronull.Text
	remaining pgtype.Interval
	expires   zeronull.Timestamptz
	ticket    zeronull.Int8
}

func (s *bidScan) bid() bid {
	return bid{granted: s.granted, token: Token(s.token), holder: string(s.holder),
		remaining: time.Duration(s.remaining.Microseconds) * time.Microsecond,
		expires:   time.Time(s.expires), ticket: int64(s.ticket)}
}

// tryOne asks for a request's lease, with its claim or a load's.
func (c *Client) tryOne(ctx context.Context, r *request, claim string) (bid, error) {
	return c.ask(ctx, acquireSQL, r.name, r.ttl, claim, r.owner, r.encoded)
}

// ask sends an attempt, again when its answer was lost.
func (c *Client) ask(ctx context.Context, sql string, args ...any) (a bid, err error) {
	_, err = c.calls.repeat(ctx, func(ctx context.Context) error {
		var s bidScan
		sent, err := c.calls.call(ctx, func(rows pgx.Rows) error {
			return rows.Scan(&s.granted, &s.token, &s.holder, &s.remaining, &s.expires, &s.ticket)
		}, sql, args...)
		a = s.bid()
		a.sent = sent
		return err
	})
	if err != nil {
		return bid{}, fmt.Errorf("acquire lease %q: %w", args[0], err)
	}
	return a, nil
}

// left is how long whoever has the lease may keep it without a renewal; nil: nobody
// has it.
func (a bid) left() *time.Duration {
	if a.token == 0 {
		return nil
	}
	return &a.remaining
}

// held says who has the lease.
func (a bid) held(name string) *HeldError {
	held := &HeldError{Name: name}
	if a.token != 0 {
		held.Token, held.Owner, held.ExpiresAt = a.token, a.holder, a.expires
	}
	return held
}

// lease makes the handle of a tenure just granted.
func (c *Client) lease(r *request, token Token, sent time.Time, remaining time.Duration) *Lease {
	l := &Lease{client: c, name: r.name, token: token, ttl: r.ttl, acquired: time.Now(), queued: r.waited, beat: beat{index: -1}}
	l.open(r.values)
	// Told before the keeper, which may lose it, has it; an observer may ask for its
	// deadline at once.
	c.keeper.extend(l, sent, remaining)
	l.told = tell(r.values, c, Acquired{Name: r.name, Token: token, Waited: l.acquired.Sub(r.called), Lease: l})
	c.keeper.add(l, sent, remaining)
	return l
}

// givenUp is the error of a wait that ended with its context.
func (c *Client) givenUp(ctx context.Context, held *HeldError) error {
	return c.ended(ctx, fmt.Errorf("acquire: gave up waiting: %w", held))
}

// ended makes an error say why the call's context ended, where it did.
func (c *Client) ended(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if errors.Is(context.Cause(ctx), ErrClosed) {
		return ErrClosed
	}
	if ctx.Err() != nil && !errors.Is(err, ctx.Err()) {
		return fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return err
}
