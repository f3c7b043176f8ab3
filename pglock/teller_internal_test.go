package pglock

import (
	"context"
	"testing"
)

type deafObserver struct{}

func (deafObserver) Observe(context.Context, Event) {}

// Who has no observer pays nothing for those who have. Not parallel: AllocsPerRun
// counts what everybody allocates.
func TestObserver_NoneCostsNothing(t *testing.T) {
	allocs := func(opts ...Option) float64 {
		c := &Client{}
		for _, opt := range opts {
			opt(c)
		}
		l := &Lease{client: c}
		l.open(t.Context())
		return testing.AllocsPerRun(100, func() {
			l.told = tell(t.Context(), c, Acquired{Lease: l})
			tell(t.Context(), c, Waited{})
			l.tellEnd(nil)
		})
	}
	if n := allocs(); n != 0 {
		t.Errorf("%v allocations a tenure without an observer", n)
	}
	if n := allocs(WithObserver(nil)); n != 0 {
		t.Errorf("%v allocations a tenure with a nil observer", n)
	}
	if n := allocs(WithObserver(deafObserver{})); n == 0 {
		t.Error("none with one either: this test shows nothing")
	}
}
