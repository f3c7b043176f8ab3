//go:build unix

package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
)

var losses = flag.Int("losses", 1, "how often each way to lose a lease is taken")

// A run that the network cuts off ends its command before anybody else is
// granted the lease (C04): when the next run's command begins, nobody of the
// first one's is there. The control is a process that has left the group, which
// run does not know of.
func TestRun_C04_ABlackHoledCommandIsGoneBeforeTheNext(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	for _, tt := range []struct {
		ttl    time.Duration
		what   string
		script string
	}{
		{2 * time.Second, "heeds TERM", family},
		{2 * time.Second, "heeds none", deafFamily},
		{300 * time.Millisecond, "heeds none", deafFamily},
		{2 * time.Second, "control", `setsid sh -c "echo $$ \$\$; exec sleep 1000 2>/dev/null" & wait`},
	} {
		for n := range *losses {
			t.Run(fmt.Sprintf("%s %v %d", tt.what, tt.ttl, n), func(t *testing.T) {
				t.Parallel()
				pool := pgtest.PoolOn(t, dsn)
				wire := pgtest.Proxy(t, dsn)
				first := wrap(t, wire.DSN(), tt.script, t.Name(), "--ttl", tt.ttl.String())
				// On a busy machine a short lease may be lost before.
				until(t, pool, "a renewal", `SELECT EXISTS (SELECT FROM pglock.leases WHERE name = $1
					AND (expires_at > acquired_at + ttl OR expires_at < clock_timestamp()))`, t.Name())
				if len(first.alive()) != 2 && tt.ttl > time.Second {
					t.Fatalf("of %v there are %v", first.pids, first.alive())
				}
				wire.Silence()
				// Its first act is to look for the first one's processes.
				look := fmt.Sprintf(`for pid in %d %d; do kill -0 $pid 2>/dev/null && echo alive $pid; done; date +%%s%%N`, first.pids[0], first.pids[1])
				second := do(t, dsn, "run", t.Name(), "--", "sh", "-c", look)
				if second.code != 0 {
					t.Fatalf("the second exits with %d: %s", second.code, second.stderr)
				}
				if tt.what == "control" {
					if !strings.Contains(second.stdout, fmt.Sprint("alive ", first.pids[1])) {
						t.Errorf("what has left the group is gone too, %q: this test shows nothing", second.stdout)
					}
					return
				}
				if strings.Contains(second.stdout, "alive") {
					t.Errorf("beside the second there was %q", second.stdout)
				}
				<-first.over
				var begun int64
				if _, err := fmt.Sscan(second.stdout, &begun); err == nil {
					lead := time.Unix(0, begun).Sub(first.end)
					t.Logf("the first was gone %v before the second began", lead)
					if lead <= 0 {
						t.Error("that is too late")
					}
				}
				if code := first.program.end(t); code != exitLost || !strings.Contains(first.stderr.String(), "lease") {
					t.Errorf("the first exits with %d and says %q", code, first.stderr.String())
				}
			})
		}
	}
}

// A run whose lease was released by force ends its command, and says so.
func TestRun_C04_ReleasedByForce(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	for what, script := range map[string]string{"heeds TERM": family, "heeds none": deafFamily} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			w := wrap(t, dsn, script, t.Name(), "--ttl", "1s")
			if got := do(t, dsn, "release", t.Name(), "--force"); got.code != 0 || !strings.Contains(got.stdout, "released") {
				t.Fatalf("%+v", got)
			}
			if code := w.program.end(t); code != exitLost || !strings.Contains(w.stderr.String(), "released by force") {
				t.Errorf("it exits with %d and says %q", code, w.stderr.String())
			}
			if left := w.alive(); left != nil {
				t.Errorf("%v is there", left)
			}
		})
	}
}

// A run that was stopped past its lease kills its command before anything else when
// it wakes.
func TestRun_C04_StoppedPastTheLease(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	w := wrap(t, dsn, deafFamily, "stopped", "--ttl", "300ms")
	w.send(syscall.SIGSTOP)
	// The command goes on beside the next holder meanwhile, as the help says.
	second := do(t, dsn, "run", "stopped", "--", "kill", "-0", fmt.Sprint(w.pids[0]))
	if second.code != 0 {
		t.Errorf("the command is gone though its run was stopped (%+v): this test shows nothing", second)
	}
	w.send(syscall.SIGCONT)
	if code := w.program.end(t); code != exitLost || w.alive() != nil {
		t.Errorf("it exits with %d, and there is %v", code, w.alive())
	}
}

// A command whose lease can be renewed is left in peace, also through an outage
// that is shorter than what is left of the TTL.
func TestRun_C04_AShortOutage(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	wire := pgtest.Proxy(t, dsn)
	const ttl = 4 * time.Second
	done := filepath.Join(t.TempDir(), "done")
	w := wrap(t, wire.DSN(), `echo $$; while [ ! -e '`+done+`' ]; do sleep 0.01; done`, "outage", "--ttl", ttl.String())
	pool := pgtest.PoolOn(t, dsn)
	const expiry = `SELECT expires_at FROM pglock.leases WHERE name = 'outage'`
	before := one[time.Time](t, pool, expiry)
	wire.Cut()
	if _, err := pool.Exec(t.Context(), `SELECT pg_sleep_until($1)`, before.Add(-ttl/2)); err != nil {
		t.Fatal(err)
	}
	if at := one[time.Time](t, pool, expiry); !at.Equal(before) {
		t.Error("it was renewed in the outage: this test shows nothing")
	}
	wire.Heal()
	until(t, pool, "a renewal", `SELECT expires_at > $1 FROM pglock.leases WHERE name = 'outage'`, before)
	if err := os.WriteFile(done, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if code := w.program.end(t); code != 0 || w.stderr.Len() > 0 {
		t.Errorf("it exits with %d and says %q", code, w.stderr.String())
	}
}
