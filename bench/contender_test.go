package main

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// patience bounds what must not hang.
const patience = 2 * time.Minute

// up runs a contender's server for the test, which is skipped where this
// machine doesn't have it.
func up(t *testing.T, c contender) (running, *host) {
	t.Helper()
	h, err := newHost()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.close(); err != nil {
			t.Error(err)
		}
	})
	s, err := c.start(bounded(t), h)
	if s != nil {
		t.Cleanup(func() {
			if err := s.stop(); err != nil {
				t.Error(err)
			}
		})
	}
	if errors.Is(err, errAbsent) {
		pgtest.Require(t, c.name, err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return running{c, s, &exclusion{}}, h
}

func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// Each contender takes, excludes, refuses and frees, by itself and as the
// scenarios have it.
func TestContender(t *testing.T) {
	t.Parallel()
	for _, c := range contenders {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r, h := up(t, c)
			ctx := bounded(t)
			a, err := r.dial(ctx, r.server.address, 2, generous)
			if err != nil {
				t.Fatal(err)
			}
			defer a.close()
			b, err := r.dial(ctx, r.server.address, 2, generous)
			if err != nil {
				t.Fatal(err)
			}
			defer b.close()
			release, err := a.acquire(ctx, "name")
			if err != nil {
				t.Fatal(err)
			}
			if b, ok := b.(trier); ok {
				if won, err := b.try(ctx, "name"); won || err != nil {
					t.Fatalf("try of a held name: %v, %v; want false, nil", won, err)
				}
			}
			if other, err := b.acquire(ctx, "other"); err != nil || other(ctx) != nil {
				t.Fatalf("another name: %v", err)
			}
			if err := release(ctx); err != nil {
				t.Fatal(err)
			}
			if release, err = b.acquire(ctx, "name"); err != nil || release(ctx) != nil {
				t.Fatalf("after the release: %v", err)
			}

			if slices.Contains(c.in, "handoff") {
				grants, err := handOn(ctx, r, 500*time.Millisecond)
				if err != nil || len(grants) == 0 {
					t.Errorf("handoff: %d grants, %v", len(grants), err)
				}
			}
			if slices.Contains(c.in, "holding") {
				s, err := keep(ctx, r, 10, 3*time.Second, 2*time.Second)
				if err != nil {
					t.Errorf("holding: %v", err)
				}
				if r.server.statements != nil && s["statements/s"] <= 0 {
					t.Errorf("holding: %v: no statement was counted", s)
				}
			}
			if slices.Contains(c.in, "takeover") {
				s, err := takeOver(ctx, r, h)
				if err != nil || s["took, ms"] <= 0 {
					t.Errorf("takeover: %v, %v", s, err)
				}
			}
			if n := r.exclusion.violations.Load(); n != 0 {
				t.Errorf("%d violations", n)
			}
		})
	}
}

// A server that this machine lacks is told apart from one that fails.
func TestBench_AbsentServer(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	for _, c := range []contender{redisMemory, zookeeper} {
		if _, err := c.start(t.Context(), &host{dir: t.TempDir()}); !errors.Is(err, errAbsent) {
			t.Errorf("%s without its program: %v; want errAbsent", c.name, err)
		}
	}
}
