//go:build unix

package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// When a paused holder wakes.
const (
	wokenBefore = "before the next holder's first write"
	wokenAfter  = "after the next holder's first write"
	wokenInside = "inside its own open transaction"
)

// pause is one way for a holder to be stopped and to write too late.
type pause struct {
	wakes string
	times int // with -short a tenth of it

	prepare []string // what it does as the holder, and is then stopped
	late    []string // what it does at once when it wakes
	fates   []string // what becomes of that; "fenced" stands for the next holder's token

	proof     string // how the next holder shows its right to write
	control   bool   // nothing checks the holder: its late write is accepted
	unbounded bool   // guarded and never cut off: it keeps the next holder waiting
}

var pauses = []pause{
	{wakes: wokenBefore, times: 17, proof: "guard", late: []string{"begin", "guard", "update", "commit"},
		fates: []string{"ok", "lost: taken PW002", "25P02", "rolled back"}},
	{wakes: wokenBefore, times: 17, proof: "fence", late: []string{"begin", "fence", "update", "commit"},
		fates: []string{"ok", "fenced", "25P02", "rolled back"}},
	{wakes: wokenAfter, times: 17, proof: "guard", late: []string{"begin", "guard", "update", "commit"},
		fates: []string{"ok", "lost: taken PW002", "25P02", "rolled back"}},
	{wakes: wokenAfter, times: 17, proof: "fence", prepare: []string{"begin", "fence", "read", "commit"}, late: []string{"begin", "fence", "update", "commit"},
		fates: []string{"ok", "fenced", "25P02", "rolled back"}},
	{wakes: wokenInside, times: 11, proof: "guard", prepare: []string{"begin", "guard", "read"}, late: []string{"update", "commit"},
		fates: []string{"cut off", "cut off"}},
	{wakes: wokenInside, times: 11, proof: "guard", prepare: []string{"begin", "guard", "read", "update"}, late: []string{"commit"},
		fates: []string{"cut off"}},
	{wakes: wokenInside, times: 10, proof: "fence", prepare: []string{"begin", "bound the hold", "fence", "read"}, late: []string{"update", "commit"},
		fates: []string{"cut off", "cut off"}},

	// Beside the hundred: a snapshot from before the pause, and InTx, which
	// sends no write once it has been refused.
	{wakes: wokenInside, times: 4, proof: "guard", prepare: []string{"begin at REPEATABLE READ", "read"}, late: []string{"guard", "update", "commit"},
		fates: []string{"40001", "25P02", "rolled back"}},
	{wakes: wokenBefore, times: 4, proof: "guard", late: []string{"write in InTx"}, fates: []string{"lost: taken PW002"}},
	{wakes: wokenAfter, times: 4, proof: "guard", late: []string{"write in InTx"}, fates: []string{"lost: taken PW002"}},

	{wakes: wokenBefore, times: 4, late: []string{"begin", "update", "commit"}, fates: []string{"ok", "ok", "ok"}, control: true},
	{wakes: wokenAfter, times: 4, late: []string{"begin", "update", "commit"}, fates: []string{"ok", "ok", "ok"}, control: true},
	{wakes: wokenInside, times: 4, prepare: []string{"begin", "read"}, late: []string{"update", "commit"}, fates: []string{"ok", "ok"}, control: true},
	{wakes: wokenInside, times: 2, prepare: []string{"begin", "unbound the hold", "guard", "read"}, late: []string{"update", "commit"},
		fates: []string{"ok", "ok"}, unbounded: true},
}

func (p pause) String() string {
	name := p.wakes + "/" + strings.Join(slices.Concat(p.prepare, []string{"stopped"}, p.late), ", ")
	if p.control || p.unbounded {
		name = "control " + name
	}
	return name
}

// pausedTTL is the TTL of those who are stopped, and the pause is three times
// as long. nextTTL is that of the next holders, who must outlast it on a busy
// machine. heldUp is how long after the stop one of those has written at the
// latest: the paused transaction is cut off after pausedTTL, and who waits for
// the lease looks every third of nextTTL.
const (
	pausedTTL = 300 * time.Millisecond
	nextTTL   = 2 * time.Second
	heldUp    = 10 * (pausedTTL + 50*time.Millisecond)
)

// A holder that is paused past its TTL writes when it wakes, without a look at
// anything: too late, and refused (L03 and L11), while the rightful holder is
// not held up. The controls have no Guard and no Fence.
func TestLease_L03_PausedHolder(t *testing.T) {
	t.Parallel()
	const lanes = 10
	dsn := pgtest.DSN(t)
	r := &pausing{pool: roomy(t, pgtest.PoolOn(t, dsn), 3*lanes)}
	r.next = newClient(t, r.pool, pglock.WithOwner("next"))
	exec(t, r.pool, `CREATE TABLE accounts (name text PRIMARY KEY, balance int NOT NULL DEFAULT 100, token bigint);
		CREATE TABLE writes (nth bigserial PRIMARY KEY, name text NOT NULL, token bigint NOT NULL);
		CREATE FUNCTION note_write() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN INSERT INTO public.writes (name, token) VALUES (NEW.name, NEW.token); RETURN NULL; END $$;
		CREATE TRIGGER note_write AFTER UPDATE ON accounts FOR EACH ROW EXECUTE FUNCTION note_write()`)

	var rounds []pause
	for i, most := 0, 1; i < most; i++ { // the kinds take turns
		for _, p := range pauses {
			times := scale(p.times, (p.times+9)/10)
			most = max(most, times)
			if i < times {
				rounds = append(rounds, p)
			}
		}
	}
	var round atomic.Int64
	var wg sync.WaitGroup
	for lane := range lanes {
		wg.Go(func() {
			t.Run(fmt.Sprint("lane ", lane), func(t *testing.T) {
				child := spawn(t, dsn)
				for n := int(round.Add(1)) - 1; n < len(rounds); n = int(round.Add(1)) - 1 {
					r.round(t, child, rounds[n], fmt.Sprint("accounts/", n))
				}
			})
		})
	}
	wg.Wait()

	for _, point := range []string{wokenBefore, wokenAfter, wokenInside} {
		t.Logf("woken %s: %d of %d late writes sent, %d accepted; controls: %d of %d, %d accepted", point,
			r.sent[point], r.paused[point], r.accepted[point], r.sent["control "+point], r.paused["control "+point], r.accepted["control "+point])
		if r.accepted[point] != 0 {
			t.Errorf("%d late writes were accepted", r.accepted[point])
		}
		if want := scale(30, 4); r.sent[point] < want {
			t.Errorf("%d late writes were sent, want %d", r.sent[point], want)
		}
		if r.accepted["control "+point] == 0 {
			t.Error("no control's late write was accepted: this test shows nothing")
		}
	}
	t.Logf("the next holder had written at most %v after a holder was stopped inside its transaction, with a TTL of %v; %d stops came after the lease had run out, and were repeated",
		r.longest, pausedTTL, r.repeated)
	if sent, want := r.sent[wokenBefore]+r.sent[wokenAfter]+r.sent[wokenInside], scale(100, 13); sent < want {
		t.Errorf("%d late writes were sent, want %d", sent, want)
	}
}

// pausing is what the rounds of TestLease_L03_PausedHolder share.
type pausing struct {
	pool *pgxpool.Pool
	next *pglock.Client

	mu                     sync.Mutex
	paused, sent, accepted map[string]int // by the point of waking
	longest                time.Duration
	repeated               int
}

func (r *pausing) round(t *testing.T, child *process, p pause, name string) {
	exec(t, r.pool, `INSERT INTO accounts (name) VALUES ($1)`, name)
	stale, stopped := r.stop(t, child, p, name)

	clock := func() time.Time { return one[time.Time](t, r.pool, `SELECT clock_timestamp()`) }
	threeTTL := func() {
		exec(t, r.pool, `SELECT pg_sleep_until($1)`, stopped.Add(3*pausedTTL))
		until(t, r.pool, "the pause end", `SELECT clock_timestamp() >= $1`, stopped.Add(3*pausedTTL))
	}
	if p.unbounded {
		threeTTL()
		_, err := r.next.TryAcquire(t.Context(), name, time.Minute)
		if held, ok := errors.AsType[*pglock.HeldError](err); !ok || !held.ExpiresAt.Before(clock()) {
			t.Errorf("%v: a try said %v, want that the lease has expired and can't be had", p, err)
		}
		child.send(order{Name: name, TTL: pausedTTL, Steps: p.late})
		child.wake()
		r.judge(t, p, name, stale, 0, child.hear())
		child.ask(order{Steps: []string{"end"}})
		return
	}

	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	lease, err := r.next.Acquire(ctx, name, nextTTL)
	if err != nil {
		t.Fatal(err)
	}
	tx := begin(t, r.pool)
	write := func() {
		exec(t, tx, `UPDATE accounts SET balance = balance - 1, token = $2 WHERE name = $1`, name, lease.Token())
		if err := tx.Commit(t.Context()); err != nil {
			t.Fatalf("%v: the rightful holder's write: %v", p, err)
		}
	}
	if p.wakes != wokenBefore {
		prove(t, tx, p.proof, lease)
		write()
	}
	kept := clock().Sub(stopped)
	threeTTL()
	// The order lies in the pipe before the child wakes.
	child.send(order{Name: name, TTL: pausedTTL, Steps: p.late})
	if p.wakes == wokenBefore && p.proof == "fence" {
		// Fence has nothing to refuse before the next holder has come to the
		// resource, and what is accepted until then is in what that one reads.
		prove(t, tx, p.proof, lease)
		child.wake()
		blockedBy(t, r.pool, uint32(pid(tx)))
		write()
	} else {
		child.wake()
	}
	late := child.hear()
	if p.wakes == wokenBefore && p.proof != "fence" {
		prove(t, tx, p.proof, lease)
		write()
	}
	r.judge(t, p, name, stale, lease.Token(), late)
	if p.wakes == wokenInside {
		r.mu.Lock()
		r.longest = max(r.longest, kept)
		r.mu.Unlock()
		if kept > heldUp {
			t.Errorf("%v: the next holder could write %v after the stop, want at most %v", p, kept, heldUp)
		}
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Errorf("%v: the rightful holder's release: %v", p, err)
	}
	child.ask(order{Steps: []string{"end"}})
}

// stop makes the child the holder, has it prepare and stops it. On a busy
// machine the lease may have run out by then, or the transaction been cut off:
// then again.
func (r *pausing) stop(t *testing.T, child *process, p pause, name string) (stale pglock.Token, stopped time.Time) {
	for range 20 {
		report := child.ask(order{Name: name, TTL: pausedTTL, Steps: append([]string{"acquire"}, p.prepare...)})
		child.stop()
		stopped = one[time.Time](t, r.pool, `SELECT clock_timestamp()`)
		holds := one[bool](t, r.pool, `SELECT expires_at > $3 FROM pglock.leases WHERE name = $1 AND token = $2`, name, report.Token, stopped)
		if p.wakes == wokenInside {
			holds = holds && one[bool](t, r.pool, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND state = 'idle in transaction')`, int32(report.Pid))
		}
		if holds {
			return report.Token, stopped
		}
		child.wake()
		child.ask(order{Steps: []string{"end"}})
		r.mu.Lock()
		r.repeated++
		r.mu.Unlock()
	}
	t.Fatalf("%v: a child is never the holder for long enough to be stopped", p)
	return 0, time.Time{}
}

// prove shows the right to write by p's means.
func prove(t *testing.T, tx pgx.Tx, by string, lease *pglock.Lease) {
	t.Helper()
	var err error
	switch by {
	case "guard":
		err = lease.Guard(t.Context(), tx)
	case "fence":
		err = pglock.Fence(t.Context(), tx, lease.Name(), lease.Token())
	}
	if err != nil {
		t.Fatalf("the rightful holder was refused: %v", err)
	}
}

// judge compares what the late writer was told with what the database has.
func (r *pausing) judge(t *testing.T, p pause, name string, stale, next pglock.Token, late report) {
	t.Helper()
	var want []string
	for _, fate := range p.fates {
		if fate == "fenced" {
			fate = fmt.Sprintf("fenced: accepted %d PW001", next)
		}
		want = append(want, fate)
	}
	if diff := cmp.Diff(want, late.Fates); diff != "" {
		t.Errorf("%v: the late writer was told (-want +got):\n%s", p, diff)
	}
	accepted := one[int](t, r.pool, `SELECT count(*) FROM writes WHERE name = $1 AND token = $2`, name, stale)
	if !p.unbounded {
		if n := one[int](t, r.pool, `SELECT count(*) FROM writes WHERE name = $1 AND token = $2`, name, next); n != 1 {
			t.Errorf("%v: the rightful holder's write is in the database %d times", p, n)
		}
	}
	if p.unbounded {
		return
	}
	point := p.wakes
	if p.control {
		point = "control " + point
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.paused == nil {
		r.paused, r.sent, r.accepted = map[string]int{}, map[string]int{}, map[string]int{}
	}
	r.paused[point]++
	r.accepted[point] += accepted
	if late.Sent {
		r.sent[point]++
	}
}
