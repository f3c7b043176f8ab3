package pglock_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// Each of ten thousand resources remembers its own token, and to ask one takes
// no longer than with a hundred. The control has lost the index.
func TestFence_F1_TenThousandResources(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	conn := newConn(t, pool)
	fill := func(from, to int) {
		for ; from <= to; from += 500 {
			exec(t, conn, `SELECT pglock.fence('resource/' || n, n) FROM generate_series($1::int, $2::int) n`, from, min(from+499, to))
			// What autovacuum does by and by: plans made for a small table go.
			exec(t, conn, `ANALYZE pglock.fences`)
		}
	}
	// What a fence takes, for an equal token, in the server: the fastest of many,
	// since the machine may be busy with something else.
	fastest := func(last int) time.Duration {
		best := time.Hour
		for n := range 300 {
			start := time.Now()
			exec(t, conn, `SELECT pglock.fence('resource/' || $1::int, $1::int)`, last-n%100)
			best = min(best, time.Since(start))
		}
		return best
	}
	fill(1, 100)
	few := fastest(100)
	total := scale(10_000, 2_000)
	fill(101, total)
	many := fastest(total)
	t.Logf("beside 100 resources %v, beside %d %v", few, total, many)
	const most = 5 // times as long
	if many > most*few+time.Millisecond {
		t.Errorf("it takes %v beside %d resources, and took %v beside 100", many, total, few)
	}
	if wrong := one[int](t, pool, `SELECT count(*) FROM pglock.list_fences() WHERE resource <> 'resource/' || token`); wrong != 0 {
		t.Errorf("%d resources remember another's token", wrong)
	}
	for _, n := range []int{1, 2, 100, 101, total / 2, total} {
		resource, token := one[string](t, pool, `SELECT 'resource/' || $1::int`, n), pglock.Token(n)
		if token > 1 {
			inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
				fenced(t, pglock.Fence(t.Context(), tx, resource, token-1), resource, token-1, token)
			})
		}
		accept(t, pool, resource, token)
	}
	if found := one[int](t, pool, `SELECT count(*) FROM pglock.list_fences()`); found != total {
		t.Errorf("%d resources are remembered, want %d", found, total)
	}
	if testing.Short() {
		return
	}
	exec(t, conn, `ALTER TABLE pglock.fences DROP CONSTRAINT fences_pkey`)
	if slow := fastest(total); slow <= most*min(few, many) {
		t.Errorf("without its index it takes %v: this test shows nothing", slow)
	}
}

// A row that is deleted is forgotten: the next token is the first again, and
// whoever was in the midst of a fence is judged by what is then there.
func TestFence_F1_DeletedRow(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for _, level := range levels {
		resource := string(level)
		accept(t, pool, resource, 9)
		refused := func() error {
			var err error
			inTx(t, pool, level, func(tx pgx.Tx) { err = pglock.Fence(t.Context(), tx, resource, 3) })
			return err
		}
		fenced(t, refused(), resource, 3, 9)
		exec(t, pool, `DELETE FROM pglock.fences WHERE resource = $1`, resource)
		if err := refused(); err != nil {
			t.Errorf("%s, after the row was deleted: %v", level, err)
		}
		// Deleted while another waits for it.
		accept(t, pool, resource, 9)
		admin, writer := newConn(t, pool), newConn(t, pool)
		exec(t, admin, `BEGIN; SELECT pglock.reset_fence('`+resource+`')`)
		done := make(chan error, 1)
		go func() {
			done <- pgx.BeginTxFunc(t.Context(), writer, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
				return pglock.Fence(t.Context(), tx, resource, 3)
			})
		}()
		blockedBy(t, pool, admin.PgConn().PID())
		exec(t, admin, `COMMIT`)
		state := "40001"
		if level == pgx.ReadCommitted {
			state = ""
		}
		if err := <-done; sqlState(err) != state || (err == nil) != (state == "") {
			t.Errorf("%s, deleted while it waited: %v, want SQLSTATE %q", level, err, state)
		}
		if now := highest(t, pool, resource); (now == 3) != (state == "") {
			t.Errorf("%s, deleted while it waited: it remembers %d", level, now)
		}
	}
}

// The service that the tokens come from has begun again lower, say an etcd that
// was restored: every holder is refused, the rightful one too, until an
// administrator sets each resource back to a token of the new count. From then
// on the stale ones of the new count are refused, and those of the old pass.
func TestFence_F4_TheSourceBeginsAgain(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	fence := func(resource string, token pglock.Token) error {
		return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return pglock.Fence(t.Context(), tx, resource, token) })
	}
	resources := []string{"accounts/1", "accounts/2"}
	for _, resource := range append(slices.Clone(resources), "other") {
		accept(t, pool, resource, 41_007)
	}
	for token := range pglock.Token(3) { // each is a new holder's
		for _, resource := range resources {
			fenced(t, fence(resource, token+1), resource, token+1, 41_007)
		}
	}
	// What tells it from a stale writer: the highest is one that the source
	// never gave since, and nobody's higher token is accepted either.
	if set := one[int](t, pool, `SELECT count(pglock.reset_fence(resource, 3)) FROM pglock.list_fences() WHERE resource LIKE 'accounts/%'`); set != 2 {
		t.Errorf("%d resources were set back", set)
	}
	for _, resource := range resources {
		fenced(t, fence(resource, 2), resource, 2, 3)
		if err := errors.Join(fence(resource, 3), fence(resource, 4)); err != nil {
			t.Error(err)
		}
	}
	fenced(t, fence("other", 4), "other", 4, 41_007)
}

// Where the tokens are those of the lease of the resource's name the two are
// told apart: the holder whose token is refused is no stale writer.
func TestFence_TokenRegression(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	for _, level := range levels {
		name := string(level)
		accept(t, pool, name, 41_007)
		l := acquire(t, c, name, time.Hour)
		fence := func() (err error) {
			inTx(t, pool, level, func(tx pgx.Tx) { err = pglock.Fence(t.Context(), tx, name, l.Token()) })
			return err
		}
		if err := fence(); sqlState(err) != "PW003" || errors.Is(err, pglock.ErrFenced) || !strings.Contains(err.Error(), "token regression") {
			t.Errorf("%s, held: %v, want token regression", level, err)
		}
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		fenced(t, fence(), name, l.Token(), 41_007)
		l = acquire(t, c, name, time.Hour)
		one[int64](t, pool, `SELECT pglock.reset_fence($1, $2)`, name, int64(l.Token()))
		if err := fence(); err != nil {
			t.Errorf("%s, set back: %v", level, err)
		}
	}
}

// A backend that dies between the fence and the write leaves neither: the two
// are one transaction, and the resource is free at once. The control accepts in
// a transaction of its own.
func TestFence_R05_KilledBetweenFenceAndWrite(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE written (token bigint)`)
	for _, tt := range []struct {
		name string
		then pglock.Token // what is remembered
		own  bool
	}{{"one transaction", 5, false}, {"control: two", 9, true}} {
		accept(t, pool, tt.name, 5)
		conn := newConn(t, pool)
		exec(t, conn, `BEGIN`)
		exec(t, conn, `SELECT pglock.fence($1, 9)`, tt.name)
		if tt.own {
			exec(t, conn, `COMMIT; BEGIN`)
		}
		exec(t, conn, `INSERT INTO written VALUES (9)`)
		end(t, pool, conn)
		if now := highest(t, pool, tt.name); now != tt.then {
			t.Errorf("%s: it remembers %d, want %d", tt.name, now, tt.then)
		}
		accept(t, pool, tt.name, tt.then)
	}
	if n := one[int](t, pool, `SELECT count(*) FROM written`); n != 0 {
		t.Errorf("%d writes are in", n)
	}
}

// end ends a connection's backend and waits until it is gone.
func end(t testing.TB, pool *pgxpool.Pool, conn *pgx.Conn) {
	t.Helper()
	pid := int32(conn.PgConn().PID())
	exec(t, pool, `SELECT pg_terminate_backend($1)`, pid)
	until(t, pool, "the backend end", `SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)`, pid)
}
