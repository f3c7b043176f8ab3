package main

import (
	"context"
	"strings"
	"testing"
	"time"
)

// inMemory is a contender within this process. A broken one grants to all.
func inMemory(broken bool) contender {
	lock := make(chan struct{}, 1)
	return contender{
		name: "in-memory", in: []string{"handoff"},
		start: func(context.Context, *host) (*server, error) {
			return &server{stop: func() error { return nil }}, nil
		},
		dial: func(context.Context, string, int, time.Duration) (client, error) {
			return memoryClient{lock, broken}, nil
		},
	}
}

type memoryClient struct {
	lock   chan struct{}
	broken bool
}

func (c memoryClient) acquire(ctx context.Context, _ string) (func(context.Context) error, error) {
	if c.broken {
		return func(context.Context) error { return nil }, nil
	}
	select {
	case c.lock <- struct{}{}:
		return func(context.Context) error { <-c.lock; return nil }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (memoryClient) close() {}

// A lock that excludes nobody is counted, spoils the run and stands in the
// report; the control: one that does is not.
func TestExclusion_CatchesABrokenContender(t *testing.T) {
	t.Parallel()
	for _, broken := range []bool{true, false} {
		var told strings.Builder
		b, err := newBench(brief, []contender{inMemory(broken)}, &told)
		if err != nil {
			t.Fatal(err)
		}
		r := b.measure(bounded(t), []scenario{handoff})
		if err := b.close(); err != nil {
			t.Error(err)
		}
		if len(r.Failures) > 0 || len(r.Missing) > 0 {
			t.Fatalf("%+v, %+v", r.Failures, r.Missing)
		}
		if n := r.Contenders[0].Violations; n > 0 != broken {
			t.Errorf("broken %v: %d violations", broken, n)
		}
		if r.failed() != broken {
			t.Errorf("broken %v: the run failed: %v", broken, r.failed())
		}
	}
}

func TestExclusion_NamesAreApart(t *testing.T) {
	t.Parallel()
	var e exclusion
	c := e.watch(memoryClient{broken: true})
	var releases []func(context.Context) error
	for _, name := range []string{"a", "b"} {
		release, err := c.acquire(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		releases = append(releases, release)
	}
	for _, release := range releases {
		if err := release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.acquire(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if n := e.violations.Load(); n != 0 {
		t.Errorf("%d violations; want none before two hold one name", n)
	}
	if _, err := c.acquire(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if n := e.violations.Load(); n != 1 {
		t.Errorf("%d violations; want 1", n)
	}
}
