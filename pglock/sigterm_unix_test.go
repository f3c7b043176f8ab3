//go:build unix

package pglock_test

import (
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// A program that calls Close when it is sent SIGTERM, as Kubernetes sends it,
// frees a hundred leases in one statement: they can be had at once. The control
// does not, and its leases stay until their time has run out.
func TestClose_OnSIGTERM(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	next := newClient(t, pool)
	const held = `SELECT count(*) FROM pglock.leases WHERE name LIKE $1 || '/%' AND claim IS NOT NULL`
	terminated := func(name string, ttl time.Duration, steps ...string) *process {
		p := spawn(t, dsn)
		r := p.ask(order{Name: name, TTL: ttl, Steps: steps})
		if failed := slices.ContainsFunc(r.Fates, func(fate string) bool { return fate != "ok" }); failed {
			t.Fatalf("%s: %v", name, r.Fates)
		}
		if n := one[int64](t, pool, held, name); n != 100 {
			t.Fatalf("%s: %d leases are held, want 100", name, n)
		}
		if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		return p
	}

	p := terminated("closing", time.Hour, "close on SIGTERM", "acquire a hundred")
	r := p.hear()
	if r.Fates[0] != "ok" || len(r.Close) != 1 || !strings.Contains(r.Close[0], "pglock.release") {
		t.Errorf("Close said %v and sent %q, want one release", r.Fates, r.Close)
	}
	if n := one[int64](t, pool, held, "closing"); n != 0 {
		t.Errorf("%d of 100 leases are still held", n)
	}
	if n := one[int64](t, pool, `SELECT count(DISTINCT xmin::text) FROM pglock.leases WHERE name LIKE 'closing/%'`); n != 1 {
		t.Errorf("they were freed by %d transactions, want one", n)
	}
	acquire(t, next, "closing/99", time.Hour)
	if err := p.cmd.Wait(); err != nil {
		t.Error(err)
	}

	p = terminated("not closing", 2*time.Second, "acquire a hundred")
	if err := p.cmd.Wait(); err == nil {
		t.Error("SIGTERM did not end it")
	}
	until(t, pool, "the sessions of the dead end", `SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1)`,
		childName(p.cmd.Process.Pid))
	expires := one[time.Time](t, pool, `SELECT expires_at FROM pglock.leases WHERE name = 'not closing/99'`)
	if n := one[int64](t, pool, held, "not closing"); n != 100 {
		t.Errorf("%d of 100 leases are held without Close: this test shows nothing", n)
	}
	l, err := next.Acquire(t.Context(), "not closing/99", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	if at := one[time.Time](t, pool, `SELECT acquired_at FROM pglock.leases WHERE name = $1`, l.Name()); at.Before(expires) {
		t.Errorf("it was had %v before it expired: this test shows nothing", expires.Sub(at))
	}
}
