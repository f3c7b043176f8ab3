package pglock_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// To free a lease and to hand it to the next in line is one transaction: a
// backend that dies in between leaves the holder its tenure and the waiter its
// ticket, and nothing stuck. The control frees in a transaction of its own.
func TestQueue_R05_KilledBetweenReleaseAndHandOn(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		release []string
		held    bool // after the death
	}{
		{"release", []string{`SELECT pglock.release('{n}', ARRAY[$1::bigint])`}, true},
		{"force_release", []string{`SELECT pglock.force_release('n', $1)`}, true},
		{"control: two transactions", []string{
			`UPDATE pglock.leases SET claim = NULL, role = NULL, expires_at = '-infinity' WHERE token = $1`,
			`DELETE FROM pglock.waiters WHERE $1 > 0`}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			token := one[int64](t, pool, `SELECT token FROM pglock.acquire('{n}', '1 h')`)
			exec(t, pool, `SELECT pglock.enqueue('n', '1 h', gen_random_uuid(), 'nobody listens')`)
			// Whoever takes the ticket out of the queue stops there.
			exec(t, pool, `CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$
					BEGIN PERFORM pg_advisory_xact_lock(1); RETURN OLD; END $$;
				CREATE TRIGGER stop BEFORE DELETE ON pglock.waiters FOR EACH ROW EXECUTE FUNCTION stop()`)
			gate := newConn(t, pool)
			exec(t, gate, `SELECT pg_advisory_lock(1)`)
			conn := newConn(t, pool)
			done := make(chan error, 1)
			go func() {
				var err error
				for _, sql := range tt.release {
					if err == nil {
						_, err = conn.Exec(context.Background(), sql, token)
					}
				}
				done <- err
			}()
			blockedBy(t, pool, gate.PgConn().PID())
			end(t, pool, conn)
			if err := <-done; err == nil {
				t.Fatal("it was not ended")
			}
			if held := one[bool](t, pool, `SELECT EXISTS (SELECT FROM pglock.list_leases('n') WHERE token = $1)`, token); held != tt.held {
				t.Errorf("the lease is held: %t, want %t", held, tt.held)
			}
			if n := waitersOf(t, pool); n != 1 {
				t.Errorf("%d wait, want 1", n)
			}
			exec(t, gate, `SELECT pg_advisory_unlock(1)`)
			if !tt.held {
				return
			}
			if state := one[string](t, pool, `SELECT state FROM pglock.release('{n}', ARRAY[$1::bigint])`, token); state != "released" || waitersOf(t, pool) != 0 {
				t.Errorf("once more: %s, and %d wait", state, waitersOf(t, pool))
			}
		})
	}
}

func waitersOf(t testing.TB, pool *pgxpool.Pool) int64 {
	t.Helper()
	return one[int64](t, pool, `SELECT count(*) FROM pglock.list_waiters()`)
}
