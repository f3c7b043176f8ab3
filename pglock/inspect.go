package pglock

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// LeaseInfo is what the server says about a lease that is held, or that has
// expired and was not taken since. The zero LeaseInfo but for Name is one that
// nobody holds.
type LeaseInfo struct {
	Name       string
	Token      Token
	Owner      string // what the holder's WithOwner says
	Role       string // the database role that acquired it
	AcquiredAt time.Time
	ExpiresAt  time.Time     // by the database's clock
	Remaining  time.Duration // zero or less: expired
	TTL        time.Duration
	Metadata   map[string]string // nil if another role stored it
	Waiters    int
}

// WaiterInfo is what the server says about a call of Acquire that waits.
type WaiterInfo struct {
	Name      string
	Ticket    int64 // lower ones are served first
	Owner     string
	Role      string
	QueuedAt  time.Time
	ExpiresAt time.Time // of the ticket, which its client refreshes
}

const leasesSQL = `SELECT name, token, coalesce(holder, ''), role::text, acquired_at, expires_at, remaining, ttl, metadata, waiters
	FROM pglock.list_leases($1::text)`

// Leases returns every lease that is held or has expired and was not taken
// since, by name. It takes no row locks. One statement:
//
//	SELECT * FROM pglock.list_leases()
func (c *Client) Leases(ctx context.Context) ([]LeaseInfo, error) { return c.leases(ctx, nil) }

func (c *Client) leases(ctx context.Context, only *string) (infos []LeaseInfo, err error) {
	err = c.list(ctx, func(rows pgx.Rows) error {
		info, err := pgx.RowToStructByPos[LeaseInfo](rows)
		infos = append(infos, info)
		return err
	}, leasesSQL, only)
	return infos, err
}

const waitersSQL = `SELECT name, ticket, coalesce(holder, ''), role::text, queued_at, expires_at FROM pglock.list_waiters()`

// Waiters returns who waits for leases, by name and then in the order in which
// they will be served. It takes no row locks. One statement:
//
//	SELECT * FROM pglock.list_waiters()
func (c *Client) Waiters(ctx context.Context) (infos []WaiterInfo, err error) {
	err = c.list(ctx, func(rows pgx.Rows) error {
		info, err := pgx.RowToStructByPos[WaiterInfo](rows)
		infos = append(infos, info)
		return err
	}, waitersSQL)
	return infos, err
}

// list sends a statement that only reads.
func (c *Client) list(ctx context.Context, scan func(pgx.Rows) error, sql string, args ...any) error {
	ctx, leave, err := c.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	if _, err := c.calls.call(ctx, scan, sql, args...); err != nil {
		return c.ended(ctx, fmt.Errorf("list: %w", err))
	}
	return nil
}

const forceReleaseSQL = `SELECT $2::bigint, state, blockers, since FROM pglock.force_release($1::text, $2::bigint)`

// ForceRelease ends the tenure with that token, whoever holds it, and hands the
// lease on to the next waiter. The holder learns of it with its next renewal,
// and its Guard fails at once. Otherwise it returns a *LostError (ErrLost) when
// that tenure has ended before, and a *BlockedError when a transaction that
// Guard admitted was still open after 5 s. The role needs EXECUTE on
// pglock.force_release. One statement:
//
//	SELECT * FROM pglock.force_release('accounts/42', 17)
func (c *Client) ForceRelease(ctx context.Context, name string, token Token) error {
	if err := checkName("lease", name); err != nil {
		return err
	}
	ctx, leave, err := c.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	l := &Lease{name: name, token: token}
	var a answer
	_, err = c.calls.call(ctx, func(rows pgx.Rows) (err error) {
		_, a, err = scanAnswer(rows)
		return err
	}, forceReleaseSQL, name, int64(token))
	if err != nil {
		return c.ended(ctx, fmt.Errorf("release lease %q by force: %w", name, err))
	}
	return l.outcome(a, false)
}
