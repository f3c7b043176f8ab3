package pglockotel_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/trace"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/optimistic"
	"github.com/pawl-go/pawl/pglock"
	"github.com/pawl-go/pawl/pglock/pglockotel"
)

const heldLeases = "pglock.lease.count {lease} "

// Each instrument has the value of what happened, and no other has: every number
// here is another one.
func TestObserver_EveryInstrument(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	s := watch(t, pglockotel.WithClass(func(name string) string { class, _, _ := strings.Cut(name, "/"); return class }))
	c := pglock.New(pool, pglock.WithObserver(s))
	many := func(verb func(), n int) {
		for range n {
			verb()
		}
	}
	var l *pglock.Lease
	many(func() { l = acquire(t, c, "a/released", time.Hour); must(t, l.Release(t.Context())) }, 3)
	many(func() {
		l = acquire(t, c, "a/lost", time.Hour)
		exec(t, pool, `SELECT pglock.force_release($1, $2)`, l.Name(), l.Token())
		if err := l.Release(t.Context()); !errors.Is(err, pglock.ErrLost) {
			t.Errorf("release after a forced one: %v", err)
		}
	}, 2)
	many(func() {
		err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return l.Guard(t.Context(), tx) })
		if !errors.Is(err, pglock.ErrLost) {
			t.Errorf("guard: %v", err)
		}
	}, 5)
	unaware := acquire(t, c, "b/unaware", time.Hour)
	exec(t, pool, `SELECT pglock.force_release($1, $2)`, unaware.Name(), unaware.Token())
	down := &pgconn.PgError{Code: "57P01"}
	for n, event := range map[int]pglock.Event{
		11: pglock.Renewed{Leases: 1000},
		12: pglock.Renewed{Leases: 1, Err: down},
		13: pglock.Renewed{Leases: 1, Err: context.Canceled},
		14: pglock.Renewed{Tickets: 1},
		15: pglock.Renewed{Tickets: 1, Err: errors.New("reset by peer")},
		16: pglock.Fallback{Err: errors.New("cut")},
		17: pglock.Waited{Name: "a/1", Waited: time.Second},
		18: pglock.Waited{Name: "a/2", Waited: time.Second, Err: context.Canceled, GaveUp: true},
		19: pglock.Waited{Name: "a/3", Waited: time.Second, Err: down},
		20: pglock.CampaignFailed{Name: "a/4", Err: down},
	} {
		many(func() { s.Observe(t.Context(), event) }, n)
	}
	exec(t, pool, `CREATE TABLE accounts (id bigint PRIMARY KEY, version bigint NOT NULL); INSERT INTO accounts VALUES (1, 1)`)
	type account struct{ ID int64 }
	accounts := optimistic.NewTable[account]("accounts", optimistic.WithObserver(s))
	many(func() {
		if _, err := accounts.Touch(t.Context(), pool, 1, 2); !errors.Is(err, optimistic.ErrConflict) {
			t.Errorf("touch: %v", err)
		}
	}, 6)
	kept := acquire(t, c, "c/kept", time.Hour)
	s.tells(t, heldLeases+"pglock.lease.class=c", 1) // the last that an acquire moves
	want := map[string]int64{
		"pglock.lease.count {lease} pglock.lease.class=a":                                               0,
		"pglock.lease.count {lease} pglock.lease.class=b":                                               1, // it will know at its renewal
		"pglock.lease.count {lease} pglock.lease.class=c":                                               1,
		"pglock.lease.acquired {lease} pglock.lease.class=a":                                            5,
		"pglock.lease.acquired {lease} pglock.lease.class=b":                                            1,
		"pglock.lease.acquired {lease} pglock.lease.class=c":                                            1,
		"pglock.lease.released {lease} pglock.lease.class=a":                                            3,
		"pglock.lease.lost {lease} pglock.lease.class=a,pglock.lost.cause=released_by_force":            2,
		"pglock.lease.hold.duration s pglock.lease.class=a":                                             5,
		"pglock.write.fenced {write} pglock.lease.class=a":                                              5,
		"optimistic.conflicts {conflict} db.collection.name=accounts":                                   6,
		"pglock.renewals {statement} pglock.renewal.kind=lease":                                         11,
		"pglock.renewals {statement} error.type=57P01,pglock.renewal.kind=lease":                        12,
		"pglock.renewals {statement} error.type=timeout,pglock.renewal.kind=lease":                      13,
		"pglock.renewals {statement} pglock.renewal.kind=ticket":                                        14,
		"pglock.renewals {statement} error.type=_OTHER,pglock.renewal.kind=ticket":                      15,
		"pglock.campaign.failures {campaign} error.type=57P01,pglock.lease.class=a":                     20,
		"pglock.fallbacks {fallback} ":                                                                  16,
		"pglock.lease.wait.duration s pglock.lease.class=a,pglock.wait.outcome=granted":                 17,
		"pglock.lease.wait.duration s pglock.lease.class=a,pglock.wait.outcome=gave_up":                 18,
		"pglock.lease.wait.duration s error.type=57P01,pglock.lease.class=a,pglock.wait.outcome=failed": 19,
	}
	if diff := cmp.Diff(want, s.series(t)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if err := c.Close(t.Context()); !errors.Is(err, pglock.ErrLost) {
		t.Errorf("close with a lease that was released by force: %v", err)
	}
	if n := s.held(t); n != 0 || kept.Err() != pglock.ErrReleased {
		t.Errorf("%d leases held after Close, the last says %v", n, kept.Err())
	}
}

// Names can be many: without WithClass no metric has them, nor a series for each.
func TestObserver_NoNames(t *testing.T) {
	t.Parallel()
	s := watch(t)
	if n, ok := s.series(t)[heldLeases]; n != 0 || !ok {
		t.Errorf("before the first lease the count is %d (shown: %v), want 0", n, ok)
	}
	c := newClient(t, pgtest.Pool(t), pglock.WithObserver(s))
	leases, err := c.TryAcquireAll(t.Context(), []string{"accounts/1", "accounts/2", "accounts/3"}, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	s.tells(t, heldLeases, 3)
	must(t, leases[0].Release(t.Context()))
	s.tells(t, "pglock.lease.released {lease} ", 1)
	for series := range s.series(t) {
		if strings.Contains(series, "accounts") {
			t.Errorf("there is a series %s", series)
		}
	}
	if n := len(s.series(t)); n != 4 {
		t.Errorf("%d series: %v", n, s.series(t))
	}
}

// Durations are in seconds, between bounds that fit locks.
func TestObserver_Seconds(t *testing.T) {
	t.Parallel()
	s := watch(t)
	s.Observe(t.Context(), pglock.Waited{Name: "a", Waited: 1500 * time.Millisecond})
	s.Observe(t.Context(), pglock.Released{Name: "a", Held: 90 * time.Minute})
	s.Observe(t.Context(), pglock.Lost{Name: "a", Held: 30 * time.Minute, Err: &pglock.LostError{Cause: pglock.Taken}})
	for name, want := range map[string]float64{"pglock.lease.wait.duration": 1.5, "pglock.lease.hold.duration": 7200} {
		got, ok := s.metric(t, name).(metricdata.Histogram[float64])
		if !ok || len(got.DataPoints) != 1 {
			t.Fatalf("%s is %#v", name, got)
		}
		point := got.DataPoints[0]
		if point.Sum != want {
			t.Errorf("%s adds up to %v s, want %v", name, point.Sum, want)
		}
		if first, last := point.Bounds[0], point.Bounds[len(point.Bounds)-1]; first > 0.001 || last < 300 {
			t.Errorf("%s has buckets from %v to %v s", name, first, last)
		}
	}
}

// A wait that was cancelled has held nothing, and is no error (V01). The control
// counts where a call of Acquire ends, whichever way.
func TestObserver_V01_CancelWhileWaiting(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	acquire(t, newClient(t, pool), "leader", time.Hour)
	s := watch(t)
	var naive atomic.Int64
	c := newClient(t, pool, pglock.WithObserver(after(func(event pglock.Event) {
		switch event.(type) {
		case pglock.Waited:
			naive.Add(1)
		case pglock.Lost, pglock.Released:
			naive.Add(-1)
		}
	})), pglock.WithObserver(s))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, err := c.Acquire(ctx, "leader", time.Hour)
		done <- err
	}()
	waiting(t, pool, "leader")
	if n := s.held(t); n != 0 {
		t.Errorf("%d held while waiting", n)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	s.tells(t, "pglock.lease.wait.duration s pglock.wait.outcome=gave_up", 1)
	if n := s.held(t); n != 0 {
		t.Errorf("%d held after the wait was cancelled", n)
	}
	if n := naive.Load(); n != 1 {
		t.Errorf("the control counts %d: this test shows nothing", n)
	}
	for _, span := range s.spans.Ended() {
		if span.Status().Code != codes.Unset {
			t.Errorf("the span %s says %v", span.Name(), span.Status())
		}
	}
	if n := len(s.spans.Ended()); n != 1 {
		t.Errorf("%d spans, want that of the wait", n)
	}
}

// The count has fallen when the lease's context ends and when it is being
// released, whoever has been told by then: here nobody is.
func TestObserver_CountFallsFirst(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	s := watch(t)
	block, entered := make(chan bool), make(chan bool, 100)
	c := newClient(t, pool, pglock.WithObserver(s), pglock.WithObserver(after(func(event pglock.Event) {
		if _, ok := event.(pglock.Acquired); ok {
			entered <- true
			<-block
		}
	})))
	l := acquire(t, c, "blocked", 5*time.Second)
	<-entered
	if n := s.held(t); n != 1 {
		t.Errorf("%d held, want 1", n)
	}
	exec(t, pool, `SELECT pglock.force_release($1, $2)`, l.Name(), l.Token())
	<-l.Context().Done()
	if n := s.held(t); n != 0 {
		t.Errorf("%d held when the context has ended", n)
	}
	if n := s.series(t)["pglock.lease.lost {lease} pglock.lost.cause=released_by_force"]; n != 0 {
		t.Errorf("%d losses told: this test shows nothing", n)
	}
	close(block)
	s.tells(t, "pglock.lease.lost {lease} pglock.lost.cause=released_by_force", 1)
}

type after func(pglock.Event)

func (f after) Observe(_ context.Context, event pglock.Event) { f(event) }

// Waits and tenures are spans under the caller's, and a tenure links to the one
// before it, of another client too. Only a loss is an error.
func TestObserver_Spans(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	s := watch(t)
	first, second := newClient(t, pool, pglock.WithObserver(s)), newClient(t, pool, pglock.WithObserver(s))
	ctx, parent := trace.NewTracerProvider().Tracer("caller").Start(t.Context(), "call")
	l := acquire(t, first, "linked", time.Hour)
	granted := make(chan *pglock.Lease)
	go func() {
		l, err := second.Acquire(ctx, "linked", time.Hour)
		if err != nil {
			t.Error(err)
		}
		granted <- l
	}()
	waiting(t, pool, "linked")
	must(t, l.Release(t.Context()))
	next := <-granted
	exec(t, pool, `SELECT pglock.force_release('linked', $1)`, next.Token())
	if err := next.Release(t.Context()); !errors.Is(err, pglock.ErrLost) {
		t.Fatal(err)
	}
	acquire(t, second, "elsewhere", time.Hour)
	must(t, first.Close(t.Context()))
	must(t, second.Close(t.Context()))

	tenures := map[int64]trace.ReadOnlySpan{}
	var wait trace.ReadOnlySpan
	for _, span := range s.spans.Ended() {
		attrs := attribute.NewSet(span.Attributes()...)
		if name, _ := attrs.Value("pglock.lease.name"); name.AsString() == "" {
			t.Errorf("span %s has no name: %v", span.Name(), span.Attributes())
		}
		switch token, ok := attrs.Value("pglock.lease.token"); span.Name() {
		case "pglock.lease.hold":
			tenures[token.AsInt64()] = span
		case "pglock.lease.wait":
			if wait = span; ok {
				t.Error("a wait has a token")
			}
		}
	}
	if len(tenures) != 3 || wait == nil {
		t.Fatalf("%d tenures, wait %v", len(tenures), wait)
	}
	one, two := tenures[int64(l.Token())], tenures[int64(next.Token())]
	if n := len(one.Links()); n != 0 {
		t.Errorf("the first tenure has %d links", n)
	}
	if links := two.Links(); len(links) != 1 || !links[0].SpanContext.Equal(one.SpanContext()) {
		t.Errorf("the second tenure links to %v, want %v", links, one.SpanContext())
	}
	if n := len(tenures[int64(next.Token())+1].Links()); n != 0 {
		t.Errorf("a tenure of another name has %d links", n)
	}
	for _, span := range []trace.ReadOnlySpan{two, wait} {
		if span.Parent().SpanID() != parent.SpanContext().SpanID() {
			t.Errorf("%s is under %v, want the caller's span", span.Name(), span.Parent())
		}
	}
	if one.Status().Code != codes.Unset || wait.Status().Code != codes.Unset || two.Status().Code != codes.Error {
		t.Errorf("status released %v, waited %v, lost %v", one.Status(), wait.Status(), two.Status())
	}
	if !wait.EndTime().After(wait.StartTime()) {
		t.Errorf("the wait lasts from %v to %v", wait.StartTime(), wait.EndTime())
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
