package main

import (
	"context"
	"fmt"
	"runtime"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// acquirers take the names that are to be held.
const acquirers = 32

var holding = scenario{
	name:  "holding",
	title: "Holding",
	says: "One client holds that many names, each renewed as the client sees fit: pawl every third of the TTL. " +
		"Statements are the server's count (pg_stat_statements). CPU is the server's, of one core. " +
		"Heap, goroutines and connections are what the client added; heap includes the harness's own slice.",
	metrics: []metric{{"statements/s", 1, ""}, {"server CPU, %", 2, ""}, {"heap, KiB", 0, ""}, {"heap a lease, B", 0, ""}, {"goroutines", 0, ""}, {"connections", 0, ""}},
	rounds:  func(p plan) int { return max(1, p.rounds/3) },
	trials: func(_ context.Context, b *bench) []trial {
		var trials []trial
		window := b.ttl / 3 * time.Duration(b.heartbeats)
		for _, n := range b.held {
			trials = append(trials, b.each("holding", strconv.Itoa(n), window+2*slack, func(ctx context.Context, r running) (sample, error) {
				return keep(ctx, r, n, b.ttl, window)
			})...)
		}
		return trials
	},
}

// footprint is what this process has.
type footprint struct {
	heap        uint64
	goroutines  int
	connections int
}

func measureSelf() (footprint, error) {
	runtime.GC()
	runtime.GC() // finalizers of the first have run
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	n, err := sockets()
	return footprint{m.HeapAlloc, runtime.NumGoroutine(), n}, err
}

// keep has one client hold n names for the window.
func keep(ctx context.Context, r running, n int, ttl, window time.Duration) (sample, error) {
	before, err := measureSelf()
	if err != nil {
		return nil, err
	}
	address := r.server.address
	if r.server.statements != nil {
		address = r.server.counted
	}
	// Not watched: its counters would be in the heap.
	c, err := r.dial(ctx, address, acquirers, ttl)
	if err != nil {
		return nil, err
	}
	defer c.close()
	releases := make([]func(context.Context) error, n)
	if err := spread(ctx, n, func(ctx context.Context, i int) (err error) {
		releases[i], err = c.acquire(ctx, fmt.Sprintf("kept-%d", i))
		return err
	}); err != nil {
		return nil, fmt.Errorf("acquire: %w", err)
	}
	cpu, statements, err := readServer(ctx, r.server)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	select {
	case <-time.After(window):
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	cpuAfter, statementsAfter, err := readServer(ctx, r.server)
	if err != nil {
		return nil, err
	}
	took := time.Since(began)
	after, err := measureSelf()
	if err != nil {
		return nil, err
	}
	heap := max(0, float64(after.heap)-float64(before.heap))
	s := sample{
		"server CPU, %":   100 * float64(cpuAfter-cpu) / float64(took),
		"heap, KiB":       heap / 1024,
		"heap a lease, B": heap / float64(n),
		"goroutines":      float64(after.goroutines - before.goroutines),
		"connections":     float64(after.connections - before.connections),
	}
	if r.server.statements != nil {
		s["statements/s"] = float64(statementsAfter-statements) / took.Seconds()
	}
	if err := spread(ctx, n, func(ctx context.Context, i int) error { return releases[i](ctx) }); err != nil {
		return nil, fmt.Errorf("release: %w", err)
	}
	return s, nil
}

// spread does it for every i below n, several at a time.
func spread(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	var next atomic.Int64
	for range min(n, acquirers) {
		group.Go(func() error {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				if err := do(ctx, int(i)); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

func readServer(ctx context.Context, s *server) (cpu time.Duration, statements int64, err error) {
	if s.statements != nil {
		if statements, err = s.statements(ctx); err != nil {
			return 0, 0, err
		}
	}
	cpu, _, err = cpuTimes(s)
	return cpu, statements, err
}
