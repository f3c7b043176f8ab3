package pglock

import (
	"container/heap"
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// keeper renews a client's leases, ends those whose deadline passes, and
// refreshes the tickets of those who wait. One goroutine waits for the next
// event of any of them; one more sends a renewal, so that a hung one delays no
// loss. Neither their number nor that of the connections depends on how many
// leases there are.
//
// Each has one next event: its renewal when a third of its TTL has passed, or,
// while a renewal is under way, the lease's deadline. Renewals for the same TTL
// fall on a common grid, so that thousands acquired at different times are
// renewed by the same few statements.
type keeper struct {
	renew func(context.Context, []kept) (sent time.Time, answers map[kept]renewal, err error)
	tell  func(Event)
	close func()
	start time.Time

	// deaf says that nobody hears notifications, so that tickets are looked
	// after more often.
	deaf atomic.Bool

	mu      sync.Mutex
	line    line   // whatever is kept, by its next event
	due     []kept // to be renewed once the renewal under way is answered
	busy    bool   // a renewal is under way
	cut     func() // ends it
	running bool
	stopped bool
	sleeps  time.Duration // until then, since start

	wake    chan struct{}
	quit    context.Context
	stopRun context.CancelFunc
	workers sync.WaitGroup
}

// renewal is what the server says about one tenure or ticket.
type renewal struct {
	state     string
	token     Token
	remaining *time.Duration
}

const (
	// beats is how many heartbeats a TTL has.
	beats = 3

	// chunk bounds how much one statement renews, and with that how long it
	// holds rows locked.
	chunk = 1000

	// never is later than any event.
	never = 1<<63 - 1
)

// margin is what a local deadline falls short of the server's: for clocks whose
// rates differ (NTP slews each by up to 500 ppm) and for the timer.
func margin(remaining time.Duration) time.Duration {
	return time.Millisecond + remaining/500
}

func newKeeper(pool *ownPool) *keeper {
	k := &keeper{start: time.Now(), wake: make(chan struct{}, 1), tell: func(Event) {}, close: pool.close}
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
	k.push(l)
}

// push puts something into the line; the caller holds k.mu.
func (k *keeper) push(one kept) {
	heap.Push(&k.line, one)
	if k.cut != nil {
		// The renewal under way may take longer than this one has time.
		time.AfterFunc(attempt(one.span()), k.cut)
	}
	if !k.running && !k.stopped {
		k.running = true
		k.workers.Go(k.run)
	}
	if one.pulse().next < k.sleeps { // else the goroutine wakes early enough
		k.poke()
	}
}

// extend sets a lease's deadline and its next renewal.
func (k *keeper) extend(l *Lease, sent time.Time, remaining time.Duration) {
	l.deadline.Store(int64(sent.Sub(k.start) + remaining - margin(remaining)))
	l.beat.next, l.beat.err = k.grid(sent, l.ttl), nil
}

// grid returns the last point of the TTL's grid that is no more than a
// heartbeat after sent.
func (k *keeper) grid(sent time.Time, ttl time.Duration) time.Duration {
	heartbeat := ttl / beats
	return (sent.Sub(k.start) + heartbeat) / heartbeat * heartbeat
}

// drop forgets a lease or a ticket and says whether it was there.
func (k *keeper) drop(one kept) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if one.pulse().index < 0 {
		return false
	}
	heap.Remove(&k.line, one.pulse().index)
	return true
}

func (k *keeper) has(one kept) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return one.pulse().index >= 0
}

// held returns every lease that is not yet released or lost.
func (k *keeper) held() []*Lease {
	k.mu.Lock()
	defer k.mu.Unlock()
	var leases []*Lease
	for _, one := range k.line {
		if l, ok := one.(*Lease); ok {
			leases = append(leases, l)
		}
	}
	return leases
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
func (k *keeper) tick(now time.Time) (lost []*Lease, batch []kept, next time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	since := now.Sub(k.start)
	for len(k.line) > 0 && k.line[0].pulse().next <= since {
		one := k.line[0]
		deadline := time.Duration(never)
		if l, ok := one.(*Lease); ok {
			if deadline = time.Duration(l.deadline.Load()); since >= deadline {
				heap.Pop(&k.line)
				lost = append(lost, l)
				continue
			}
		}
		b := one.pulse()
		if !b.asked {
			b.asked = true
			k.due = append(k.due, one)
		}
		b.next = deadline
		heap.Fix(&k.line, 0)
	}
	if !k.busy {
		for len(k.due) > 0 && len(batch) < chunk {
			if k.due[0].pulse().index >= 0 {
				batch = append(batch, k.due[0])
			}
			k.due = k.due[1:]
		}
		k.busy = len(batch) > 0
	}
	next = time.Hour
	if len(k.line) > 0 {
		next = k.line[0].pulse().next - since
	}
	k.sleeps = since + next
	return lost, batch, next
}
