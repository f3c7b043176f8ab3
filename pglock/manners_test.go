package pglock_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// The schema takes and frees leases one by one, several at a time, and both in
// one exchange, each by statements of its own. What happens to the lease n must
// not depend on that. Of the other name, m, nothing is asked.
var (
	takings = map[string]string{
		"acquire one":     `SELECT CASE WHEN granted THEN 'granted' ELSE 'refused' END, token FROM pglock.acquire_one('n', '1 h', $1, NULL, NULL)`,
		"acquire several": `SELECT CASE WHEN granted THEN 'granted' ELSE 'refused' END, token FROM pglock.acquire('{m,n}', '1 h', $1) WHERE name = 'n'`,
		"exchange":        `SELECT state, token FROM pglock.exchange('{}', '{}', '{m,n}', '{1 h,2 h}', '{NULL,NULL}', $1) WHERE name = 'n'`,
		"exchange alike":  `SELECT state, token FROM pglock.exchange('{}', '{}', '{m,n}', '{1 h}', '{NULL}', $1) WHERE name = 'n'`,
	}
	freeings = map[string]string{
		"release one":     `SELECT state FROM pglock.release_one('n', $1::bigint, '0')`,
		"release guessed": `SELECT state FROM pglock.release_one('n', $1::bigint, '0', true)`,
		"release several": `SELECT state FROM pglock.release('{m,n}', ARRAY[-1, $1::bigint], '0') WHERE name = 'n'`,
		"exchange":        `SELECT coalesce((SELECT state FROM pglock.exchange('{m,n}', ARRAY[-1, $1::bigint], '{}', '{}', '{}') WHERE name = 'n'), 'released')`,
	}
)

const (
	// usesM has m be a name used before, as n is in most cases.
	usesM = `SELECT pglock.acquire('{m}', '1 h'); SELECT pglock.release('{m}', (SELECT array_agg(token) FROM pglock.leases WHERE name = 'm'))`

	holds  = `SELECT pglock.acquire('{n}', '1 h', '00000000-0000-0000-0000-000000000001')`
	waits  = `SELECT pglock.enqueue('n', '1 h', '00000000-0000-0000-0000-000000000002', 'nobody listens')`
	runOut = `UPDATE pglock.leases SET expires_at = clock_timestamp() WHERE name = 'n'`
	frees  = `SELECT pglock.release('{n}', (SELECT array_agg(token) FROM pglock.leases WHERE name = 'n'))`
	guards = `SELECT pglock.guard('n', (SELECT token FROM pglock.leases WHERE name = 'n'))`

	// onAnotherTimeline is what the tables say after a promotion, until it is seen.
	onAnotherTimeline = `UPDATE pglock.epoch SET timeline = 'FFFFFFFF'; UPDATE pglock.leases SET timeline = 'FFFFFFFF'`
)

// holderOf returns the end of the claim that has n, and - if nobody has.
func holderOf(t testing.TB, pool *pgxpool.Pool) string {
	t.Helper()
	return one[string](t, pool, `SELECT coalesce((SELECT right(claim::text, 1) FROM pglock.leases WHERE name = 'n' AND expires_at > clock_timestamp()), '-')`)
}

// staged returns a database in which that was done, and where open isn't empty is
// being done by a transaction that stays open.
func staged(t *testing.T, before []string, open string) *pgxpool.Pool {
	t.Helper()
	pool := pgtest.Pool(t)
	exec(t, pool, usesM)
	for _, sql := range before {
		exec(t, pool, sql)
	}
	if open != "" {
		exec(t, begin(t, pool), open)
	}
	return pool
}

// movedAhead fails where a case on another timeline did not move the tokens ahead.
func movedAhead(t testing.TB, pool *pgxpool.Pool, name string) {
	t.Helper()
	if last := one[int64](t, pool, `SELECT max(token) FROM pglock.leases WHERE name = 'n'`); strings.Contains(name, "on another timeline") && last < 1<<40 {
		t.Errorf("%s token %d was granted", name, last)
	}
}

func TestLease_EveryTaking(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		before []string
		open   string // in a transaction that stays open
		want   string // the answer or the error's code, and whose it is then
	}{
		{"never used", nil, "", "granted 3"},
		{"free", []string{holds, frees}, "", "granted 3"},
		{"expired", []string{holds, runOut}, "", "granted 3"},
		{"held", []string{holds}, "", "refused 1"},
		{"held, and waited for", []string{holds, waits}, "", "refused 1"},
		{"expired, and waited for", []string{holds, waits, runOut}, "", "refused 2"},
		{"expired, and guarded", []string{holds}, guards, "refused -"},
		{"a repeat", []string{strings.ReplaceAll(holds, "0001", "0003")}, "", "granted 3"},
		{"a repeat that has expired", []string{strings.ReplaceAll(holds, "0001", "0003"), runOut}, "", "granted 3"},
		{"the claim, by another role", []string{strings.ReplaceAll(holds, "0001", "0003"), `UPDATE pglock.leases SET role = 'another'`}, "", "refused 3"},
		{"on another timeline", []string{holds, frees, onAnotherTimeline}, "", "granted 3"},
		{"the sequence set back", []string{holds, frees, `UPDATE pglock.leases SET token = 100`}, "", "PW003 -"},
	} {
		for manner, sql := range takings {
			t.Run(tt.name+"/"+manner, func(t *testing.T) {
				t.Parallel()
				pool := staged(t, tt.before, tt.open)
				if tt.open != "" {
					exec(t, pool, runOut)
				}
				before := one[int64](t, pool, `SELECT coalesce(max(token), 0) FROM pglock.leases WHERE name = 'n'`)
				var state string
				var token *int64
				err := pool.QueryRow(context.Background(), sql, "00000000-0000-0000-0000-000000000003").Scan(&state, &token)
				if err != nil {
					state = sqlState(err)
				}
				if got := state + " " + holderOf(t, pool); got != tt.want {
					t.Errorf("%s (%v), want %s", got, err, tt.want)
				}
				repeat := tt.name == "a repeat"
				if state == "granted" && (token == nil || *token < before || (*token == before) != repeat) {
					t.Errorf("token %v was granted after %d", token, before)
				}
				movedAhead(t, pool, tt.name)
			})
		}
	}
}

// A grant is on disk when it is answered, whatever the session's setting; also
// one to the head of the queue.
func TestLease_EveryGrantIsDurable(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	tx := newConn(t, pool)
	durable := func(manner, sql string, arg any) {
		exec(t, tx, `BEGIN; SET LOCAL synchronous_commit = off`)
		exec(t, tx, sql, arg)
		if got := one[string](t, tx, `SHOW synchronous_commit`); got != "local" {
			t.Errorf("%s: synchronous_commit is %s when it commits", manner, got)
		}
		exec(t, tx, `ROLLBACK`)
	}
	exec(t, pool, usesM+`; `+holds+`; `+frees)
	for manner, sql := range takings {
		durable(manner, sql, "00000000-0000-0000-0000-000000000003")
	}
	exec(t, pool, holds+`; `+waits)
	for manner, sql := range freeings {
		durable(manner+", handing on", sql, one[int64](t, pool, `SELECT token FROM pglock.leases WHERE name = 'n'`))
	}
}

func TestLease_EveryFreeing(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		before []string
		open   string
		other  int64  // than the token
		want   string // the answer, and whose it is then
	}{
		{"held", []string{holds}, "", 0, "released -"},
		{"waited for", []string{holds, waits}, "", 0, "released 2"},
		{"waited for by one who is dead", []string{holds, waits, `UPDATE pglock.waiters SET expires_at = '-infinity'`}, "", 0, "released -"},
		{"waited for by one who is dead, and another", []string{holds, waits, `UPDATE pglock.waiters SET expires_at = '-infinity'`, strings.ReplaceAll(waits, "0002", "0004")}, "", 0, "released 4"},
		{"waited for by two", []string{holds, waits, strings.ReplaceAll(waits, "0002", "0004")}, "", 0, "released 2"},
		{"waited for by two, the row made anew", []string{holds, waits, strings.ReplaceAll(waits, "0002", "0004"), `DELETE FROM pglock.leases WHERE name = 'n'`, strings.ReplaceAll(holds, "0001", "0005")}, "", 0, "released 4"},
		{"waited for, on another timeline", []string{holds, waits, onAnotherTimeline}, "", 0, "released 2"},
		{"waited for, the sequence set back", []string{holds, waits, `UPDATE pglock.leases SET token = 100`}, "", 0, "PW003 1"},
		{"free", []string{holds, frees}, "", 0, "idle -"},
		{"expired", []string{holds, runOut}, "", 0, "expired -"},
		{"expired, and waited for", []string{holds, waits, runOut}, "", 0, "expired -"},
		{"another tenure", []string{holds}, "", 1, "taken 1"},
		{"another role's", []string{holds, `UPDATE pglock.leases SET role = 'another'`}, "", 0, "taken 1"},
		{"guarded", []string{holds}, guards, 0, "blocked 1"},
		{"guarded, and waited for", []string{holds, waits}, guards, 0, "blocked 1"},
	} {
		for manner, sql := range freeings {
			t.Run(tt.name+"/"+manner, func(t *testing.T) {
				t.Parallel()
				pool := staged(t, tt.before, tt.open)
				token := one[int64](t, pool, `SELECT token FROM pglock.leases WHERE name = 'n'`) + tt.other
				var state string
				err := pool.QueryRow(context.Background(), sql, token).Scan(&state)
				if err != nil {
					state = sqlState(err)
				}
				if got := state + " " + holderOf(t, pool); got != tt.want {
					t.Errorf("%s (%v), want %s", got, err, tt.want)
				}
				movedAhead(t, pool, tt.name)
			})
		}
	}
}

// An exchange answers a row for each name wanted, with the TTL and the metadata that
// stand beside it or that are one for all, and a row for each token that it did not
// simply release.
func TestLease_ExchangeAnswers(t *testing.T) {
	t.Parallel()
	const (
		held    = `SELECT pglock.acquire('{a,b,x,y}', '1 h')`
		ended   = `'{x,y}', (SELECT array_agg(CASE name WHEN 'x' THEN token ELSE -token END ORDER BY name) FROM pglock.leases WHERE name IN ('x', 'y'))`
		answers = `SELECT string_agg(name || ' ' || state, ', ' ORDER BY name, state) FROM pglock.exchange(`
	)
	for name, tt := range map[string]struct{ wanted, answers, stored string }{
		"each its own": {`'{a,b,c,y}', '{1 h,2 h,3 h,4 h}', '{null,"{\"is\":\"b\"}","{\"is\":\"c\"}",null}'`,
			"a granted, b granted, c granted, y refused, y taken", `a 01:00:00 -, b 02:00:00 {"is": "b"}, c 03:00:00 {"is": "c"}`},
		"one for all": {`'{a,b,c,y}', '{2 h}', '{"{\"is\":\"any\"}"}'`,
			"a granted, b granted, c granted, y refused, y taken", `a 02:00:00 {"is": "any"}, b 02:00:00 {"is": "any"}, c 02:00:00 {"is": "any"}`},
		"none": {`'{}', '{}', '{}'`, "y taken", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			exec(t, pool, held)
			exec(t, pool, `SELECT pglock.release(array_agg(name), array_agg(token)) FROM pglock.leases WHERE name IN ('a', 'b')`)
			if got := one[string](t, pool, answers+ended+`, `+tt.wanted+`)`); got != tt.answers {
				t.Errorf("it answers %s, want %s", got, tt.answers)
			}
			stored := one[string](t, pool, `SELECT coalesce(string_agg(concat_ws(' ', name, ttl, coalesce(metadata::text, '-')), ', ' ORDER BY name), '')
				FROM pglock.leases WHERE claim IS NOT NULL AND name <> 'y'`)
			if stored != tt.stored {
				t.Errorf("it stores %s, want %s", stored, tt.stored)
			}
		})
	}
	pool := pgtest.Pool(t)
	exec(t, pool, held)
	if got := one[string](t, pool, answers+`'{x,y}', ARRAY[(SELECT token FROM pglock.leases WHERE name = 'x'), NULL], '{}', '{}', '{}')`); got != "y taken" {
		t.Errorf("of a token and a NULL it answers %s, want y taken", got)
	}
	for wanted, says := range map[string]string{
		`NULL, '{1 h}', '{null}'`:              "<NULL> names beside 1 TTLs and 1 metadata",
		`'{}', '{1 h}', '{null}'`:              "0 names beside 1 TTLs and 1 metadata",
		`'{a,b}', '{1 h,2 h}', '{null}'`:       "2 names beside 2 TTLs and 1 metadata",
		`'{a,b}', '{1 h}', '{null,null}'`:      "2 names beside 1 TTLs and 2 metadata",
		`'{a,b}', '{48 h}', '{null}'`:          "TTL 48:00:00 is out of range",
		`'{a,b}', '{1 h,48 h}', '{null,null}'`: "TTL 48:00:00 is out of range",
		`'{a,b}', '{1 h}', '[0:0]={null}'`:     "2 names beside 1 TTLs and 1 metadata",
		`'[0:1]={a,b}', '{1 h,1 h}', '{1,2}'`:  "2 names beside 2 TTLs and 2 metadata",
		`'[0:0]={a}', '{1 h}', '[0:0]={1}'`:    "1 names beside 1 TTLs and 1 metadata",
		`'{a,a}', '{1 h}', '{null}'`:           "a lease name stands twice or is NULL in {a,a}",
	} {
		if _, err := pool.Exec(t.Context(), `SELECT pglock.exchange('{}', '{}', `+wanted+`)`); sqlState(err) != "22023" || !strings.Contains(err.Error(), says) {
			t.Errorf("with %s: %v, want %s", wanted, err, says)
		}
	}
}
