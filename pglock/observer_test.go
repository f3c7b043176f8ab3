package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// notes is an Observer that keeps what it is told, but for renewals.
type notes struct {
	mu     sync.Mutex
	events []pglock.Event
	then   func()
}

// take waits until n events were told, and returns them and forgets them.
func (n *notes) take(t testing.TB, count int) []pglock.Event {
	t.Helper()
	for end := time.Now().Add(limit); ; runtime.Gosched() {
		n.mu.Lock()
		if len(n.events) >= count {
			events := n.events
			n.events = nil
			n.mu.Unlock()
			return events
		}
		if time.Now().After(end) {
			t.Fatalf("told %v, want %d events", n.events, count)
		}
		n.mu.Unlock()
	}
}

func (n *notes) Observe(_ context.Context, event pglock.Event) {
	if _, renewed := event.(pglock.Renewed); !renewed {
		n.mu.Lock()
		n.events = append(n.events, event)
		n.mu.Unlock()
	}
	if n.then != nil {
		n.then()
	}
}

func kinds(events []pglock.Event) (kinds []string) {
	for _, event := range events {
		kinds = append(kinds, reflect.TypeOf(event).Name())
	}
	return kinds
}

// Each grant is followed by one Lost or one Released, whichever way it ends.
func TestObserver(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	told := &notes{}
	c := newClient(t, pool, pglock.WithObserver(told))
	expect := func(want ...string) {
		t.Helper()
		if got := kinds(told.take(t, len(want))); !slices.Equal(got, want) {
			t.Errorf("told %v, want %v", got, want)
		}
	}

	l := acquire(t, c, "seen", time.Hour)
	expect("Acquired")
	if _, err := c.TryAcquire(t.Context(), "seen", time.Hour); !errors.Is(err, pglock.ErrLocked) {
		t.Fatal(err) // of which nothing is told
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := c.Acquire(ctx, "seen", time.Hour)
		done <- err
	}()
	waiting(t, pool, "seen", 1)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	expect("Waited")
	for range 2 {
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	expect("Released")

	l = acquire(t, c, "seen", time.Hour)
	expire(t, pool, "seen")
	if err := l.Release(t.Context()); !errors.Is(err, pglock.ErrLost) {
		t.Fatal(err)
	}
	expect("Acquired", "Lost")

	l = acquire(t, c, "seen", 300*time.Millisecond)
	expire(t, pool, "seen")
	<-l.Context().Done()
	if err := l.Release(t.Context()); !errors.Is(err, pglock.ErrLost) {
		t.Fatal(err)
	}
	expect("Acquired", "Lost")
}

// An observer that panics breaks nothing.
func TestObserver_Panics(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	renewed := make(chan bool, 100)
	c := newClient(t, pool, pglock.WithObserver(&notes{then: func() { renewed <- true; panic("boom") }}))
	l := acquire(t, c, "panics", time.Second)
	deadline := l.Deadline()
	for !l.Deadline().After(deadline) && l.Err() == nil {
		<-renewed
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

// A write that comes too late is told once, with what refused it, and nothing is
// told of one that is let through or of an error of the function's own.
func TestObserver_Fenced(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	told := &notes{}
	c := newClient(t, pool, pglock.WithObserver(told))
	exec(t, pool, `CREATE TABLE accounts (id int); SELECT pglock.protect('accounts', 'late%')`)
	fence := func(token pglock.Token) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error { return pglock.Fence(ctx, tx, "resource", token) }
	}
	guard := func(l *pglock.Lease) error {
		return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return l.Guard(t.Context(), tx) })
	}
	writes := func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `INSERT INTO accounts VALUES (1)`)
		return err
	}
	l, other := acquire(t, c, "late", time.Hour), acquire(t, c, "other", time.Hour)
	bug := errors.New("a bug")
	for _, pass := range []error{
		guard(l), l.InTx(t.Context(), pool, writes), l.InTx(t.Context(), pool, fence(1000)),
		other.InTx(t.Context(), pool, func(context.Context, pgx.Tx) error { return bug }),
	} {
		if pass != nil && pass != bug {
			t.Fatal(pass)
		}
	}
	if got, want := kinds(told.take(t, 2)), []string{"Acquired", "Acquired"}; !slices.Equal(got, want) {
		t.Fatalf("told %v, want %v", got, want)
	}
	expect := func(name string, refused error, as error) {
		t.Helper()
		events := told.take(t, 1)
		fenced, ok := events[len(events)-1].(pglock.Fenced)
		if !ok || fenced.Name != name || fenced.Err != refused || !errors.Is(refused, as) {
			t.Errorf("%v: told %#v, want one Fenced of %s that matches %v", refused, events, name, as)
		}
	}
	expect("other", other.InTx(t.Context(), pool, fence(999)), pglock.ErrFenced)

	expire(t, pool, "late")
	acquire(t, newClient(t, pool), "late", time.Hour)
	refused := guard(l)
	if got, want := kinds(told.take(t, 2)), []string{"Lost", "Fenced"}; !slices.Equal(got, want) {
		t.Errorf("a guard that said %v told %v, want %v", refused, got, want)
	}
	expect("late", l.InTx(t.Context(), pool, writes), pglock.ErrLost)
	// The other's transaction goes well until it guards the one that is lost: that
	// one tells.
	expect("late", other.InTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
		return l.Guard(ctx, tx)
	}), pglock.ErrLost)
	if err := other.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, want := kinds(told.take(t, 1)), []string{"Released"}; !slices.Equal(got, want) {
		t.Errorf("told %v after all, want %v", got, want)
	}
}

// block has the observer block at its first event until release is closed.
func (n *notes) block() (entered <-chan bool, release chan bool) {
	first := make(chan bool, 1)
	release = make(chan bool)
	n.then = func() {
		select {
		case first <- true:
			<-release
		default:
		}
	}
	return first, release
}

// While an observer blocks, leases are acquired, renewed, lost and released as
// ever, and the client can be closed.
func TestObserver_Blocks(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	told := &notes{}
	entered, release := told.block()
	c := pglock.New(pool, pglock.WithObserver(told))
	l := acquire(t, c, "renewed", 2*time.Second)
	<-entered
	for range 2 {
		renewed(t, pool, "renewed")
	}
	if err := l.Err(); err != nil {
		t.Errorf("the renewed one says %v", err)
	}
	lost := acquire(t, c, "lost", 300*time.Millisecond)
	exec(t, pool, `SELECT pglock.force_release('lost', $1)`, lost.Token())
	<-lost.Context().Done()
	if err := acquire(t, c, "released", time.Hour).Release(t.Context()); err != nil {
		t.Error(err)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if n := one[int64](t, pool, heldRows); n != 0 {
		t.Errorf("%d leases are still held", n)
	}
	if got := told.take(t, 1); len(got) != 1 {
		t.Fatalf("told %v: it did not block, and this test shows nothing", kinds(got))
	}
	close(release)
	if got, want := kinds(told.take(t, 5)), []string{"Acquired", "Lost", "Acquired", "Released", "Released"}; !slices.Equal(got, want) {
		t.Errorf("told %v when it went on, want %v", got, want)
	}
}

// Of an observer that is too far behind some tenures are kept, but from none only
// the beginning or only the end.
func TestObserver_Lags(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	told := &notes{}
	entered, release := told.block()
	c := pglock.New(pool, pglock.WithObserver(told))
	first := acquire(t, c, "first", time.Hour)
	<-entered
	const tenures = 11_000
	for chunk := range tenures / 1000 {
		names := make([]string, 1000)
		for i := range names {
			names[i] = fmt.Sprintf("many/%d/%d", chunk, i)
		}
		if _, err := c.TryAcquireAll(t.Context(), names, time.Hour); err != nil {
			t.Fatal(err)
		}
	}
	if err := first.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	close(release)
	const kept = 1 + 10_000
	begun := map[*pglock.Lease]int{}
	for _, event := range told.take(t, 2*kept) {
		switch e := event.(type) {
		case pglock.Acquired:
			begun[e.Lease]++
		case pglock.Released:
			begun[e.Lease]--
		}
	}
	if len(begun) != kept {
		t.Errorf("told of %d tenures, want %d of %d", len(begun), kept, tenures+1)
	}
	for l, n := range begun {
		if n != 0 {
			t.Errorf("told of %s: %d beginnings more than ends", l.Name(), n)
		}
	}
}
