package main

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// counters count what the workers of one strategy do.
type counters struct {
	done    atomic.Int64
	retries atomic.Int64
	waiting atomic.Int64 // ns, of all workers together
}

func (c *counters) waited(since time.Time) { c.waiting.Add(int64(time.Since(since))) }

// run lets all workers withdraw at once and then counts what is missing.
func (b *bank) run(ctx context.Context, s strategy, progress func(string, ...any)) (tally, error) {
	b.done.Store(0)
	b.retries.Store(0)
	b.waiting.Store(0)
	total := int64(b.workers) * int64(b.ops)
	opening := opening(total)
	if err := b.account.write(ctx, b.pool, opening); err != nil {
		return tally{}, err
	}
	stop := b.watch(func() { progress("%s: %d of %d", s.name, b.done.Load(), total) })
	began := time.Now()
	workers, workersCtx := errgroup.WithContext(ctx)
	for range b.workers {
		workers.Go(func() error {
			for range b.ops {
				if err := s.withdraw(b, workersCtx); err != nil {
					return err
				}
				b.done.Add(1)
			}
			return nil
		})
	}
	err := workers.Wait()
	elapsed := time.Since(began)
	stop()
	if err != nil {
		return tally{}, err
	}
	balance, err := b.account.read(ctx, b.pool)
	if err != nil {
		return tally{}, err
	}
	t := tally{
		Strategy: s.name, Expected: opening - total, Actual: balance, Lost: balance - (opening - total),
		Retries: b.retries.Load(), ElapsedMS: elapsed.Milliseconds(),
		waits: s.waits, wait: time.Duration(b.waiting.Load() / total),
	}
	return t, nil
}

// opening is a round balance from which total withdrawals of 1 can be made.
func opening(total int64) int64 { return (total + 999) / 1000 * 1000 }

// watch calls show now and then until it is stopped.
func (*bank) watch(show func()) (stop func()) {
	show()
	ticker := time.NewTicker(100 * time.Millisecond)
	quit, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-ticker.C:
				show()
			case <-quit:
				return
			}
		}
	}()
	return func() { ticker.Stop(); close(quit); <-ended }
}
