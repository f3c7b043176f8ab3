package pglock

import (
	"container/heap"
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

const renewSQL = `SELECT token, state, remaining FROM pglock.renew($1::text[], $2::bigint[])`

const refreshSQL = `SELECT token, state, remaining, claim::text FROM pglock.refresh($1::text[], $2::uuid[])`

// renew asks for a batch that is all leases or all tickets.
func (p *ownPool) renew(ctx context.Context, batch []kept) (sent time.Time, answers map[kept]renewal, err error) {
	answers = make(map[kept]renewal, len(batch))
	if _, ok := batch[0].(*ticket); ok {
		sent, err = p.refresh(ctx, batch, answers)
	} else {
		leases := make([]*Lease, len(batch))
		for i, one := range batch {
			leases[i] = one.(*Lease)
		}
		names, tokens, byToken := columns(leases)
		sent, err = p.call(ctx, func(rows pgx.Rows) error {
			var r renewal
			err := rows.Scan(&r.token, &r.state, &r.remaining)
			answers[byToken[r.token]] = r
			return err
		}, renewSQL, names, tokens)
	}
	if err != nil {
		return sent, nil, err // part of an answer is none: it may have been rolled back
	}
	return sent, answers, nil
}

func (p *ownPool) refresh(ctx context.Context, batch []kept, answers map[kept]renewal) (sent time.Time, err error) {
	names, claims := make([]string, len(batch)), make([]string, len(batch))
	tickets := make(map[string]*ticket, len(batch))
	for i, one := range batch {
		t := one.(*ticket)
		names[i], claims[i], tickets[t.request.claim] = t.request.name, t.request.claim, t
	}
	return p.call(ctx, func(rows pgx.Rows) error {
		var claim string
		var token *Token
		var r renewal
		if err := rows.Scan(&token, &r.state, &r.remaining, &claim); err != nil {
			return err
		}
		if token != nil {
			r.token = *token
		}
		answers[tickets[claim]] = r
		return nil
	}, refreshSQL, names, claims)
}

// send renews a batch: first the leases, then, in a transaction of their own, the
// tickets, whose hand-offs may fail for reasons that are none of the leases'.
func (k *keeper) send(batch []kept) {
	var leases, tickets []kept
	for _, one := range batch {
		if _, ok := one.(*Lease); ok {
			leases = append(leases, one)
		} else {
			tickets = append(tickets, one)
		}
	}
	for _, half := range [][]kept{leases, tickets} {
		if len(half) == 0 {
			continue
		}
		ctx, done := k.bounded()
		sent, answers, err := k.renew(ctx, half)
		done()
		k.answered(half, sent, answers, err)
		told := Renewed{Err: err}
		if _, ok := half[0].(*Lease); ok {
			told.Leases = len(half)
		} else {
			told.Tickets = len(half)
		}
		if !sent.IsZero() {
			told.Took = time.Since(sent)
		}
		if err == nil || k.quit.Err() == nil { // what Close cuts off has not failed
			k.tell(told)
		}
	}
	k.mu.Lock()
	k.busy = false
	k.poke()
	k.mu.Unlock()
}

// bounded returns the context of one renewal. One that hangs is cut, so that
// there is time for another within the shortest TTL of all that is kept: of what
// comes while it is under way, too.
func (k *keeper) bounded() (context.Context, func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	shortest := 4 * maxAttempt
	for _, one := range k.line {
		shortest = min(shortest, one.span())
	}
	ctx, cancel := context.WithTimeout(k.quit, attempt(shortest))
	k.cut = cancel
	return ctx, func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.cut = nil
		cancel()
	}
}

// maxAttempt is how long a renewal may take at most.
const maxAttempt = 5 * time.Second

// attempt is how long a renewal may take where that is the shortest TTL.
func attempt(ttl time.Duration) time.Duration {
	return min(max(ttl/(beats+1), 25*time.Millisecond), maxAttempt)
}

// answered takes in what became of a batch.
func (k *keeper) answered(batch []kept, sent time.Time, answers map[kept]renewal, err error) {
	ended := map[*Lease]Cause{}
	k.mu.Lock()
	now := time.Since(k.start)
	for _, one := range batch {
		b := one.pulse()
		b.asked = false
		if b.index < 0 {
			continue // released, granted, lost or given up meanwhile
		}
		stays := true
		switch one := one.(type) {
		case *Lease:
			var cause Cause
			if stays, cause = k.answeredLease(one, sent, now, answers[one], err); !stays {
				ended[one] = cause
			}
		case *ticket:
			stays = k.answeredTicket(one, sent, now, answers[one], err)
		}
		if stays {
			heap.Fix(&k.line, b.index)
		} else {
			heap.Remove(&k.line, b.index)
		}
	}
	k.mu.Unlock()
	for l, cause := range ended {
		l.lose(cause, nil) // leaves one that is just being released to its Release
	}
}

func (k *keeper) answeredLease(l *Lease, sent time.Time, now time.Duration, a renewal, err error) (kept bool, cause Cause) {
	switch a.state {
	case "held":
		k.extend(l, sent, *a.remaining)
	case "expired":
		return false, Expired
	case "taken":
		return false, Taken
	case "idle":
		return false, ForceReleased
	default: // an error, or a row that somebody has locked: not known
		l.beat.err = err
		l.beat.next = min(now+retry(l.ttl), time.Duration(l.deadline.Load()))
	}
	return true, ""
}

func (k *keeper) answeredTicket(t *ticket, sent time.Time, now time.Duration, a renewal, err error) (kept bool) {
	switch a.state {
	case "granted":
		t.deliver(grant{token: a.token, sent: sent, remaining: *a.remaining})
		return false
	case "gone":
		t.deliver(grant{gone: true})
		return false
	case "waiting":
		k.prolong(t, sent, now, a.remaining)
	default: // an error, or a ticket that is just being granted
		t.beat.next = now + retry(t.request.ttl)
	}
	return true
}

// prolong sets when to look after a ticket next: at the refresh, or when the
// holder's time has run out. A time already past means that a transaction has
// the lease row, whose end nobody announces: it is looked for, less and less
// often.
func (k *keeper) prolong(t *ticket, sent time.Time, now time.Duration, remaining *time.Duration) {
	t.sent = sent
	t.beat.next = k.grid(sent, t.request.ttl)
	switch {
	case k.deaf.Load():
		t.beat.next = min(t.beat.next, now+recheck)
	case remaining != nil && *remaining > 0:
		t.beat.next = min(t.beat.next, now+*remaining+time.Millisecond)
	default:
		t.beat.next = min(t.beat.next, now+recheck<<min(t.looks, 10))
		t.looks++
		return
	}
	t.looks = 0
}

// retry is how soon what could not be renewed is tried again.
func retry(ttl time.Duration) time.Duration {
	return min(max(ttl/20, 10*time.Millisecond), time.Second)
}

// watch takes over a ticket just drawn by the answer to a statement sent then.
func (k *keeper) watch(t *ticket, sent time.Time, remaining *time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.prolong(t, sent, time.Since(k.start), remaining)
	k.push(t)
}

// refreshed says when the statement was sent that a ticket's expiry comes from.
func (k *keeper) refreshed(t *ticket) time.Time {
	k.mu.Lock()
	defer k.mu.Unlock()
	return t.sent
}

// lookAgain has every ticket refreshed at once: a notification may have been
// missed.
func (k *keeper) lookAgain() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, one := range k.line {
		if t, ok := one.(*ticket); ok && !t.beat.asked {
			t.beat.next = 0
		}
	}
	heap.Init(&k.line)
	k.poke()
}
