package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// trialsOf makes a trial for each contender that calls do.
func trialsOf(do func(ctx context.Context, contender string) (sample, error), contenders ...string) []trial {
	var trials []trial
	for _, c := range contenders {
		trials = append(trials, trial{"setting", c, time.Second, func(ctx context.Context) (sample, error) { return do(ctx, c) }})
	}
	return trials
}

func TestInterleave_Order(t *testing.T) {
	t.Parallel()
	var order []string
	trials := trialsOf(func(_ context.Context, c string) (sample, error) {
		order = append(order, c)
		return sample{"n": float64(len(order))}, nil
	}, "a", "b", "c")
	samples, failed := interleave(t.Context(), 4, trials, func(int, trial) {})
	if want := strings.Split("a b c b c a c a b a b c", " "); !slices.Equal(order, want) {
		t.Errorf("ran in the order %v; want %v", order, want)
	}
	want := [][]sample{{{"n": 1}, {"n": 6}, {"n": 8}, {"n": 10}}, {{"n": 2}, {"n": 4}, {"n": 9}, {"n": 11}}, {{"n": 3}, {"n": 5}, {"n": 7}, {"n": 12}}}
	if fmt.Sprint(samples) != fmt.Sprint(want) || len(failed) != 0 {
		t.Errorf("samples %v, %v; want %v", samples, failed, want)
	}
}

// One that fails is left out from then on; what it had measured stays, and the
// others go on.
func TestInterleave_Failure(t *testing.T) {
	t.Parallel()
	down := errors.New("down")
	calls := map[string]int{}
	trials := trialsOf(func(_ context.Context, c string) (sample, error) {
		calls[c]++
		if c == "b" && calls[c] == 2 {
			return nil, down
		}
		return sample{}, nil
	}, "a", "b")
	samples, failed := interleave(t.Context(), 5, trials, func(int, trial) {})
	if len(samples[0]) != 5 || len(samples[1]) != 1 || calls["b"] != 2 || !errors.Is(failed["b"], down) || failed["a"] != nil {
		t.Errorf("%v, %v, %v", samples, calls, failed)
	}
}

// One that hangs, whether or not it looks at its context, holds nobody up.
func TestInterleave_Hang(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ever := make(chan struct{})
		defer close(ever)
		trials := trialsOf(func(ctx context.Context, c string) (sample, error) {
			switch c {
			case "polite":
				<-ctx.Done()
				return nil, ctx.Err()
			case "deaf":
				<-ever
			}
			return sample{}, nil
		}, "polite", "deaf", "sound")
		began := time.Now()
		samples, failed := interleave(t.Context(), 2, trials, func(int, trial) {})
		if failed["polite"] == nil || failed["deaf"] == nil || failed["sound"] != nil || len(samples[2]) != 2 {
			t.Errorf("%v, %v", samples, failed)
		}
		if took, want := time.Since(began), 2*time.Second+grace; took != want {
			t.Errorf("took %v; want a limit for each and a grace: %v", took, want)
		}
	})
}

func TestInterleave_Interrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	calls := 0
	trials := trialsOf(func(context.Context, string) (sample, error) {
		calls++
		cancel()
		return sample{}, nil
	}, "a", "b")
	interleave(ctx, 5, trials, func(int, trial) {})
	if calls != 1 {
		t.Errorf("%d trials ran after the interruption", calls-1)
	}
}
