package pglock_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// waiting waits until so many hold tickets for a name.
func waiting(t testing.TB, pool *pgxpool.Pool, name string, n int) {
	t.Helper()
	until(t, pool, fmt.Sprintf("%d tickets for %q", n, name),
		`SELECT count(*) = $2 FROM pglock.waiters WHERE name = $1`, name, n)
}

// Waiters of many clients are granted the lease in the order of their tickets.
func TestLease_L8_GrantedInTheOrderOfTheTickets(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	audit(t, pool, false)
	holder := acquire(t, newClient(t, pool), "line", time.Minute)
	const waiters, clients = 24, 6
	var cs [clients]*pglock.Client
	for i := range cs {
		cs[i] = newClient(t, pool)
	}
	got := make(chan int, waiters)
	var wg sync.WaitGroup
	for i := range waiters {
		wg.Go(func() {
			l, err := cs[i%clients].Acquire(t.Context(), "line", time.Minute)
			if err != nil {
				t.Error(err)
				return
			}
			got <- i
			if err := l.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
		waiting(t, pool, "line", i+1)
	}
	if err := holder.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	wg.Wait()
	close(got)
	want := 0
	for i := range got {
		if i != want {
			t.Errorf("waiter %d was granted the lease as number %d", i, want)
		}
		want++
	}
	if grants, inverted := inversions(t, pool); grants != waiters+1 || inverted != 0 {
		t.Errorf("%d grants, %d not above the one before", grants, inverted)
	}
	waiting(t, pool, "line", 0)
}

// The same over many hand-offs, of 16 clients that come back at once: the
// database records the ticket of each grant.
func TestLease_L8_ManyHandOffs(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	audit(t, pool, false)
	exec(t, pool, `ALTER TABLE grants ADD ticket bigint;
		CREATE TABLE tickets (ticket bigint PRIMARY KEY, claim uuid);
		CREATE FUNCTION note_ticket() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN INSERT INTO public.tickets VALUES (NEW.ticket, NEW.claim); RETURN NULL; END $$;
		CREATE TRIGGER note_ticket AFTER INSERT ON pglock.waiters FOR EACH ROW EXECUTE FUNCTION note_ticket();
		CREATE OR REPLACE FUNCTION note_grant() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO public.grants (name, token, ticket)
			VALUES (NEW.name, NEW.token, (SELECT t.ticket FROM public.tickets t WHERE t.claim = NEW.claim));
			RETURN NULL;
		END $$`)
	const clients = 16
	var left, coming atomic.Int64
	left.Store(pgtest.Lasting[int64](10_000, 2_000, 300))
	coming.Store(clients)
	// awaited returns when somebody waits, or nobody else comes any more.
	awaited := func() (err error) {
		for somebody := false; !somebody && err == nil && coming.Load() > 1; {
			err = pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pglock.waiters)`).Scan(&somebody)
		}
		return err
	}
	var wg sync.WaitGroup
	for range clients {
		c := newClient(t, pool)
		wg.Go(func() {
			defer coming.Add(-1)
			for left.Add(-1) >= 0 {
				l, err := c.Acquire(t.Context(), "line", time.Minute)
				if err == nil {
					err = awaited()
				}
				if err == nil {
					err = l.Release(t.Context())
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	handed := one[int64](t, pool, `SELECT count(ticket) FROM grants`)
	overtaken := one[int64](t, pool, `SELECT count(*) FROM (SELECT ticket < lag(ticket) OVER (ORDER BY nth) AS back FROM grants WHERE ticket IS NOT NULL) g WHERE back`)
	grants, inverted := inversions(t, pool)
	t.Logf("%d grants, %d of them handed on: %d before a lower ticket, %d with a token not above the one before", grants, handed, overtaken, inverted)
	if overtaken != 0 || inverted != 0 {
		t.Errorf("%d grants before a lower ticket, %d with a token not above the one before", overtaken, inverted)
	}
	if handed < grants-2*clients {
		t.Errorf("%d of %d grants were handed on: this test shows little", handed, grants)
	}
}

// A try on a free lease for which somebody waits hands it to the head of the
// queue and loses.
func TestLease_L2_ATryDoesNotOvertake(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	acquire(t, newClient(t, pool), "queued", time.Hour)
	granted := make(chan *pglock.Lease)
	go func() {
		l, _ := c.Acquire(t.Context(), "queued", time.Hour)
		granted <- l
	}()
	waiting(t, pool, "queued", 1)
	expire(t, pool, "queued")
	if l, err := newClient(t, pool).TryAcquire(t.Context(), "queued", time.Hour); err == nil {
		t.Errorf("a try overtook a waiter, with token %d", l.Token())
	}
	if l := <-granted; l == nil || l.Err() != nil {
		t.Error("the waiter was not granted the lease")
	}
}

// Waiters that give up leave no ticket and hold nobody up.
func TestLease_L28_GivingUpLeavesNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	holder := acquire(t, c, "left", time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if l, err := c.Acquire(ctx, "left", time.Hour); err == nil {
				t.Errorf("token %d was granted while the lease was held", l.Token())
			}
		})
	}
	waiting(t, pool, "left", 50)
	cancel()
	wg.Wait()
	waiting(t, pool, "left", 0)
	if err := holder.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	acquire(t, c, "left", time.Hour)
}

// BenchmarkHandoff has 16 waiters, each a client with a connection of its own,
// pass a lease on, and beside it a bare session advisory lock on a connection
// each. It reports the time from a release to the next grant. Each holds it long
// enough for the one before to be in line again, as bench's scenario does: without
// that the gap is how soon a busy machine gets round to it.
func BenchmarkHandoff(b *testing.B) {
	const waiters, tenure = 16, 2 * time.Millisecond
	pool := pgtest.Pool(b)
	ctx := context.Background()
	// pass has each waiter take, hold and free it until it has changed hands b.N times.
	pass := func(b *testing.B, waiter func() (take, free func() error)) (p50 time.Duration) {
		g := newGaps(b.N)
		var wg sync.WaitGroup
		for range waiters {
			take, free := waiter()
			wg.Go(func() {
				for more := true; more; {
					if err := take(); err != nil {
						b.Error(err)
						return
					}
					more = g.granted()
					time.Sleep(tenure)
					g.released()
					if err := free(); err != nil {
						b.Error(err)
						return
					}
				}
			})
		}
		wg.Wait()
		return g.report(b)
	}
	var before time.Duration
	b.Run("advisory", func(b *testing.B) {
		before = pass(b, func() (take, free func() error) {
			conn := newConn(b, pool)
			send := func(sql string) func() error {
				return func() error { _, err := conn.Exec(ctx, sql); return err }
			}
			return send(`SELECT pg_advisory_lock(1)`), send(`SELECT pg_advisory_unlock(1)`)
		})
	})
	b.Run("lease", func(b *testing.B) {
		after := pass(b, func() (take, free func() error) {
			c := newClient(b, pool)
			var l *pglock.Lease
			take = func() (err error) { l, err = c.Acquire(ctx, "handoff", time.Minute); return err }
			return take, func() error { return l.Release(ctx) }
		})
		if before > 0 {
			b.ReportMetric(float64(after)/float64(before), "p50/advisory")
		}
	})
}
