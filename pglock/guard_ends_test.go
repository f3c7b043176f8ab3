package pglock_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// However a tenure ends, a guard whose snapshot is older is refused: also where it has
// a version of the row that a renewal has replaced since, and where the release had to
// wait for the row. In the control it then ends the tenure under the lock that it has
// waited for, and the guard passes beside the next holder's.
func TestGuard_EveryEndOfATenure(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	ends := map[string]string{
		"release":       `SELECT state FROM pglock.release(ARRAY[$1], ARRAY[$2::bigint], '1 min')`,
		"release_one":   `SELECT state FROM pglock.release_one($1, $2, '1 min')`,
		"force_release": `SELECT state FROM pglock.force_release($1, $2, '1 min')`,
	}
	for name, end := range ends {
		for _, level := range levels[1:] {
			for _, waits := range []bool{false, true} {
				for _, awaited := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s/%s/waits %t/awaited %t", name, level, waits, awaited), func(t *testing.T) {
						t.Parallel()
						if err := guardAfter(t, pool, end, level, waits, awaited); sqlState(err) != "40001" {
							t.Errorf("Guard said %v, want a serialization failure", err)
						}
					})
				}
			}
		}
	}
	t.Run("control", func(t *testing.T) {
		t.Parallel()
		pool := pgtest.Pool(t)
		replace(t, pool, "lock_within", `RAISE EXCEPTION USING ERRCODE = 'lock_not_available';`, `RETURN true;`)
		for name, end := range ends {
			if err := guardAfter(t, pool, end, pgx.RepeatableRead, true, true); err != nil {
				t.Errorf("after %s Guard said %v: this test shows nothing", name, err)
			}
		}
	})
}

// guardAfter returns what a guard says in a transaction whose snapshot was taken before
// a renewal, and before the tenure was ended.
func guardAfter(t *testing.T, pool *pgxpool.Pool, end string, level pgx.TxIsoLevel, waits, awaited bool) error {
	t.Helper()
	name := t.Name() + end
	token := one[int64](t, pool, `SELECT token FROM pglock.acquire(ARRAY[$1], '1 h')`, name)
	guarding := newConn(t, pool)
	exec(t, guarding, `BEGIN ISOLATION LEVEL `+string(level))
	one[int64](t, guarding, `SELECT count(*) FROM pglock.leases`) // takes the snapshot
	exec(t, pool, `SELECT pglock.renew(ARRAY[$1], ARRAY[$2::bigint])`, name, token)
	if awaited {
		exec(t, pool, `SELECT pglock.enqueue($1, '1 h', gen_random_uuid(), 'nobody')`, name)
	}
	locker, ending := newConn(t, pool), newConn(t, pool)
	if waits {
		exec(t, locker, `BEGIN`)
		exec(t, locker, `SELECT FROM pglock.leases WHERE name = $1 FOR NO KEY UPDATE`, name)
	}
	done := make(chan string, 1)
	go func() { done <- one[string](t, ending, end, name, token) }()
	if waits {
		blockedBy(t, pool, locker.PgConn().PID())
		exec(t, locker, `COMMIT`)
	}
	if state := <-done; state != "released" {
		t.Errorf("it was %s", state)
	}
	_, err := guarding.Exec(t.Context(), `SELECT pglock.guard($1, $2)`, name, token)
	return err
}

// Likewise where an expired lease is handed on after an enqueue that tried to take it,
// lost to a ticket drawn at that moment, and passed that ticket over, for an open
// transaction has it. In the control it then hands the lease on itself, by another
// subtransaction than it has the row locked by, and the guard passes beside the next
// holder's.
func TestGuard_HandedOnAfterATry(t *testing.T) {
	t.Parallel()
	for name, control := range map[string]bool{"left to refresh": false, "control": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			replace(t, pool, "enqueue", "IF NOT FOUND THEN\n            SELECT a.granted", "IF true THEN\n            SELECT a.granted")
			if control {
				replace(t, pool, "enqueue", "NOT mine AND ", "")
			}
			token := one[int64](t, pool, `SELECT token FROM pglock.acquire('{n}', '1 h')`)
			guarding, locker := newConn(t, pool), newConn(t, pool)
			exec(t, guarding, `BEGIN ISOLATION LEVEL REPEATABLE READ`)
			one[int64](t, guarding, `SELECT count(*) FROM pglock.leases`) // takes the snapshot
			exec(t, pool, `SELECT pglock.enqueue('n', '1 h', gen_random_uuid(), 'nobody')`)
			exec(t, pool, `UPDATE pglock.leases SET expires_at = clock_timestamp()`)
			exec(t, locker, `BEGIN`)
			exec(t, locker, `SELECT FROM pglock.waiters FOR UPDATE`)

			claim := one[string](t, pool, `SELECT gen_random_uuid()::text`)
			granted := one[bool](t, pool, `SELECT granted FROM pglock.enqueue('n', '1 h', $1, 'nobody')`, claim)
			if granted != control {
				t.Fatalf("enqueue granted it: %t", granted)
			}
			if state := one[string](t, pool, `SELECT state FROM pglock.refresh('{n}', ARRAY[$1::uuid])`, claim); state != "granted" {
				t.Fatalf("refresh said %s", state)
			}
			_, err := guarding.Exec(t.Context(), `SELECT pglock.guard('n', $1)`, token)
			if control && err != nil {
				t.Errorf("Guard said %v: this test shows nothing", err)
			} else if !control && sqlState(err) != "40001" {
				t.Errorf("Guard said %v, want a serialization failure", err)
			}
		})
	}
}

// A lease that is always under a guard, by transactions that overlap and are each
// short, is in the way for as long as the operator has patience. The control waits for
// each of them.
func TestForceRelease_GuardsThatOverlap(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		begin   string
		control bool
	}{
		"short":   {`BEGIN; SELECT pglock.guard(name, token) FROM pglock.leases`, false},
		"longer":  {`BEGIN; SELECT pglock.guard(name, token), pg_sleep(0.1) FROM pglock.leases`, false},
		"control": {`BEGIN; SELECT pglock.guard(name, token) FROM pglock.leases`, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			most := limit
			if tt.control {
				replace(t, pool, "lock_within", `still < interval '8 ms' AND NOT first`, `false`)
				replace(t, pool, "lock_within", `least(still, give_up - clock_timestamp())`, `patience`)
				most = 3 * time.Second
			}
			token := one[int64](t, pool, `SELECT token FROM pglock.acquire('{n}', '1 h')`)
			guards := []*pgx.Conn{newConn(t, pool), newConn(t, pool)}
			exec(t, guards[0], tt.begin)
			forcing := newConn(t, pool)
			done := make(chan string, 1)
			go func() {
				done <- one[string](t, forcing, `SELECT state FROM pglock.force_release('n', $1, '1 s')`, token)
			}()
			// Each begins before the one before it ends.
			bounded := false
			for begun, i := time.Now(), 1; !bounded && time.Since(begun) < most; i++ {
				exec(t, guards[i%2], tt.begin)
				exec(t, guards[(i+1)%2], `COMMIT`)
				select {
				case state := <-done:
					bounded = true
					if state != "blocked" {
						t.Errorf("it was %s", state)
					}
				default:
				}
			}
			if bounded == tt.control {
				t.Errorf("patience bounds the wait: %t", bounded)
			}
			for _, conn := range guards {
				exec(t, conn, `ROLLBACK`)
			}
			if !bounded {
				<-done
			}
		})
	}
}

// A guard of a lease that a release has locked, beside one that it waits for: the
// release is not ended by the deadlock, it is blocked.
func TestRelease_NoDeadlock(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	const release = `SELECT string_agg(state, ' ' ORDER BY name) FROM pglock.release('{a,b}', ARRAY(SELECT token FROM pglock.leases ORDER BY name), '1 min')`
	exec(t, pool, `SELECT pglock.acquire('{a,b}', '1 h')`)
	guarding, releasing := newConn(t, pool), newConn(t, pool)
	const guard = `SELECT pglock.guard(name, token) FROM pglock.leases WHERE name = $1`
	exec(t, guarding, `BEGIN`)
	exec(t, guarding, guard, "a")
	done := make(chan string, 1)
	go func() { done <- one[string](t, releasing, release) }() // it has b, and waits for a
	blockedBy(t, pool, guarding.PgConn().PID())
	guarded := make(chan error, 1)
	go func() {
		_, err := guarding.Exec(context.Background(), guard, "b")
		guarded <- err
	}()
	state, err := <-done, <-guarded
	switch sqlState(err) {
	case "PW002":
		if state != "blocked released" {
			t.Errorf("the release was %s", state)
		}
	case "40P01": // the machine was slow, and its second of waiting was over first
		if state != "released released" {
			t.Errorf("beside a guard that gave way the release was %s", state)
		}
	default:
		t.Errorf("the guard of b said %v, want that it was released", err)
	}
}
