package pglock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

func TestElect_ReturnsWhatFnReturns(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	oops := errors.New("oops")
	for _, want := range []error{nil, oops} {
		err := c.Elect(t.Context(), "leader", time.Minute, func(context.Context, *pglock.Lease) error { return want })
		if !errors.Is(err, want) {
			t.Errorf("got %v, want %v", err, want)
		}
		if !one[bool](t, pool, `SELECT claim IS NULL FROM pglock.leases WHERE name = 'leader'`) {
			t.Error("the lease is still held")
		}
	}
}

// While it can't campaign its observer hears why, and it leads when it can.
func TestElect_SaysWhyItDoesNotLead(t *testing.T) {
	t.Parallel()
	wire := pgtest.Proxy(t, pgtest.DSN(t))
	wire.Cut()
	n := &notes{}
	c := newClient(t, pgtest.PoolOn(t, wire.DSN()), pglock.WithObserver(n))
	done := make(chan error, 1)
	go func() {
		done <- c.Elect(t.Context(), "leader", time.Second, func(context.Context, *pglock.Lease) error { return nil })
	}()
	for _, event := range n.take(t, 2) {
		if failed, ok := event.(pglock.CampaignFailed); !ok || failed.Name != "leader" || failed.Err == nil {
			t.Errorf("told %#v", event)
		}
	}
	wire.Heal()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A leader that loses the lease finishes its work and campaigns again, behind
// whoever has taken over.
func TestElect_CampaignsAgainAfterALoss(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c, other := newClient(t, pool), newClient(t, pool)
	var terms []pglock.Token
	var usurper *pglock.Lease
	finished := false
	err := c.Elect(t.Context(), "leader", time.Second, func(ctx context.Context, l *pglock.Lease) error {
		terms = append(terms, l.Token())
		if len(terms) == 2 {
			if !finished {
				t.Error("the second term began before the first had ended")
			}
			return nil
		}
		expire(t, pool, "leader")
		usurper = acquire(t, other, "leader", time.Hour)
		<-ctx.Done()
		if cause := context.Cause(ctx); !errors.Is(cause, pglock.ErrLost) {
			t.Errorf("the term ended with %v, want ErrLost", cause)
		}
		if err := usurper.Release(t.Context()); err != nil {
			t.Error(err)
		}
		finished = true
		return ctx.Err()
	})
	if err != nil || len(terms) != 2 || terms[0] >= usurper.Token() || usurper.Token() >= terms[1] {
		t.Errorf("terms %v around %d: %v", terms, usurper.Token(), err)
	}
}

func TestElect_EndsWithItsContext(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	why := errors.New("shutting down")
	ctx, cancel := context.WithCancelCause(t.Context())
	err := c.Elect(ctx, "leader", time.Minute, func(ctx context.Context, l *pglock.Lease) error {
		cancel(why)
		<-ctx.Done()
		if one[bool](t, pool, `SELECT claim IS NULL FROM pglock.leases WHERE name = 'leader'`) {
			t.Error("the lease was released before the work was over")
		}
		return nil
	})
	if err != why {
		t.Errorf("while leading: %v, want %v", err, why)
	}
	acquire(t, newClient(t, pool), "leader", time.Hour)
	ctx, cancel = context.WithCancelCause(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- c.Elect(ctx, "leader", time.Minute, func(context.Context, *pglock.Lease) error {
			t.Error("it leads beside another")
			return nil
		})
	}()
	waiting(t, pool, "leader", 1)
	cancel(why)
	if err := <-done; err != why {
		t.Errorf("while waiting: %v, want %v", err, why)
	}
}

func TestElect_BadInput(t *testing.T) {
	t.Parallel()
	c := newClient(t, pgtest.Pool(t))
	err := c.Elect(t.Context(), "", time.Minute, func(context.Context, *pglock.Lease) error { return nil })
	if err == nil {
		t.Error("an empty name was elected")
	}
}

// Observe tells of each holder in turn, and of none.
func TestObserve(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool, pglock.WithOwner("leader"))
	ctx, cancel := context.WithCancel(t.Context())
	changes := newClient(t, pool).Observe(ctx, "seen")
	if info := <-changes; info.Token != 0 || info.Name != "seen" {
		t.Errorf("at first: %+v, want nobody", info)
	}
	l := acquire(t, c, "seen", time.Hour)
	if info := <-changes; info.Token != l.Token() || info.Owner != "leader" || info.Remaining <= 0 {
		t.Errorf("then: %+v, want token %d", info, l.Token())
	}
	if err := l.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if info := <-changes; info.Token != 0 {
		t.Errorf("at last: %+v, want nobody", info)
	}
	cancel()
	for range changes {
	}
}
