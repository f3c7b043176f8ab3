package pglock

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

const acquireAllSQL = `SELECT name, granted, token, holder, remaining, expires_at
	FROM pglock.acquire($1::text[], $2::interval, $3::uuid, $4::text, $5::jsonb, whole => true)`

// TryAcquireAll acquires every lease or none, and never waits for a holder. The
// leases come in the order of names; no name may stand twice. A *HeldError
// (ErrLocked) says who has one of those that are held. Each is then a lease of
// its own. One statement:
//
//	SELECT * FROM pglock.acquire('{accounts/1,accounts/2}', '30 s', whole => true)
func (c *Client) TryAcquireAll(ctx context.Context, names []string, ttl time.Duration, opts ...LeaseOption) ([]*Lease, error) {
	requests, err := c.requests(ctx, names, ttl, opts)
	if err != nil || len(requests) == 0 {
		return nil, err
	}
	ctx, leave, err := c.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	shared := requests[0] // one claim for all
	bids := make(map[string]bid, len(names))
	var sent time.Time
	_, err = c.calls.repeat(ctx, func(ctx context.Context) (err error) {
		sent, err = c.calls.call(ctx, func(rows pgx.Rows) error {
			var name string
			var s bidScan
			err := rows.Scan(&name, &s.granted, &s.token, &s.holder, &s.remaining, &s.expires)
			bids[name] = s.bid()
			return err
		}, acquireAllSQL, names, ttl, shared.claim, shared.owner, shared.encoded)
		return err
	})
	if err != nil {
		if ctx.Err() != nil || errors.Is(err, errUnconfirmed) {
			var wg sync.WaitGroup
			for _, r := range requests {
				r.claim = shared.claim
				wg.Go(func() { c.takeBack(r) })
			}
			wg.Wait()
		}
		return nil, c.ended(ctx, fmt.Errorf("acquire leases %q: %w", names, err))
	}
	var held *HeldError
	for _, name := range names {
		if b := bids[name]; !b.granted && (held == nil || held.Token == 0) {
			held = b.held(name)
		}
	}
	if held != nil {
		return nil, held
	}
	leases := make([]*Lease, len(names))
	for i, r := range requests {
		leases[i] = c.lease(r, bids[r.name].token, sent, bids[r.name].remaining)
	}
	return leases, nil
}

// AcquireAll waits for every lease, one after the other in the order of their
// names' bytes, so that no two callers wait for each other; those it has are
// renewed meanwhile. The leases come in the order of names. On an error it has
// released what it had; for errors see Acquire.
func (c *Client) AcquireAll(ctx context.Context, names []string, ttl time.Duration, opts ...LeaseOption) ([]*Lease, error) {
	if _, err := c.requests(ctx, names, ttl, opts); err != nil {
		return nil, err
	}
	byName := make(map[string]*Lease, len(names))
	for _, name := range slices.Sorted(slices.Values(names)) {
		l, err := c.Acquire(ctx, name, ttl, opts...)
		if err != nil {
			return nil, errors.Join(err, c.releaseAll(ctx, slices.Collect(maps.Values(byName))))
		}
		byName[name] = l
	}
	leases := make([]*Lease, len(names))
	for i, name := range names {
		leases[i] = byName[name]
	}
	return leases, nil
}

func (c *Client) requests(ctx context.Context, names []string, ttl time.Duration, opts []LeaseOption) ([]*request, error) {
	requests := make([]*request, len(names))
	seen := make(map[string]bool, len(names))
	for i, name := range names {
		if seen[name] {
			return nil, fmt.Errorf("pglock: lease name %q stands twice: give each once", name)
		}
		seen[name] = true
		r, err := c.request(ctx, name, ttl, opts)
		if err != nil {
			return nil, err
		}
		requests[i] = r
	}
	return requests, nil
}
