package pglock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"
)

func causeOf(err error) Cause {
	if lost, ok := errors.AsType[*LostError](err); ok {
		return lost.Cause
	}
	return ""
}

var someTTLs = []time.Duration{minTTL, 333 * time.Millisecond, 3 * time.Second, 30 * time.Second, 10 * time.Minute}

// While no answer comes the context ends at the deadline, not at an error and
// not when the hung renewal is cut; each is cut in time for another.
func TestKeeper_L3_LostAtTheDeadline(t *testing.T) {
	t.Parallel()
	oops := errors.New("oops")
	for what, reply := range map[string]reply{
		"renewals hang": func(ctx context.Context, _ int, _ []*Lease) (map[*Lease]string, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		},
		"renewals fail": func(context.Context, int, []*Lease) (map[*Lease]string, error) { return nil, oops },
		"renewals hang deaf to the cut": func(ctx context.Context, _ int, leases []*Lease) (map[*Lease]string, error) {
			time.Sleep(2 * leases[0].ttl)
			return nil, oops
		},
	} {
		for _, ttl := range someTTLs {
			t.Run(fmt.Sprint(what, " ", ttl), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					r := newRig(t, reply)
					time.Sleep(rand.N(ttl)) // off the grid
					l := r.grant(ttl)
					want := r.since() + ttl - margin(ttl)
					if got := l.Deadline().Sub(r.begun); got != want {
						t.Errorf("the deadline is %v, want %v", got, want)
					}
					<-l.Context().Done()
					if r.since() != want {
						t.Errorf("lost at %v, want %v", r.since(), want)
					}
					if cause := causeOf(context.Cause(l.Context())); cause != Unreachable {
						t.Errorf("the cause is %q, want %q", cause, Unreachable)
					}
					if l.Err() != context.Cause(l.Context()) {
						t.Errorf("Err says %v", l.Err())
					}
					asked := r.askings()
					if n := len(asked); n < 2 && what != "renewals hang deaf to the cut" {
						t.Errorf("%d renewals were sent, want another after the first", n)
					}
					for _, a := range asked {
						if a.cut > max(ttl/4, 25*time.Millisecond) || a.cut > 5*time.Second {
							t.Errorf("a renewal may take %v", a.cut)
						}
					}
					time.Sleep(3 * ttl)
					if n := len(r.askings()); n > len(asked) {
						t.Errorf("%d renewals after the loss", n-len(asked))
					}
				})
			})
		}
	}
}

// One renewal that fails or hangs loses nothing (L05).
func TestKeeper_L05_AnotherTry(t *testing.T) {
	t.Parallel()
	for _, ttl := range someTTLs {
		for what, reply := range map[string]reply{
			"fails": func(_ context.Context, nth int, _ []*Lease) (map[*Lease]string, error) {
				if nth%2 == 0 {
					return nil, errors.New("oops")
				}
				return nil, nil
			},
			"hangs": func(ctx context.Context, nth int, _ []*Lease) (map[*Lease]string, error) {
				if nth%2 == 0 {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				return nil, nil
			},
		} {
			t.Run(fmt.Sprint(what, " ", ttl), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					r := newRig(t, reply)
					time.Sleep(rand.N(ttl))
					l := r.grant(ttl)
					time.Sleep(5 * ttl)
					synctest.Wait()
					if err := l.Err(); err != nil {
						t.Errorf("lost: %v", err)
					}
				})
			})
		}
	}
}

// A renewal that hangs is cut in time for the shortest lease held, not only for
// the shortest in it.
func TestKeeper_AHungBatchDelaysNoShorterLease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var long *Lease
		r := newRig(t, func(ctx context.Context, _ int, leases []*Lease) (map[*Lease]string, error) {
			for _, l := range leases {
				if l == long {
					<-ctx.Done()
					return nil, ctx.Err()
				}
			}
			return nil, nil
		})
		long = r.grant(time.Minute)
		short := r.grant(330 * time.Millisecond)
		time.Sleep(50 * time.Second)
		synctest.Wait()
		if err := short.Err(); err != nil {
			t.Errorf("the short lease: %v", err)
		}
	})
}

// What the server says of a tenure is the cause of its loss, at once; the
// others of the batch go on.
func TestKeeper_Causes(t *testing.T) {
	t.Parallel()
	for state, want := range map[string]Cause{"expired": Expired, "taken": Taken, "idle": ForceReleased} {
		t.Run(state, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var victim *Lease
				r := newRig(t, func(context.Context, int, []*Lease) (map[*Lease]string, error) {
					return map[*Lease]string{victim: state}, nil
				})
				victim = r.grant(3 * time.Second)
				other := r.grant(3 * time.Second)
				<-victim.Context().Done()
				if got := causeOf(context.Cause(victim.Context())); got != want {
					t.Errorf("%q became the cause %q", state, got)
				}
				if r.since() != time.Second {
					t.Errorf("it took until %v, want the first heartbeat", r.since())
				}
				time.Sleep(10 * time.Second)
				synctest.Wait()
				if other.Err() != nil {
					t.Errorf("the other lease: %v", other.Err())
				}
				if n := len(r.renewals()[victim]); n != 1 {
					t.Errorf("the lost lease was renewed %d times", n)
				}
			})
		})
	}
}

// A process that was stopped learns at its first look at the clock that its
// lease is over, though no timer has fired yet.
func TestLease_ErrLooksAtTheClock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, allHeld)
		r.keeper.running = true // nobody runs
		l := r.grant(time.Second)
		time.Sleep(time.Second - margin(time.Second) - 1)
		if err := l.Err(); err != nil {
			t.Errorf("before the deadline: %v", err)
		}
		time.Sleep(time.Nanosecond)
		if l.Context().Err() != nil {
			t.Error("the context has ended by itself: this test shows nothing")
		}
		if err := l.Err(); causeOf(err) != Expired || l.Context().Err() == nil {
			t.Errorf("at the deadline: %v", err)
		}
	})
}

// The margin covers two clocks that NTP slews apart, 500 ppm each.
func TestMargin(t *testing.T) {
	t.Parallel()
	for _, ttl := range append(someTTLs, maxTTL) {
		if got, least := margin(ttl), ttl/1_000_000*1000; got < least || got > ttl/50 {
			t.Errorf("of %v the margin is %v, want between %v and %v", ttl, got, least, ttl/50)
		}
	}
}
