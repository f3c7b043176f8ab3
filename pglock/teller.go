package pglock

import (
	"context"
	"sync"
	"time"
)

// teller tells a client's observers. It has a goroutine only while there is
// something to tell.
//
// To call them where things happen would be simpler: but an observer that blocks,
// as a log does whose pipe is full, would then hold up the keeper, and with it
// every renewal and every loss.
type teller struct {
	observers []Observer

	mu      sync.Mutex
	backlog []told
	idle    chan struct{} // closed when all is told; nil: all is
}

type told struct {
	ctx   context.Context
	event Event
}

const (
	// maxBacklog is how many events an observer may be behind.
	maxBacklog = 10_000

	// farewell is how long Close waits for observers.
	farewell = time.Second
)

// tell tells the client's observers, if there are any, and says whether it does.
// The type parameter spares those without an observer the making of an Event.
func tell[E Event](ctx context.Context, c *Client, event E) bool {
	return c.teller != nil && c.teller.add(ctx, event, maxBacklog)
}

func (t *teller) add(ctx context.Context, event Event, limit int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.backlog) >= limit {
		return false
	}
	t.backlog = append(t.backlog, told{ctx, event})
	if t.idle == nil {
		t.idle = make(chan struct{})
		go t.run()
	}
	return true
}

func (t *teller) run() {
	for {
		t.mu.Lock()
		batch := t.backlog
		t.backlog = nil
		if len(batch) == 0 {
			close(t.idle)
			t.idle = nil
			t.mu.Unlock()
			return
		}
		t.mu.Unlock()
		for _, one := range batch {
			for _, observer := range t.observers {
				one.tell(observer)
			}
		}
	}
}

func (t told) tell(observer Observer) {
	defer func() { _ = recover() }()
	observer.Observe(t.ctx, t.event)
}

// drain waits until all is told, or until nobody can be expected to wait longer.
func (t *teller) drain() {
	t.mu.Lock()
	idle := t.idle
	t.mu.Unlock()
	if idle == nil {
		return
	}
	select {
	case <-idle:
	case <-time.After(farewell):
	}
}
