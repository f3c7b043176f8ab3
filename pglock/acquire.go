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
)

// request is what one call of Acquire asks for. Its claim makes a repeat have
// the effect of one.
type request struct {
	values   context.Context // the caller's, whose values the lease's context has
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
	r := &request{values: ctx, name: name, ttl: ttl, owner: c.owner}
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
	var claim [16]byte
	rand.Read(claim[:]) // never fails
	r.claim = hex.EncodeToString(claim[:])
	return r, nil
}

// TryAcquire acquires the lease if it is free or has expired, and never waits
// for a holder. A *HeldError (ErrLocked) says who has it and until when; a
// losing try writes nothing. TTL is between 100 ms and 24 h; the lease is
// renewed until it is released. After any other error the lease may be held by
// nobody for up to one TTL. One statement, which is repeated with the same
// claim when its answer was lost:
//
//	SELECT * FROM pglock.acquire('{accounts/42}', '30 s')
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
	l, _, err := c.try(ctx, r)
	return l, err
}

const acquireSQL = `SELECT granted, token, holder, remaining, expires_at
	FROM pglock.acquire(ARRAY[$1::text], $2::interval, $3::uuid, $4::text, $5::jsonb)`

// try is one attempt. Where somebody else has the lease it returns a *HeldError
// and the time that is left.
func (c *Client) try(ctx context.Context, r *request) (l *Lease, left time.Duration, err error) {
	var (
		granted   bool
		token     *Token
		holder    *string
		remaining *time.Duration
		expires   *time.Time
		sent      time.Time
	)
	_, err = repeat(ctx, func() (err error) {
		sent, err = c.calls.call(ctx, func(rows pgx.Rows) error {
			return rows.Scan(&granted, &token, &holder, &remaining, &expires)
		}, acquireSQL, r.name, r.ttl, r.claim, r.owner, r.encoded)
		return err
	})
	switch {
	case err != nil:
		return nil, 0, c.ended(ctx, fmt.Errorf("acquire lease %q: %w", r.name, err))
	case granted:
		l := &Lease{client: c, name: r.name, token: *token, ttl: r.ttl}
		l.open(r.values)
		c.keeper.add(l, sent, *remaining)
		return l, 0, nil
	case token == nil: // somebody is just creating the name
		return nil, 0, &HeldError{Name: r.name}
	}
	held := &HeldError{Name: r.name, Token: *token}
	if holder != nil {
		held.Owner = *holder
	}
	if remaining != nil && expires != nil {
		held.ExpiresAt = *expires
		left = *remaining
	}
	return nil, left, held
}

// ended makes an error say why the call's context ended, where it did.
func (c *Client) ended(ctx context.Context, err error) error {
	if errors.Is(context.Cause(ctx), ErrClosed) {
		return ErrClosed
	}
	if ctx.Err() != nil && !errors.Is(err, ctx.Err()) {
		return fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return err
}
