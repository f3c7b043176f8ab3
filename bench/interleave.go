package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// A trial is what one contender does once in each round.
type trial struct {
	setting   string
	contender string
	limit     time.Duration // for one round; what takes longer has failed
	run       func(context.Context) (sample, error)
}

// A sample is what a trial has measured in a round, by metric.
type sample map[string]float64

// grace is how long a trial may take to notice its limit.
const grace = 10 * time.Second

// interleave runs every trial once a round, so that what disturbs the machine
// for a while disturbs all. Each round begins with the next one of the list: none
// is always the first, nor always behind the same. The samples are in the order
// of trials. A contender that has failed in a trial is left out from then on, and
// failed says with what.
func interleave(ctx context.Context, rounds int, trials []trial, tell func(round int, t trial)) (samples [][]sample, failed map[string]error) {
	samples = make([][]sample, len(trials))
	failed = map[string]error{}
	for round := range rounds {
		for n := range trials {
			if ctx.Err() != nil {
				return samples, failed
			}
			i := (round + n) % len(trials)
			t := trials[i]
			if failed[t.contender] != nil {
				continue
			}
			tell(round, t)
			s, err := attempt(ctx, t)
			if err != nil {
				failed[t.contender] = fmt.Errorf("%s, round %d: %w", t.setting, round+1, err)
				continue
			}
			samples[i] = append(samples[i], s)
		}
	}
	return samples, failed
}

// attempt runs a trial and gives it up when it doesn't even end after its limit.
func attempt(ctx context.Context, t trial) (sample, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, t.limit, fmt.Errorf("takes longer than %v", t.limit))
	defer cancel()
	type outcome struct {
		sample sample
		err    error
	}
	ended := make(chan outcome, 1)
	go func() {
		s, err := t.run(ctx)
		ended <- outcome{s, err}
	}()
	select {
	case o := <-ended:
		return o.sample, o.err
	case <-ctx.Done():
	}
	select {
	case o := <-ended:
		return nil, errors.Join(context.Cause(ctx), o.err)
	case <-time.After(grace):
		return nil, fmt.Errorf("%w, and hangs: given up", context.Cause(ctx))
	}
}
