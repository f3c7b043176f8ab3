package pglock_test

import (
	"context"
	"strings"
	"testing"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// TestLease_L7_BetweenSnapshotAndLock stops a call when it has chosen the lease's
// row by its snapshot and before it has locked it, and lets something else happen to
// the row. The call must not take what it chose for what it locks: a ticket drawn
// meanwhile is not left waiting for a free lease, nor overtaken, a renewed lease is
// freed all the same, and one that is taken is refused.
func TestLease_L7_BetweenSnapshotAndLock(t *testing.T) {
	t.Parallel()
	const (
		token = `(SELECT token FROM pglock.leases WHERE name = 'n')`
		claim = `'00000000-0000-0000-0000-000000000003'`

		quick = `NOT f.awaited`
		slow  = `l.claim IS NOT NULL`

		renews = `SELECT pglock.renew('{n}', ARRAY[` + token + `])`
		takes  = `SELECT pglock.acquire('{n}', '1 h', '00000000-0000-0000-0000-000000000004')`
		queues = `UPDATE pglock.leases SET expires_at = clock_timestamp() + interval '1 h'; ` + waits + `; ` + runOut
	)
	state := func(sql, of string) string {
		return `SELECT state FROM (` + strings.ReplaceAll(sql, `$1`, of) + `) AS s (state)`
	}
	release, guessed, ended := state(freeings["release one"], token), state(freeings["release guessed"], token), state(freeings["exchange"], token)
	acquire, wanted := state(takings["acquire one"], claim), state(takings["exchange alike"], claim)
	// What makes the controls fail: an enqueue that doesn't mark the lease, and a release
	// that doesn't look again.
	unmarked := []string{"enqueue", `IF NOT lease.awaited THEN`, `IF false THEN`}
	unseen := []string{"vacate", `AND NOT EXISTS (SELECT FROM pglock.waiters w WHERE w.name = l.name)`, ``}
	for _, tt := range []struct {
		name      string
		before    []string
		function  string
		at        string // the function stops where it looks at this
		call      string
		meanwhile string
		without   []string // a function, and what is replaced in it
		want      string   // the answer, and whose the lease is then
	}{
		{"release, and a ticket", []string{holds}, "release_one", quick, release, waits, nil, "released 2"},
		{"release, and an unmarked ticket", []string{holds}, "release_one", quick, release, waits, unmarked, "released -"},
		{"release by a guess, and a ticket", []string{holds}, "release_one", slow, guessed, waits, nil, "released 2"},
		{"release by a guess, and an unseen ticket", []string{holds}, "release_one", slow, guessed, waits, unseen, "released -"},
		{"release, and a renewal", []string{holds}, "release_one", quick, release, renews, nil, "released -"},
		{"release, and expiry", []string{holds}, "release_one", quick, release, runOut, nil, "expired -"},
		{"ended, and a ticket", []string{holds}, "exchange", quick, ended, waits, nil, "released 2"},
		{"ended, and an unmarked ticket", []string{holds}, "exchange", quick, ended, waits, unmarked, "released -"},
		{"ended, and a renewal", []string{holds}, "exchange", quick, ended, renews, nil, "released -"},
		{"acquire, and a taker", []string{holds, frees}, "acquire_one", quick, acquire, takes, nil, "refused 4"},
		{"acquire, and a ticket", []string{holds, runOut}, "acquire_one", quick, acquire, queues, nil, "refused 2"},
		{"wanted, and a taker", []string{holds, frees}, "exchange", quick, wanted, takes, nil, "refused 4"},
		{"wanted, and its own first attempt", []string{holds, frees}, "exchange", quick, wanted, strings.Replace(takes, "0004", "0003", 1), nil, "granted 3"},
		{"wanted, and a ticket", []string{holds, runOut}, "exchange", quick, wanted, queues, nil, "refused 2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			for _, sql := range tt.before {
				exec(t, pool, sql)
			}
			gate := newConn(t, pool)
			exec(t, gate, `CREATE FUNCTION gate() RETURNS boolean LANGUAGE plpgsql AS 'BEGIN PERFORM pg_advisory_lock_shared(1); RETURN true; END'`)
			replace(t, pool, tt.function, tt.at, tt.at+` AND public.gate()`)
			if tt.without != nil {
				replace(t, pool, tt.without[0], tt.without[1], tt.without[2])
			}
			exec(t, gate, `SELECT pg_advisory_lock(1)`)
			answer := make(chan string, 1)
			conn := newConn(t, pool)
			go func() {
				var state string
				if err := conn.QueryRow(context.Background(), tt.call).Scan(&state); err != nil {
					state = err.Error()
				}
				answer <- state
			}()
			blockedBy(t, pool, gate.PgConn().PID())
			exec(t, pool, tt.meanwhile)
			exec(t, gate, `SELECT pg_advisory_unlock(1)`)
			if got := <-answer + " " + holderOf(t, pool); got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
		})
	}
}
