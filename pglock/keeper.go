package pglock

import (
	"container/heap"
	"context"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// keeper renews the leases of a client and ends those whose deadline passes.
// One goroutine waits for the next event of any lease; one more sends a
// renewal, so that a hung one delays no loss. Neither their number nor that of
// the connections depends on how many leases there are.
//
// A lease has one next event: its renewal when a third of its TTL has passed,
// or, while a renewal is under way, its deadline. Renewals of leases with the
// same TTL fall on a common grid, so that thousands acquired at different
// times are renewed by the same few statements.
type keeper struct {
	renew func(context.Context, []*Lease) (sent time.Time, answers map[*Lease]renewal, err error)
	close func()
	start time.Time

	mu      sync.Mutex
	line    line     // every lease that is held, by its next event
	due     []*Lease // to be renewed once the renewal under way is answered
	busy    bool     // a renewal is under way
	running bool
	stopped bool

	wake    chan struct{}
	quit    context.Context
	stopRun context.CancelFunc
	workers sync.WaitGroup
}

// beat is the keeper's state of one lease.
type beat struct {
	next  time.Duration // of the next event, since the keeper's start
	index int           // in the line; -1: not in it
	asked bool          // a renewal is due or under way
	err   error         // of the last renewal
}

// renewal is what the server says about one tenure.
type renewal struct {
	state     string
	remaining time.Duration
}

const (
	// beats is how many heartbeats a TTL has.
	beats = 3

	// chunk bounds how many leases one statement renews, and with that how long
	// it holds their rows locked.
	chunk = 1000
)

// margin is what a local deadline falls short of the server's: for clocks whose
// rates differ (NTP slews each by up to 500 ppm) and for the timer.
func margin(remaining time.Duration) time.Duration {
	return time.Millisecond + remaining/500
}

func newKeeper(pool *ownPool) *keeper {
	k := &keeper{start: time.Now(), wake: make(chan struct{}, 1), close: pool.close}
	k.renew = pool.renew
	k.quit, k.stopRun = context.WithCancel(context.Background())
	return k
}

// at turns a time on the keeper's clock into one that can be compared with
// time.Now, by the monotonic clock.
func (k *keeper) at(since int64) time.Time { return k.start.Add(time.Duration(since)) }

// add takes over a lease just granted by the answer to a statement sent then.
func (k *keeper) add(l *Lease, sent time.Time, remaining time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.extend(l, sent, remaining)
	heap.Push(&k.line, l)
	if !k.running && !k.stopped {
		k.running = true
		k.workers.Go(k.run)
	}
	k.poke()
}

// extend sets the deadline and the next renewal: at the last point of the grid
// that is no more than a heartbeat away.
func (k *keeper) extend(l *Lease, sent time.Time, remaining time.Duration) {
	since, heartbeat := sent.Sub(k.start), l.ttl/beats
	l.deadline.Store(int64(since + remaining - margin(remaining)))
	l.beat.next = (since + heartbeat) / heartbeat * heartbeat
	l.beat.err = nil
}

// drop forgets a lease and says whether it was there.
func (k *keeper) drop(l *Lease) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if l.beat.index < 0 {
		return false
	}
	heap.Remove(&k.line, l.beat.index)
	return true
}

func (k *keeper) has(l *Lease) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return l.beat.index >= 0
}

// held returns every lease that is not yet released or lost.
func (k *keeper) held() []*Lease {
	k.mu.Lock()
	defer k.mu.Unlock()
	return append([]*Lease(nil), k.line...)
}

// why says what a deadline that passed is owed to.
func (k *keeper) why(l *Lease) (Cause, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if l.beat.asked || l.beat.err != nil {
		return Unreachable, l.beat.err
	}
	return Expired, nil
}

// stop ends renewals. Leases still held end at their deadlines on the server.
func (k *keeper) stop() {
	k.mu.Lock()
	k.stopped = true
	k.mu.Unlock()
	k.stopRun()
	k.workers.Wait()
	k.close()
}

func (k *keeper) poke() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

func (k *keeper) run() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		lost, batch, next := k.tick(time.Now())
		for _, l := range lost {
			l.lose(k.why(l))
		}
		if len(batch) > 0 {
			k.workers.Go(func() { k.send(batch) })
		}
		timer.Reset(next)
		select {
		case <-timer.C:
		case <-k.wake:
		case <-k.quit.Done():
			return
		}
	}
}

// tick collects what is due: leases whose deadline has passed, a batch to renew
// if none is under way, and how long to sleep.
func (k *keeper) tick(now time.Time) (lost, batch []*Lease, next time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	since := now.Sub(k.start)
	for len(k.line) > 0 && k.line[0].beat.next <= since {
		l := k.line[0]
		if deadline := time.Duration(l.deadline.Load()); since >= deadline {
			heap.Pop(&k.line)
			lost = append(lost, l)
			continue
		} else if !l.beat.asked {
			l.beat.asked = true
			k.due = append(k.due, l)
			l.beat.next = deadline
		}
		heap.Fix(&k.line, 0)
	}
	if !k.busy {
		for len(k.due) > 0 && len(batch) < chunk {
			if k.due[0].beat.index >= 0 {
				batch = append(batch, k.due[0])
			}
			k.due = k.due[1:]
		}
		k.busy = len(batch) > 0
	}
	if len(k.line) == 0 {
		return lost, batch, time.Hour
	}
	return lost, batch, k.line[0].beat.next - since
}

// send renews a batch. A renewal that hangs is cut, so that there is time for
// another within the shortest of the leases.
func (k *keeper) send(batch []*Lease) {
	shortest := batch[0].ttl
	for _, l := range batch {
		shortest = min(shortest, l.ttl)
	}
	ctx, cancel := context.WithTimeout(k.quit, min(max(shortest/(beats+1), 25*time.Millisecond), 5*time.Second))
	sent, answers, err := k.renew(ctx, batch)
	cancel()
	k.answered(batch, sent, answers, err)
}

func (k *keeper) answered(batch []*Lease, sent time.Time, answers map[*Lease]renewal, err error) {
	ended := map[*Lease]Cause{}
	k.mu.Lock()
	now := time.Since(k.start)
	for _, l := range batch {
		l.beat.asked = false
		if l.beat.index < 0 {
			continue // released or lost meanwhile
		}
		switch a := answers[l]; a.state {
		case "held":
			k.extend(l, sent, a.remaining)
		case "expired":
			ended[l] = Expired
		case "taken":
			ended[l] = Taken
		case "idle":
			ended[l] = ForceReleased
		default: // an error, or a row that somebody has locked: try again
			l.beat.err = err
			l.beat.next = min(now+min(max(l.ttl/20, 10*time.Millisecond), time.Second), time.Duration(l.deadline.Load()))
		}
		if _, over := ended[l]; over {
			heap.Remove(&k.line, l.beat.index)
		} else {
			heap.Fix(&k.line, l.beat.index)
		}
	}
	k.busy = false
	k.poke()
	k.mu.Unlock()
	for l, cause := range ended {
		l.lose(cause, nil) // leaves one that is just being released to its Release
	}
}

const renewSQL = `SELECT name, token, state, remaining FROM pglock.renew($1::text[], $2::bigint[])`

func (p *ownPool) renew(ctx context.Context, leases []*Lease) (sent time.Time, answers map[*Lease]renewal, err error) {
	names, tokens, byName := columns(leases)
	answers = make(map[*Lease]renewal, len(leases))
	sent, err = p.call(ctx, func(rows pgx.Rows) error {
		var name string
		var token Token
		var r renewal
		var remaining *time.Duration
		if err := rows.Scan(&name, &token, &r.state, &remaining); err != nil {
			return err
		}
		if remaining != nil {
			r.remaining = *remaining
		}
		answers[byName[tenure{name, token}]] = r
		return nil
	}, renewSQL, names, tokens)
	if err != nil {
		return sent, nil, err // part of an answer is none: it may have been rolled back
	}
	return sent, answers, nil
}

// line is a heap of leases by their next event.
type line []*Lease

func (q line) Len() int           { return len(q) }
func (q line) Less(i, j int) bool { return q[i].beat.next < q[j].beat.next }
func (q line) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].beat.index, q[j].beat.index = i, j
}

func (q *line) Push(x any) {
	l := x.(*Lease)
	l.beat.index = len(*q)
	*q = append(*q, l)
}

func (q *line) Pop() any {
	old := *q
	l := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	l.beat.index = -1
	return l
}
