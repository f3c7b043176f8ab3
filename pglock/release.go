package pglock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgtype/zeronull"
)

const releaseSQL = `SELECT token, state, blockers, since
	FROM pglock.release($1::text[], $2::bigint[], $3::interval)`

const releaseOneSQL = `SELECT $2::bigint AS token, state, blockers, since
	FROM pglock.release_one($1::text, $2::bigint, $3::interval, $4::boolean)`

const (
	// patience is how long a release waits for an open guard.
	patience = 5 * time.Second

	// turn is how long one statement of it waits.
	turn = 100 * time.Millisecond

	// releaseBound is how long a release may take where nothing else bounds it, with
	// the repeats of a lost answer.
	releaseBound = 2 * patience
)

// Release frees the lease, and only this tenure of it. It returns nil when it
// is free, also when it was released before. Otherwise:
//
//   - a *LostError (ErrLost) when the tenure had ended: it expired, was taken
//     or was released by force; or the server could not be reached, so that
//     nobody knows: then the lease ends with its TTL.
//   - a *BlockedError (ErrLocked) when a transaction that Guard admitted was
//     still open after the smaller of 5 s and the time left: the lease is still
//     held and renewed, and Release may be called again.
//
// Any other error comes from the server, which has undone the release: the lease
// is still held then too. It goes on for up to 5 s after ctx has ended, and for no
// longer than 10 s. Call it when the work that the lease protects has ended. One
// statement, or while the client is busy a part of one that its calls share, and
// beside an open guard one more for each 100 ms that it waits:
//
//	SELECT * FROM pglock.release_one('accounts/42', 17, '100 ms', false)
func (l *Lease) Release(ctx context.Context) error {
	l.turn.Lock()
	defer l.turn.Unlock()
	if l.settled {
		return l.verdict
	}
	before := l.stop(ErrReleased)
	give, until := time.Now().Add(min(patience, time.Until(l.Deadline()))), time.Now().Add(releaseBound)
	a, repeated, err := l.client.courier.release(ctx, l, until)
	for err == nil && a.state == "blocked" && time.Now().Before(give) && ctx.Err() == nil {
		// In short turns, so that releases that are blocked don't keep the
		// client's connections from those that are not.
		var again bool
		a, again, err = l.client.releaseOne(ctx, l, until)
		repeated = repeated || again
	}
	return l.settle(before, a, repeated, err)
}

// releaseAll releases many leases in one statement, and those that were
// blocked one by one.
func (c *Client) releaseAll(ctx context.Context, held []*Lease) error {
	var mine []*Lease
	before := map[*Lease]error{}
	for _, l := range held {
		l.turn.Lock() // after a release that is just under way
		if l.settled {
			l.turn.Unlock()
			continue
		}
		mine = append(mine, l)
		before[l] = l.stop(ErrReleased)
	}
	if len(mine) == 0 {
		return nil
	}
	answers, repeated, err := c.release(ctx, mine, 0)
	errs := make([]error, len(mine))
	var wg sync.WaitGroup
	for i, l := range mine {
		errs[i] = l.settle(before[l], answers[l], repeated, err)
		held := !l.settled
		l.turn.Unlock()
		if held {
			wg.Go(func() { errs[i] = l.Release(ctx); l.abandon() })
		}
	}
	wg.Wait()
	return errors.Join(errs...)
}

// answer is what the server says about one tenure.
type answer struct {
	state    string
	blockers pgtype.FlatArray[int32]
	since    zeronull.Timestamptz
}

func scanAnswer(rows pgx.Rows) (token Token, a answer, err error) {
	err = rows.Scan((*int64)(&token), &a.state, &a.blockers, &a.since)
	return token, a, err
}

// releaseOne is release for one lease, with the patience for one turn.
func (c *Client) releaseOne(ctx context.Context, l *Lease, until time.Time) (a answer, repeated bool, err error) {
	repeated, err = c.askRelease(ctx, until, func(_ Token, one answer) { a = one }, releaseOneSQL,
		l.name, int64(l.token), turn, l.queued || c.listener.expects(l.name))
	return a, repeated, err
}

// release sends one statement for all of the leases.
func (c *Client) release(ctx context.Context, leases []*Lease, wait time.Duration) (answers map[*Lease]answer, repeated bool, err error) {
	names, tokens, byToken := columns(leases)
	answers = make(map[*Lease]answer, len(leases))
	repeated, err = c.askRelease(ctx, time.Now().Add(releaseBound), func(token Token, one answer) { answers[byToken[token]] = one }, releaseSQL, names, tokens, wait)
	return answers, repeated, err
}

// askRelease sends a statement, again when its answer was lost, on a context that
// outlives the caller's, but not until.
func (c *Client) askRelease(ctx context.Context, until time.Time, got func(Token, answer), sql string, args ...any) (repeated bool, err error) {
	ctx, cancel := c.outlive(ctx, until)
	defer cancel()
	return c.calls.repeat(ctx, func(ctx context.Context) error {
		_, err := c.calls.call(ctx, func(rows pgx.Rows) error {
			token, a, err := scanAnswer(rows)
			got(token, a)
			return err
		}, sql, args...)
		return err
	})
}

// outlive returns the context of a release that was called with ctx.
func (c *Client) outlive(ctx context.Context, until time.Time) (context.Context, context.CancelFunc) {
	ctx, cancel := linger(ctx, grace)
	bound := c.releases.at(until, func() { cancel(errSilent) })
	return ctx, func() { bound.stop(); cancel(nil) }
}

// columns returns the arrays that the schema's functions take. A name may stand
// twice, in a tenure that has ended and the one after it; a token never does.
func columns(leases []*Lease) (names []string, tokens []int64, byToken map[Token]*Lease) {
	names, tokens = make([]string, len(leases)), make([]int64, len(leases))
	byToken = make(map[Token]*Lease, len(leases))
	for i, l := range leases {
		names[i], tokens[i], byToken[l.token] = l.name, int64(l.token), l
	}
	return names, tokens, byToken
}

// outcome turns an answer into an error; repeated says that an answer to the
// same release was lost before.
func (l *Lease) outcome(a answer, repeated bool) error {
	switch {
	case a.state == "released":
		return nil
	case a.state == "idle" && repeated:
		// The release whose answer was lost did it. One by force in the same
		// moment would read the same, and the lease is free either way.
		return nil
	case a.state == "idle":
		return l.lost(ForceReleased, nil)
	case a.state == "expired":
		return l.lost(Expired, nil)
	case a.state == "taken" && repeated:
		return l.lost(Unreachable, errors.New("the answer to the release was lost, and somebody else has the lease since"))
	case a.state == "taken":
		return l.lost(Taken, nil)
	case a.state == "blocked":
		return &BlockedError{What: fmt.Sprintf("release of lease %q", l.name), Pids: a.blockers, Since: time.Time(a.since)}
	}
	return l.lost(Unreachable, fmt.Errorf("the server answered %q", a.state))
}

// settle turns the outcome of a release into what Release returns. before is
// the cause with which the context had ended when it began: ErrReleased if the
// lease was held until then.
func (l *Lease) settle(before error, a answer, repeated bool, err error) error {
	verdict := l.outcome(a, repeated)
	if err != nil {
		verdict = l.lost(Unreachable, err)
		if _, refused := errors.AsType[*pgconn.PgError](err); refused && !unanswered(err) {
			// It was rolled back, by a statement_timeout for example.
			a.state, verdict = "blocked", fmt.Errorf("release lease %q: %w", l.name, err)
		}
	}
	if a.state == "blocked" {
		if before == ErrReleased {
			l.open(l.Context())
			if l.client.keeper.has(l) {
				return verdict
			}
			// It was lost meanwhile, when the context had ended already.
			l.stop(l.lost(Expired, verdict))
		}
		verdict = l.lost(Expired, verdict)
	}
	if before != ErrReleased && (verdict == nil || err != nil) {
		verdict = before // it was lost for this process before it was freed
	}
	l.client.keeper.drop(l)
	l.settled, l.verdict = true, verdict
	if before == ErrReleased { // else its loss was told before
		lost, _ := errors.AsType[*LostError](verdict)
		l.tellEnd(lost)
	}
	return verdict
}

// abandon stops the renewal of a lease that nobody will release any more.
func (l *Lease) abandon() {
	l.turn.Lock()
	defer l.turn.Unlock()
	if l.settled {
		return
	}
	l.client.keeper.drop(l)
	l.settled = true
	if l.stop(ErrReleased) == ErrReleased {
		l.tellEnd(nil)
	}
}
