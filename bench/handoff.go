package main

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	waiters = 16

	// tenure is how long each holds: those who released are in line again by then.
	tenure = 2 * time.Millisecond

	// settled is after how long a call has surely reached its server: only who
	// calls that much later and is served before counts as an inversion.
	settled = 20 * time.Millisecond
)

var handoff = scenario{
	name:  "handoff",
	title: "Hand-off of one name",
	says: fmt.Sprintf("%d clients want one name, hold it for %v and want it again. Gap: from the call of release to the next grant. "+
		"Inversions: grants to one who called at least %v after another who was still waiting, of a thousand. Wait: from call to grant.", waiters, tenure, settled),
	metrics: []metric{{"gap p50, ms", 2, ""}, {"gap p99, ms", 2, ""}, {"inversions, ‰", 1, ""}, {"longest wait / mean", 2, ""}, {"hand-offs/s", 0, ""}},
	rounds:  func(p plan) int { return p.rounds },
	trials: func(_ context.Context, b *bench) []trial {
		return b.each("handoff", fmt.Sprintf("%d waiters", waiters), 3*b.duration+slack, func(ctx context.Context, r running) (sample, error) {
			grants, err := handOn(ctx, r, 3*b.duration)
			if err != nil {
				return nil, err
			}
			return judge(grants)
		})
	},
}

// A grant is one tenure of the name.
type grant struct{ called, granted, released time.Time }

// handOn has the clients pass the name on for the duration, which begins when
// each has had it once and is connected. It returns, in their order, the grants
// to those who called after that.
func handOn(ctx context.Context, r running, duration time.Duration) ([]grant, error) {
	group, ctx := errgroup.WithContext(ctx)
	clients := make([]client, waiters)
	defer func() {
		for _, c := range clients {
			if c != nil {
				c.close()
			}
		}
	}()
	for i := range clients {
		c, err := r.connect(ctx, 1, generous)
		if err != nil {
			return nil, err
		}
		clients[i] = c
	}
	var mu sync.Mutex
	var grants []grant
	var warm sync.WaitGroup
	warm.Add(waiters)
	var over atomic.Bool
	for _, c := range clients {
		group.Go(func() error {
			ready := sync.OnceFunc(warm.Done)
			defer ready()
			for !over.Load() {
				g := grant{called: time.Now()}
				release, err := c.acquire(ctx, "baton")
				if err != nil {
					return err
				}
				g.granted = time.Now()
				time.Sleep(tenure)
				g.released = time.Now()
				mu.Lock()
				grants = append(grants, g)
				mu.Unlock()
				if err := release(ctx); err != nil {
					return err
				}
				ready()
			}
			return nil
		})
	}
	warm.Wait()
	began := time.Now()
	select {
	case <-time.After(duration):
	case <-ctx.Done():
	}
	over.Store(true)
	err := group.Wait()
	slices.SortFunc(grants, func(a, b grant) int { return a.granted.Compare(b.granted) })
	return slices.DeleteFunc(grants, func(g grant) bool { return g.called.Before(began) }), err
}

func judge(grants []grant) (sample, error) {
	if len(grants) < 2*waiters {
		return nil, fmt.Errorf("only %d hand-offs: too few to judge", len(grants))
	}
	var gaps, waits []time.Duration
	var total time.Duration
	for i, g := range grants {
		waits = append(waits, g.granted.Sub(g.called))
		total += g.granted.Sub(g.called)
		if i > 0 && g.called.Before(grants[i-1].released) {
			gaps = append(gaps, g.granted.Sub(grants[i-1].released))
		}
	}
	if len(gaps) == 0 {
		return nil, fmt.Errorf("in %d hand-offs nobody was waiting", len(grants))
	}
	slices.Sort(gaps)
	elapsed := grants[len(grants)-1].granted.Sub(grants[0].granted)
	mean := total / time.Duration(len(waits))
	return sample{
		"gap p50, ms":         ms(gaps[len(gaps)/2]),
		"gap p99, ms":         ms(gaps[len(gaps)*99/100]),
		"inversions, ‰":       1000 * float64(inversions(grants)) / float64(len(grants)),
		"longest wait / mean": float64(slices.Max(waits)) / float64(max(mean, 1)),
		"hand-offs/s":         float64(len(grants)-1) / elapsed.Seconds(),
	}, nil
}

// inversions counts the grants to those who had called well after somebody who
// was granted later. grants are in their order.
func inversions(grants []grant) int {
	if len(grants) == 0 {
		return 0
	}
	n := 0
	first := grants[len(grants)-1].called // of those granted later
	for _, g := range slices.Backward(grants) {
		if g.called.Sub(first) >= settled {
			n++
		}
		if g.called.Before(first) {
			first = g.called
		}
	}
	return n
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
