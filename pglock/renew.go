package pglock

import (
	"container/heap"
	"context"
	"time"

	"github.com/jackc/pgx/v5"
)

// One statement renews leases and refreshes tickets.
const renewSQL = `SELECT token, state, remaining, NULL::text FROM pglock.renew($1::text[], $2::bigint[])
	UNION ALL
	SELECT token, state, remaining, claim::text FROM pglock.refresh($3::text[], $4::uuid[])`

func (p *ownPool) renew(ctx context.Context, batch []kept) (sent time.Time, answers map[kept]renewal, err error) {
	var leases []*Lease
	names, claims := []string{}, []string{}
	tickets := map[string]*ticket{}
	for _, one := range batch {
		switch one := one.(type) {
		case *Lease:
			leases = append(leases, one)
		case *ticket:
			names, claims = append(names, one.request.name), append(claims, one.request.claim)
			tickets[one.request.claim] = one
		}
	}
	leaseNames, tokens, byToken := columns(leases)
	answers = make(map[kept]renewal, len(batch))
	sent, err = p.call(ctx, func(rows pgx.Rows) error {
		var claim *string
		var token *Token
		var r renewal
		if err := rows.Scan(&token, &r.state, &r.remaining, &claim); err != nil {
			return err
		}
		if token != nil {
			r.token = *token
		}
		if claim != nil {
			answers[tickets[*claim]] = r
		} else {
			answers[byToken[r.token]] = r
		}
		return nil
	}, renewSQL, leaseNames, tokens, names, claims)
	if err != nil {
		return sent, nil, err // part of an answer is none: it may have been rolled back
	}
	return sent, answers, nil
}

// send renews a batch. A renewal that hangs is cut, so that there is time for
// another within the shortest TTL.
func (k *keeper) send(batch []kept) {
	shortest := time.Duration(never)
	var told Renewed
	for _, one := range batch {
		switch one := one.(type) {
		case *Lease:
			shortest = min(shortest, one.ttl)
			told.Leases++
		case *ticket:
			shortest = min(shortest, one.request.ttl)
			told.Tickets++
		}
	}
	ctx, cancel := context.WithTimeout(k.quit, min(max(shortest/(beats+1), 25*time.Millisecond), 5*time.Second))
	sent, answers, err := k.renew(ctx, batch)
	cancel()
	k.answered(batch, sent, answers, err)
	if told.Err = err; !sent.IsZero() {
		told.Took = time.Since(sent)
	}
	k.tell(told)
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
		kept := true
		switch one := one.(type) {
		case *Lease:
			var cause Cause
			if kept, cause = k.answeredLease(one, sent, now, answers[one], err); !kept {
				ended[one] = cause
			}
		case *ticket:
			kept = k.answeredTicket(one, sent, now, answers[one], err)
		}
		if kept {
			heap.Fix(&k.line, b.index)
		} else {
			heap.Remove(&k.line, b.index)
		}
	}
	k.busy = false
	k.poke()
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
