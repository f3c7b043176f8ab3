package pglock

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// Of several tries of one name the server is asked once. Where it grants that to a
// caller who has given up, the next of them has it, once, if he asked for the same.
func TestCourier_PassesOn(t *testing.T) {
	t.Parallel()
	const first, gone = "first", "gone"
	for name, tt := range map[string]struct {
		granted bool
		errands []string // the first, and those behind: what each is
		has     int      // who has it, -1: nobody
	}{
		"he has it himself":     {true, []string{first, "", ""}, 0},
		"the next":              {true, []string{gone, "", ""}, 1},
		"the next who is there": {true, []string{gone, gone, "", ""}, 2},
		"not who wants another": {true, []string{gone, "other", ""}, 2},
		"nobody is there":       {true, []string{gone, gone}, 0}, // and gives it back
		"somebody else has it":  {false, []string{gone, "", ""}, -1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var errands []*errand
			for _, what := range tt.errands {
				e := &errand{request: &request{name: "n", ttl: time.Hour}, gone: what == gone}
				if what == "other" {
					e.request.ttl = time.Minute
				}
				if len(errands) > 0 {
					e.behind = errands[0]
				}
				errands = append(errands, e)
			}
			errands[0].bid = bid{granted: tt.granted, token: 7}
			(&courier{}).passOn(&load{errands: errands[:1], behind: errands[1:]})
			for i, e := range errands {
				if e.bid.granted != (i == tt.has) || e.bid.token != 7 {
					t.Errorf("%d of %q has %+v", i, tt.errands, e.bid)
				}
				if own := e.behind == nil; own != (i == 0 || i == tt.has) {
					t.Errorf("%d of %q goes by the exchange's claim: %t", i, tt.errands, own)
				}
			}
		})
	}
}

// What is passed on is not given back after that for him who has given up.
func TestCourier_PassedOnIsKept(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := New(pool)
	// Nothing is written while somebody has the table, and n not while he has the gate.
	if _, err := pool.Exec(t.Context(), `
		CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NEW; END $$;
		CREATE TRIGGER gate BEFORE UPDATE ON pglock.leases FOR EACH ROW WHEN (NEW.name = 'n') EXECUTE FUNCTION gate();
		SELECT pglock.create_names('{n,alone,load/1,load/2}')`); err != nil {
		t.Fatal(err)
	}
	table, gate := locked(t, pool, `LOCK TABLE pglock.leases IN SHARE MODE`), locked(t, pool, `SELECT pg_advisory_xact_lock(1)`)

	type outcome struct {
		lease *Lease
		err   error
	}
	try := func(ctx context.Context, name string) <-chan outcome {
		done := make(chan outcome, 1)
		go func() {
			l, err := c.TryAcquire(ctx, name, time.Hour)
			done <- outcome{l, err}
		}()
		return done
	}
	seen := func(what string, is func() bool) {
		t.Helper()
		for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			c.courier.mu.Lock()
			yes := is()
			c.courier.mu.Unlock()
			if yes {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("never saw %s", what)
			}
		}
	}
	others := []<-chan outcome{try(t.Context(), "alone")}
	seen("a call alone", func() bool { return c.courier.alone == 1 })
	for i := range abreast {
		others = append(others, try(t.Context(), fmt.Sprint("load/", i+1)))
		seen("an exchange under way", func() bool { return c.courier.loads == i+1 && len(c.courier.pending) == 0 })
	}
	ctx, giveUp := context.WithCancel(t.Context())
	defer giveUp()
	first := try(ctx, "n")
	seen("the first wait", func() bool { return len(c.courier.pending) == 1 })
	second := try(t.Context(), "n")
	seen("the second wait", func() bool { return len(c.courier.pending) == 2 })
	table()
	seen("both go", func() bool { return len(c.courier.pending) == 0 })
	giveUp()
	if o := <-first; !errors.Is(o.err, context.Canceled) {
		t.Errorf("the first has %v, %v", o.lease, o.err)
	}
	gate()
	got := <-second
	if got.err != nil {
		t.Fatalf("the second: %v", got.err)
	}
	c.tails.Wait()
	var held bool
	if err := pool.QueryRow(t.Context(), `SELECT claim IS NOT NULL AND token = $1 FROM pglock.leases WHERE name = 'n'`,
		int64(got.lease.Token())).Scan(&held); err != nil || !held || got.lease.Err() != nil {
		t.Errorf("held: %t, %v, %v", held, err, got.lease.Err())
	}
	for _, done := range others {
		if o := <-done; o.err != nil {
			t.Error(o.err)
		}
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// locked runs a statement in a transaction that stays open until the function that it
// returns is called, or the test ends.
func locked(t *testing.T, pool *pgxpool.Pool, sql string) (end func()) {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	end = func() { _ = tx.Rollback(context.Background()) }
	t.Cleanup(end)
	if _, err := tx.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
	return end
}
