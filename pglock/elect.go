package pglock

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// Elect campaigns for a name and runs fn for as long as it leads: it acquires
// the lease, waiting in line, and calls fn with a context that ends with the
// lease. Work is over before the lease is released:
//
//   - fn returns while the lease is held: Elect releases it and returns fn's
//     error, joined with the release's.
//   - the lease is lost: Elect waits for fn to return and campaigns again, also
//     while the server can't be reached or is no primary: a CampaignFailed each time.
//   - ctx ends: Elect waits for fn, releases and returns ctx's cause.
//   - the client is closed: likewise, and the error matches ErrClosed.
//
// Bad input, a missing schema, a missing grant, and a user or a database that the
// server doesn't know end it too.
func (c *Client) Elect(ctx context.Context, name string, ttl time.Duration, fn func(context.Context, *Lease) error) error {
	if _, err := c.request(ctx, name, ttl, nil); err != nil {
		return err
	}
	leave, err := c.begin()
	if err != nil {
		return err
	}
	defer leave()
	for {
		l, err := c.Acquire(ctx, name, ttl)
		switch {
		case ctx.Err() != nil:
			if err == nil {
				_ = l.Release(ctx) // or it ends with its TTL
			}
			return context.Cause(ctx)
		case err == nil:
			var lost bool
			if lost, err = c.lead(ctx, l, fn); !lost {
				return err
			}
		case hopeless(err):
			return err
		default:
			tell(ctx, c, CampaignFailed{Name: name, Err: err})
			select {
			case <-ctx.Done():
			case <-c.life.Done():
			case <-time.After(ttl/beats/2 + rand.N(ttl/beats)):
			}
		}
	}
}

// lead runs fn under the lease and releases it after that, also when fn panics.
func (c *Client) lead(ctx context.Context, l *Lease, fn func(context.Context, *Lease) error) (lost bool, err error) {
	defer func() {
		over := l.Err()
		released := l.Release(ctx)
		l.abandon()
		switch {
		case ctx.Err() != nil:
			err = context.Cause(ctx)
		case c.life.Err() != nil:
			err = errors.Join(ErrClosed, err, released)
		case errors.Is(over, ErrLost) || errors.Is(released, ErrLost):
			lost = true
		default:
			err = errors.Join(err, released)
		}
	}()
	both, cancel := c.under(ctx, l.Context())
	defer cancel()
	return false, fn(both, l)
}

// hopeless says whether an error would come back at each try.
func hopeless(err error) bool {
	if errors.Is(err, ErrClosed) || errors.Is(err, ErrNoSchema) {
		return true
	}
	pg, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (pg.Code == "42501" || strings.HasPrefix(pg.Code, "28") || strings.HasPrefix(pg.Code, "3D"))
}
