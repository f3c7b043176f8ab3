package pglock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// Answers that are lost after the commit: never a wrong failure, and never a
// second effect (L5, L06). The network drops what the server says; once the
// database shows the effect, the connections are ended and new ones work.

// lostAnswer makes one call whose answer is lost, and runs meanwhile between
// its effect, which seen waits for, and the end of its connection.
func lostAnswer(wire *pgtest.Wire, call func() error, seen, meanwhile func()) error {
	wire.DropReplies()
	done := make(chan error, 1)
	go func() { done <- call() }()
	seen()
	meanwhile()
	wire.Heal()
	return <-done
}

func nothing() {}

// ready returns a client through the wire that has a connection for its calls.
func ready(t *testing.T, through *pgxpool.Pool) *pglock.Client {
	t.Helper()
	c := newClient(t, through)
	warm(t, c)
	return c
}

func warm(t *testing.T, c *pglock.Client) {
	t.Helper()
	if err := acquire(t, c, "warm", time.Hour).Release(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestReply_L06_OfAcquire(t *testing.T) {
	t.Parallel()
	for verb, get := range map[string]func(*pglock.Client, context.Context, string, time.Duration, ...pglock.LeaseOption) (*pglock.Lease, error){
		"TryAcquire": (*pglock.Client).TryAcquire,
		"Acquire":    (*pglock.Client).Acquire,
	} {
		t.Run(verb, func(t *testing.T) {
			t.Parallel()
			direct, through, wire := wired(t)
			c := ready(t, through)
			audit(t, direct, false)
			var l *pglock.Lease
			err := lostAnswer(wire, func() (err error) {
				l, err = get(c, t.Context(), "asked", time.Minute)
				return err
			}, func() {
				until(t, direct, "the grant", `SELECT EXISTS (SELECT FROM pglock.leases WHERE name = 'asked' AND claim IS NOT NULL)`)
			}, func() {
				// The control: a repeat under a claim of its own would be refused.
				if one[bool](t, direct, `SELECT granted FROM pglock.acquire('{asked}', '1 min')`) {
					t.Error("another claim was granted the lease")
				}
			})
			if err != nil {
				t.Fatalf("a lost answer became %v", err)
			}
			if grants, _ := inversions(t, direct); grants != 1 {
				t.Errorf("%d grants were made, want 1", grants)
			}
			if token := one[int64](t, direct, `SELECT token FROM grants`); token != int64(l.Token()) || l.Err() != nil {
				t.Errorf("token %d (%v), want %d", l.Token(), l.Err(), token)
			}
			if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
}

// A ticket whose number never arrived is the same ticket when it is asked for
// again, and is granted once.
func TestReply_L06_OfEnqueue(t *testing.T) {
	t.Parallel()
	direct, _, wire := wired(t)
	through, spy := spied(t, wire.DSN()+"&default_query_exec_mode=exec")
	c := ready(t, through)
	holder := acquire(t, newClient(t, direct), "asked", time.Hour)
	// A client's first wait begins with things other than a ticket.
	ctx, cancel := context.WithCancel(t.Context())
	gaveUp := make(chan error, 1)
	go func() { _, err := c.Acquire(ctx, "asked", time.Minute); gaveUp <- err }()
	waiting(t, direct, "asked", 1)
	cancel()
	if err := <-gaveUp; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	waiting(t, direct, "asked", 0)
	warm(t, c) // giving up may have cost the connection

	audit(t, direct, false)
	before := spy.answers("pglock.enqueue")
	granted := make(chan *pglock.Lease, 1)
	wire.DropReplies()
	go func() {
		l, err := c.Acquire(t.Context(), "asked", time.Minute)
		if err != nil {
			t.Errorf("a lost answer became %v", err)
		}
		granted <- l
	}()
	waiting(t, direct, "asked", 1)
	if spy.answers("pglock.enqueue") != before {
		t.Error("the answer arrived: this test shows nothing")
	}
	wire.Heal()
	for spy.answers("pglock.enqueue") == before {
		one[bool](t, direct, `SELECT true`)
	}
	waiting(t, direct, "asked", 1)
	if err := holder.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	l := <-granted
	if l == nil {
		return
	}
	if grants, _ := inversions(t, direct); grants != 1 {
		t.Errorf("%d grants were made, want 1", grants)
	}
	waiting(t, direct, "asked", 0)
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestReply_L06_OfRenew(t *testing.T) {
	t.Parallel()
	direct, through, wire := wired(t)
	c := ready(t, through)
	l := acquire(t, c, "kept", 6*time.Second)
	for granted := l.Deadline(); l.Deadline() == granted; { // the connection for renewals is there
		one[bool](t, direct, `SELECT true`)
	}
	deadline := l.Deadline()
	wire.DropReplies()
	renewed(t, direct, "kept")
	if l.Deadline() != deadline {
		t.Error("the answer arrived: this test shows nothing")
	}
	wire.Heal()
	renewed(t, direct, "kept")
	until(t, direct, "the deadline of the lease from before", `SELECT clock_timestamp() > acquired_at + ttl FROM pglock.leases WHERE name = 'kept'`)
	if l.Err() != nil || !l.Deadline().After(deadline) {
		t.Errorf("lost (%v), or not renewed since", l.Err())
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestReply_L06_OfRelease(t *testing.T) {
	t.Parallel()
	freed := func(t *testing.T, direct *pgxpool.Pool) func() {
		return func() {
			until(t, direct, "the release", `SELECT claim IS NULL FROM pglock.leases WHERE name = 'freed'`)
		}
	}
	t.Run("free since", func(t *testing.T) {
		t.Parallel()
		direct, through, wire := wired(t)
		l := acquire(t, ready(t, through), "freed", time.Minute)
		for range 2 {
			err := lostAnswer(wire, func() error { return l.Release(t.Context()) }, freed(t, direct), nothing)
			if err != nil {
				t.Errorf("a lost answer became %v", err)
			}
		}
		if l.Err() != pglock.ErrReleased {
			t.Errorf("the lease says %v", l.Err())
		}
	})
	t.Run("taken since", func(t *testing.T) {
		t.Parallel()
		direct, through, wire := wired(t)
		next := newClient(t, direct)
		l := acquire(t, ready(t, through), "freed", time.Minute)
		var second *pglock.Lease
		err := lostAnswer(wire, func() error { return l.Release(t.Context()) }, freed(t, direct), func() {
			second = acquire(t, next, "freed", time.Minute)
		})
		if !unreachable(err) {
			t.Errorf("nobody can know whether it was released, and it says %v", err)
		}
		if second.Err() != nil || one[int64](t, direct, `SELECT token FROM pglock.leases WHERE name = 'freed' AND claim IS NOT NULL`) != int64(second.Token()) {
			t.Error("it ended the next tenure")
		}
	})
	t.Run("taken and released since", func(t *testing.T) {
		t.Parallel()
		direct, through, wire := wired(t)
		next := newClient(t, direct)
		l := acquire(t, ready(t, through), "freed", time.Minute)
		err := lostAnswer(wire, func() error { return l.Release(t.Context()) }, freed(t, direct), func() {
			if err := acquire(t, next, "freed", time.Minute).Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
		if !unreachable(err) {
			t.Errorf("nobody can know whether it was released, and it says %v", err)
		}
	})
}

// A caller who gives up while the call is under way holds nothing, and what the
// server granted meanwhile is free again within a TTL.
func TestReply_L5_GivenUpInFlight(t *testing.T) {
	t.Parallel()
	const ttl = 2 * time.Second
	direct, through, wire := wired(t)
	c := ready(t, through)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	err := lostAnswer(wire, func() error {
		_, err := c.TryAcquire(ctx, "orphan", ttl)
		return err
	}, func() {
		until(t, direct, "the grant", `SELECT EXISTS (SELECT FROM pglock.leases WHERE name = 'orphan' AND claim IS NOT NULL)`)
	}, cancel)
	if !errors.Is(err, context.Canceled) || errors.Is(err, pglock.ErrLocked) || errors.Is(err, pglock.ErrLost) {
		t.Errorf("TryAcquire says %v, want context.Canceled", err)
	}
	until(t, direct, "the lease free", `SELECT expires_at <= clock_timestamp() FROM pglock.leases WHERE name = 'orphan'`)
	if left := one[bool](t, direct, `SELECT claim IS NULL OR expires_at = acquired_at + ttl FROM pglock.leases WHERE name = 'orphan'`); !left {
		t.Error("somebody renewed what nobody holds")
	}
	acquire(t, c, "orphan", ttl)
}
