package main

import (
	"context"
	"sync"
	"sync/atomic"
)

// exclusion counts how often a name was granted while somebody held it. All
// clients of a contender share one: it sees what its servers can't.
type exclusion struct {
	holders    sync.Map // of *atomic.Int64, by name
	violations atomic.Int64
}

// watch is c with its grants counted.
func (e *exclusion) watch(c client) client { return watched{c, e} }

type watched struct {
	client
	exclusion *exclusion
}

func (w watched) acquire(ctx context.Context, name string) (func(context.Context) error, error) {
	release, err := w.client.acquire(ctx, name)
	if err != nil {
		return nil, err
	}
	found, ok := w.exclusion.holders.Load(name)
	if !ok {
		found, _ = w.exclusion.holders.LoadOrStore(name, new(atomic.Int64))
	}
	holders := found.(*atomic.Int64)
	if holders.Add(1) > 1 {
		w.exclusion.violations.Add(1)
	}
	return func(ctx context.Context) error {
		holders.Add(-1)
		return release(ctx)
	}, nil
}
