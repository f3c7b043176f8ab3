package pglock

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// The keeper on a fake clock and a fake server. Nothing here touches a socket.

// rig is a client whose renewals answer answers.
type rig struct {
	*Client
	begun time.Time

	mu    sync.Mutex
	asked []asking
	token Token
}

// asking is one renewal statement.
type asking struct {
	at     time.Duration // since the rig's beginning
	leases []*Lease
	cut    time.Duration // how long it may take
}

// reply is what becomes of a renewal statement: the states of tenures that are
// not just held, or an error. It may take its time.
type reply func(ctx context.Context, nth int, leases []*Lease) (map[*Lease]string, error)

func allHeld(context.Context, int, []*Lease) (map[*Lease]string, error) { return nil, nil }

func newRig(t *testing.T, reply reply) *rig {
	r := &rig{Client: &Client{}, begun: time.Now()}
	r.keeper = newKeeper(&ownPool{})
	r.keeper.renew = func(ctx context.Context, batch []kept) (time.Time, map[kept]renewal, error) {
		sent := time.Now()
		leases := make([]*Lease, len(batch))
		for i, one := range batch {
			leases[i] = one.(*Lease)
		}
		deadline, _ := ctx.Deadline()
		r.mu.Lock()
		nth := len(r.asked)
		r.asked = append(r.asked, asking{sent.Sub(r.begun), leases, deadline.Sub(sent)})
		r.mu.Unlock()
		states, err := reply(ctx, nth, leases)
		if err != nil {
			return sent, nil, err
		}
		answers := map[kept]renewal{}
		for _, l := range leases {
			a := renewal{state: "held", remaining: &l.ttl}
			if state, ok := states[l]; ok {
				a = renewal{state: state}
			}
			answers[l] = a
		}
		return sent, answers, nil
	}
	t.Cleanup(r.keeper.stop)
	return r
}

// grant gives the client a lease by an answer that took no time.
func (r *rig) grant(ttl time.Duration) *Lease {
	r.token++
	ask := &request{values: context.Background(), name: fmt.Sprint("lease ", r.token), ttl: ttl}
	return r.lease(ask, r.token, time.Now(), ttl)
}

func (r *rig) askings() []asking {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]asking(nil), r.asked...)
}

// since is the time on the rig's clock.
func (r *rig) since() time.Duration { return time.Since(r.begun) }

// renewals returns when each lease was asked about.
func (r *rig) renewals() map[*Lease][]time.Duration {
	times := map[*Lease][]time.Duration{}
	for _, a := range r.askings() {
		for _, l := range a.leases {
			times[l] = append(times[l], a.at)
		}
	}
	return times
}

// Leases acquired at any time are renewed together, in chunks, and none later
// than a heartbeat after the last time.
func TestKeeper_L10_OneStatementAHeartbeat(t *testing.T) {
	t.Parallel()
	const ttl = 30 * time.Second
	for _, leases := range []int{1, 1000, 10_000} {
		t.Run(fmt.Sprint(leases), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, allHeld)
				granted := map[*Lease]time.Duration{}
				for range leases {
					time.Sleep(rand.N(4 * ttl / time.Duration(leases)))
					granted[r.grant(ttl)] = r.since()
				}
				time.Sleep(3 * ttl)
				synctest.Wait()
				perBeat := map[time.Duration]int{}
				for _, a := range r.askings() {
					perBeat[a.at/(ttl/beats)]++
					if len(a.leases) > chunk {
						t.Errorf("a statement renews %d leases", len(a.leases))
					}
				}
				for beat, n := range perBeat {
					if most := (leases + chunk - 1) / chunk; n > most {
						t.Errorf("heartbeat %d had %d statements, want at most %d", beat, n, most)
					}
				}
				for l, times := range r.renewals() {
					last := granted[l]
					for _, at := range times {
						if at-last > ttl/beats {
							t.Fatalf("%s was renewed after %v, want at most %v", l.name, at-last, ttl/beats)
						}
						last = at
					}
					if r.since()-last > ttl/beats {
						t.Fatalf("%s was last renewed %v ago", l.name, r.since()-last)
					}
					if l.Err() != nil {
						t.Fatalf("%s: %v", l.name, l.Err())
					}
				}
				if n := len(r.renewals()); n != leases {
					t.Errorf("%d leases were renewed, want %d", n, leases)
				}
			})
		})
	}
}

// A server that takes its time with each chunk makes the last of many wait for
// no more than all the chunks take; those of another TTL wait with them.
func TestKeeper_ManyAndMixed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const took = 5 * time.Millisecond
		r := newRig(t, func(context.Context, int, []*Lease) (map[*Lease]string, error) {
			time.Sleep(took)
			return nil, nil
		})
		ttls := []time.Duration{300 * time.Millisecond, time.Second, 7 * time.Second, time.Minute, 24 * time.Hour}
		granted := map[*Lease]time.Duration{}
		for i := range 1500 {
			granted[r.grant(ttls[i%len(ttls)])] = r.since()
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		for l, times := range r.renewals() {
			for _, at := range times {
				if late := at - granted[l] - l.ttl/beats; late > 3*took {
					t.Fatalf("a lease of %v was renewed %v late", l.ttl, late)
				}
				granted[l] = at
			}
			if l.Err() != nil {
				t.Fatalf("a lease of %v: %v", l.ttl, l.Err())
			}
		}
	})
}

// A row that somebody has locked is tried again soon, delays none of the others
// and is lost only at its deadline.
func TestKeeper_Busy(t *testing.T) {
	t.Parallel()
	const ttl = 3 * time.Second
	for what, until := range map[string]time.Duration{"for a while": 2500 * time.Millisecond, "for good": time.Hour} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var locked *Lease
				begun := time.Now()
				r := newRig(t, func(context.Context, int, []*Lease) (map[*Lease]string, error) {
					if time.Since(begun) < until {
						return map[*Lease]string{locked: "busy"}, nil
					}
					return nil, nil
				})
				locked = r.grant(ttl)
				var others []*Lease
				for range 10 {
					others = append(others, r.grant(ttl))
				}
				time.Sleep(10 * ttl)
				synctest.Wait()
				for _, l := range others {
					if l.Err() != nil || len(r.renewals()[l]) != 30 {
						t.Errorf("another lease was renewed %d times: %v", len(r.renewals()[l]), l.Err())
					}
				}
				times := r.renewals()[locked]
				if again := times[1] - times[0]; again > ttl/20 {
					t.Errorf("it was tried again after %v", again)
				}
				if lost := locked.Err() != nil; lost != (until > ttl) {
					t.Errorf("it is lost: %t", lost)
				}
			})
		})
	}
}

// A released lease is not renewed, whatever answer is under way.
func TestKeeper_Dropped(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const ttl = 3 * time.Second
		r := newRig(t, func(context.Context, int, []*Lease) (map[*Lease]string, error) {
			time.Sleep(100 * time.Millisecond)
			return nil, nil
		})
		first, second, third := r.grant(ttl), r.grant(ttl), r.grant(ttl)
		if !r.keeper.drop(first) || r.keeper.drop(first) || r.keeper.has(first) {
			t.Error("drop does not say what it did")
		}
		time.Sleep(1050 * time.Millisecond) // a renewal is under way
		r.keeper.drop(second)
		time.Sleep(3 * ttl)
		synctest.Wait()
		times := r.renewals()
		if len(times[first]) != 0 || len(times[second]) != 1 || len(times[third]) < 9 {
			t.Errorf("renewed %d, %d and %d times", len(times[first]), len(times[second]), len(times[third]))
		}
		if held := r.keeper.held(); len(held) != 1 || held[0] != third {
			t.Errorf("the keeper holds %d leases", len(held))
		}
	})
}

// After stop nothing is sent.
func TestKeeper_L24_Stop(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(ctx context.Context, _ int, _ []*Lease) (map[*Lease]string, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		})
		l := r.grant(3 * time.Second)
		time.Sleep(1500 * time.Millisecond)
		r.keeper.stop() // cuts the renewal that hangs
		n := len(r.askings())
		time.Sleep(time.Minute)
		if more := len(r.askings()); more != n {
			t.Errorf("%d renewals after stop", more-n)
		}
		if err := l.Err(); causeOf(err) != Unreachable {
			t.Errorf("after its deadline the lease says %v", err)
		}
	})
}
