package pglock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// load is what one exchange carries.
type load struct {
	errands []*errand
	behind  []*errand          // tries of names that errands has one of already: they are not sent
	tries   map[string]*errand // those of errands, by name
	claim   string             // of all its tries
	waiting int                // callers that have not given up
	ctx     context.Context
	cancel  context.CancelFunc
}

// roomy bounds how much one exchange carries, and with that how long it holds
// rows locked.
const roomy = 500

const exchangeSQL = `SELECT name, token, state, blockers, since, holder, remaining, expires_at
	FROM pglock.exchange($1::text[], $2::bigint[], $3::text[], $4::interval[], $5::jsonb[], $6::uuid, $7::text)`

// fill returns what the next exchange carries; nil: there is nothing. Of the tries
// of one name it carries the first. The others ask the server nothing, for what it
// says to the first it would say to them: somebody has it, or now the first.
func (c *courier) fill() *load {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := &load{claim: newClaim(), tries: map[string]*errand{}}
	var rest []*errand
	for _, e := range c.pending {
		switch {
		case e.gone:
			continue
		case e.request != nil && l.tries[e.request.name] != nil:
			e.behind = l.tries[e.request.name]
			l.behind = append(l.behind, e)
		case len(l.errands) == roomy:
			rest = append(rest, e)
			continue
		default:
			if e.request != nil {
				l.tries[e.request.name] = e
			}
			l.errands = append(l.errands, e)
		}
		e.load = l
	}
	c.pending = rest
	if len(l.errands) == 0 {
		c.loads--
		return nil
	}
	l.waiting = len(l.errands) + len(l.behind)
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l
}

// deliverOne sends what goes alone after all, as the statement that it is: an
// exchange would cost the server more.
func (c *courier) deliverOne(l *load, e *errand) {
	if r := e.request; r != nil {
		e.bid, e.err = c.client.tryOne(l.ctx, r, l.claim)
		return
	}
	e.answer, e.repeated, e.err = c.client.releaseOne(l.ctx, e.lease, time.Now().Add(releaseBound))
}

// deliver sends what a load carries, and tells each caller what became of his call.
func (c *courier) deliver(l *load) {
	if len(l.errands) == 1 {
		c.deliverOne(l, l.errands[0])
	} else {
		c.deliverMany(l)
	}
	c.passOn(l)
	for _, errands := range [][]*errand{l.errands, l.behind} {
		for _, e := range errands {
			close(e.done)
		}
	}
}

// passOn gives those who are behind another the answer that he had: he has it now. If
// his caller has given up, the first of them who asked for the same has it instead.
func (c *courier) passOn(l *load) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range l.behind {
		first := e.behind
		e.bid, e.err, e.alone = first.bid, first.err, first.alone
		if first.bid.granted && first.gone && !e.gone && e.request.like(first.request) {
			e.behind, first.bid.granted = nil, false
		} else {
			e.bid.granted = false
		}
	}
}

// deliverMany sends an exchange, again when its answer was lost.
func (c *courier) deliverMany(l *load) {
	var (
		ended, wanted = []string{}, []string{} // not nil, which is NULL
		tokens        = []int64{}
		ttls          = pgtype.FlatArray[pgtype.Interval]{}
		metadata      = []*string{}
		releases      = make(map[Token]*errand, len(l.errands))
		first         *request // of the tries
		alike         = true   // are they all, but for the names?
	)
	for _, e := range l.errands {
		if r := e.request; r != nil {
			first = cmp.Or(first, r)
			alike = alike && r.like(first)
			wanted = append(wanted, r.name)
		} else {
			ended, tokens = append(ended, e.lease.name), append(tokens, int64(e.lease.token))
			releases[e.lease.token] = e
		}
	}
	for _, e := range l.errands {
		if r := e.request; r != nil && !(alike && len(ttls) == 1) { // then one of each for all
			ttls = append(ttls, pgtype.Interval{Microseconds: r.ttl.Microseconds(), Valid: true})
			metadata = append(metadata, r.encoded)
		}
	}
	var sent time.Time
	var name string
	var a answer
	var s bidScan
	repeated, err := c.client.calls.repeat(l.ctx, func(ctx context.Context) (err error) {
		for _, e := range l.errands { // what a lost answer said is not this one's
			e.bid, e.answer = bid{}, answer{state: "released"} // unless a row says otherwise
		}
		sent, err = c.client.calls.call(ctx, func(rows pgx.Rows) error {
			if err := rows.Scan(&name, &s.token, &a.state, &a.blockers, &a.since, &s.holder, &s.remaining, &s.expires); err != nil {
				return err
			}
			if s.granted = a.state == "granted"; s.granted || a.state == "refused" {
				if e := l.tries[name]; e != nil {
					e.bid = s.bid()
				}
			} else if e := releases[Token(s.token)]; e != nil {
				e.answer = a
			}
			return nil
		}, exchangeSQL, ended, tokens, wanted, ttls, metadata, l.claim, c.client.owner)
		return err
	})
	_, refused := errors.AsType[*pgconn.PgError](err)
	for _, e := range l.errands {
		e.bid.sent, e.repeated, e.err = sent, repeated, err
		if err != nil && e.request != nil {
			e.err = fmt.Errorf("acquire lease %q: %w", e.request.name, err)
		}
		e.alone = refused && !unanswered(err)
	}
}
