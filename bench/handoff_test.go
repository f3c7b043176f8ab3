package main

import (
	"testing"
	"time"
)

func TestInversions(t *testing.T) {
	t.Parallel()
	epoch := time.Now()
	for _, test := range []struct {
		name  string
		calls []time.Duration // in the order of the grants
		want  int
	}{
		{"none", nil, 0},
		{"in order", []time.Duration{0, settled, 2 * settled}, 0},
		{"too close to tell", []time.Duration{settled - 1, 0}, 0},
		{"one overtook", []time.Duration{settled, 0}, 1},
		{"two overtook one", []time.Duration{settled, 2 * settled, 0}, 2},
		{"one overtook two", []time.Duration{3 * settled, 0, settled}, 1},
	} {
		var grants []grant
		for i, called := range test.calls {
			grants = append(grants, grant{called: epoch.Add(called), granted: epoch.Add(time.Hour + time.Duration(i))})
		}
		if got := inversions(grants); got != test.want {
			t.Errorf("%s: %d inversions; want %d", test.name, got, test.want)
		}
	}
}

func TestJudge(t *testing.T) {
	t.Parallel()
	// Each calls when the one 16 before it has released, holds 2 ms, and the gap is 1 ms.
	epoch := time.Now()
	var grants []grant
	for i := range 100 {
		granted := epoch.Add(time.Duration(i) * 3 * time.Millisecond)
		grants = append(grants, grant{granted.Add(-46 * time.Millisecond), granted, granted.Add(2 * time.Millisecond)})
	}
	s, err := judge(grants)
	if err != nil {
		t.Fatal(err)
	}
	for metric, want := range map[string]float64{"gap p50, ms": 1, "gap p99, ms": 1, "inversions, ‰": 0, "longest wait / mean": 1} {
		if s[metric] != want {
			t.Errorf("%s = %v; want %v", metric, s[metric], want)
		}
	}
	if got := s["hand-offs/s"]; got < 333 || got > 334 {
		t.Errorf("hand-offs/s = %v; want 333.3", got)
	}
	if _, err := judge(grants[:5]); err == nil {
		t.Error("5 hand-offs were judged")
	}
}
