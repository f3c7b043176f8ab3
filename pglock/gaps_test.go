package pglock_test

import (
	"slices"
	"sync"
	"testing"
	"time"
)

// gaps collects the times from a release to the next grant.
type gaps struct {
	mu   sync.Mutex
	free time.Time
	all  []time.Duration
	want int
}

func newGaps(want int) *gaps { return &gaps{want: want} }

// granted notes a grant and says whether more are wanted.
func (g *gaps) granted() bool {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.free.IsZero() {
		g.all = append(g.all, now.Sub(g.free))
	}
	return len(g.all) < g.want
}

// released notes that a release begins.
func (g *gaps) released() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.free = time.Now()
}

func (g *gaps) report(b *testing.B) (p50 time.Duration) {
	slices.Sort(g.all)
	if len(g.all) == 0 {
		return 0
	}
	p50, p99 := g.all[len(g.all)/2], g.all[len(g.all)*99/100]
	b.ReportMetric(float64(p50.Microseconds()), "p50-µs")
	b.ReportMetric(float64(p99.Microseconds()), "p99-µs")
	return p50
}
