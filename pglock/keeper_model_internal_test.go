package pglock

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// The deadline counts from when the statement was sent, however late the reply.
// The control is a client that counts from the reply: with the same replies it
// believes to hold what the server has ended.
func TestKeeper_L3_TheHolderIsNotTheLastToKnow(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	var fooled, lost, renewed int
	for range 30 {
		random := rand.New(rand.NewPCG(seed, 0))
		seed++
		synctest.Test(t, func(t *testing.T) {
			var mu sync.Mutex
			expiry := map[*Lease]time.Time{}   // the server's
			believed := map[*Lease]time.Time{} // by one who counts from the reply
			delay := func() {
				mu.Lock()
				d := time.Duration(random.ExpFloat64() * float64(40*time.Millisecond))
				mu.Unlock()
				time.Sleep(d)
			}
			r := newRig(t, func(ctx context.Context, _ int, leases []*Lease) (map[*Lease]string, error) {
				delay() // to the server
				states := map[*Lease]string{}
				mu.Lock()
				for _, l := range leases {
					if !time.Now().Before(expiry[l]) {
						states[l] = "expired"
						continue
					}
					expiry[l] = time.Now().Add(l.ttl)
				}
				dropped := random.IntN(8) == 0
				mu.Unlock()
				if dropped {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				delay() // and back
				mu.Lock()
				defer mu.Unlock()
				for _, l := range leases {
					if states[l] == "" {
						renewed++
						believed[l] = time.Now().Add(l.ttl)
						if believed[l].After(expiry[l]) {
							fooled++
						}
					}
				}
				return states, nil
			})
			for range 20 {
				mu.Lock()
				ttl := minTTL + time.Duration(random.Int64N(int64(time.Second)))
				mu.Unlock()
				l := r.grant(ttl)
				mu.Lock()
				expiry[l] = time.Now().Add(ttl)
				mu.Unlock()
				context.AfterFunc(l.Context(), func() {
					mu.Lock()
					defer mu.Unlock()
					if errors.Is(context.Cause(l.Context()), ErrLost) {
						lost++
					}
					if !time.Now().Before(expiry[l]) {
						t.Errorf("seed %d: a lease of %v was lost %v after the server ended it", seed-1, ttl, time.Since(expiry[l]))
					}
				})
			}
			time.Sleep(20 * time.Second)
			synctest.Wait()
		})
	}
	t.Logf("%d renewals, %d losses, %d times a client that counts from the reply believed too much", renewed, lost, fooled)
	if lost == 0 || renewed == 0 || fooled == 0 {
		t.Error("this test shows nothing")
	}
}
