package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
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
		return b.each("handoff", fmt.Sprintf("%d waiters", waiters), 2*b.duration+slack, func(ctx context.Context, r running) (sample, error) {
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

// handOn has the clients pass the name on for the duration, and returns the
// grants in their order.
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
	end := time.Now().Add(duration)
	for _, c := range clients {
		group.Go(func() error {
			for time.Now().Before(end) {
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
			}
			return nil
		})
	}
	err := group.Wait()
	slices.SortFunc(grants, func(a, b grant) int { return a.granted.Compare(b.granted) })
	return grants, err
}

// judge leaves out the first grant of each, which waited for the others to
// connect.
func judge(grants []grant) (sample, error) {
	if len(grants) < 3*waiters {
		return nil, fmt.Errorf("only %d hand-offs: too few to judge", len(grants))
	}
	elapsed := grants[len(grants)-1].granted.Sub(grants[0].granted)
	var gaps, waits []time.Duration
	var total time.Duration
	for i := waiters; i < len(grants); i++ {
		g, before := grants[i], grants[i-1]
		if g.called.Before(before.released) {
			gaps = append(gaps, g.granted.Sub(before.released))
		}
		waits = append(waits, g.granted.Sub(g.called))
		total += g.granted.Sub(g.called)
	}
	if len(gaps) == 0 {
		return nil, fmt.Errorf("in %d hand-offs nobody was waiting", len(grants))
	}
	slices.Sort(gaps)
	mean := total / time.Duration(len(waits))
	return sample{
		"gap p50, ms":         ms(gaps[len(gaps)/2]),
		"gap p99, ms":         ms(gaps[len(gaps)*99/100]),
		"inversions, ‰":       1000 * float64(inversions(grants)) / float64(len(grants)),
		"longest wait / mean": float64(slices.Max(waits)) / float64(cmp.Or(mean, 1)),
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
