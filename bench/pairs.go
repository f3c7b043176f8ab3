package main

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// generous is a TTL that nothing outlasts here.
const generous = time.Minute

var pairs = scenario{
	name:    "pairs",
	title:   "Acquire and release, uncontended: pairs a second",
	says:    "One client; each goroutine takes and frees a name of its own, again and again. CPU is that of the server's processes and of this one, a pair.",
	wide:    true,
	metrics: []metric{{"pairs/s", 0, floor.name}, {"server CPU, µs", 0, floor.name}, {"client CPU, µs", 0, floor.name}},
	rounds:  func(p plan) int { return p.rounds },
	trials: func(_ context.Context, b *bench) []trial {
		var trials []trial
		for _, goroutines := range []int{1, 8, 32, 128} {
			trials = append(trials, b.each("pairs", strconv.Itoa(goroutines), b.duration+slack, func(ctx context.Context, r running) (sample, error) {
				c, err := r.connect(ctx, goroutines, generous)
				if err != nil {
					return nil, err
				}
				defer c.close()
				server, self, err := cpuTimes(r.server)
				if err != nil {
					return nil, err
				}
				var count atomic.Int64
				rate, err := perSecond(ctx, goroutines, b.duration, func(ctx context.Context, i int) error {
					release, err := c.acquire(ctx, fmt.Sprintf("pair-%d", i))
					if err != nil {
						return err
					}
					count.Add(1)
					return release(ctx)
				})
				if err != nil {
					return nil, err
				}
				serverAfter, selfAfter, err := cpuTimes(r.server)
				perPair := func(d time.Duration) float64 { return float64(d.Microseconds()) / float64(count.Load()) }
				return sample{"pairs/s": rate, "server CPU, µs": perPair(serverAfter - server), "client CPU, µs": perPair(selfAfter - self)}, err
			})...)
		}
		return trials
	},
}

// losingGoroutines is how many try at once.
const losingGoroutines = 8

var losing = scenario{
	name:    "losing",
	title:   "Try what somebody else holds: tries a second",
	wide:    true,
	says:    fmt.Sprintf("One client, %d goroutines, one name that another client holds.", losingGoroutines),
	metrics: []metric{{"tries/s", 0, floor.name}},
	rounds:  func(p plan) int { return p.rounds },
	trials: func(_ context.Context, b *bench) []trial {
		return b.each("losing", strconv.Itoa(losingGoroutines), b.duration+slack, func(ctx context.Context, r running) (sample, error) {
			holder, err := r.connect(ctx, 1, generous)
			if err != nil {
				return nil, err
			}
			defer holder.close()
			release, err := holder.acquire(ctx, "held")
			if err != nil {
				return nil, err
			}
			c, err := r.dial(ctx, r.server.address, losingGoroutines, generous)
			if err != nil {
				return nil, err
			}
			defer c.close()
			rate, err := perSecond(ctx, losingGoroutines, b.duration, func(ctx context.Context, _ int) error {
				won, err := c.(trier).try(ctx, "held")
				if won {
					r.exclusion.violations.Add(1)
				}
				return err
			})
			if err != nil {
				return nil, err
			}
			return sample{"tries/s": rate}, release(ctx)
		})
	},
}

// perSecond runs do on the goroutines for the duration, and returns how often a
// second it returned. Each has done it once before the clock runs, and is connected.
func perSecond(ctx context.Context, goroutines int, duration time.Duration, do func(ctx context.Context, i int) error) (float64, error) {
	group, ctx := errgroup.WithContext(ctx)
	var warm sync.WaitGroup
	warm.Add(goroutines)
	begin := make(chan struct{})
	var over atomic.Bool
	var count atomic.Int64
	for i := range goroutines {
		group.Go(func() error {
			err := do(ctx, i)
			warm.Done()
			if err != nil {
				return err
			}
			<-begin
			n := int64(0)
			for !over.Load() {
				if err := do(ctx, i); err != nil {
					return err
				}
				n++
			}
			count.Add(n)
			return nil
		})
	}
	warm.Wait()
	began := time.Now()
	close(begin)
	select {
	case <-time.After(duration):
	case <-ctx.Done():
	}
	over.Store(true)
	if err := group.Wait(); err != nil {
		return 0, err
	}
	return float64(count.Load()) / time.Since(began).Seconds(), nil
}
