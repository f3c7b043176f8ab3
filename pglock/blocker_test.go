package pglock_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgserver"
	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// refusal returns the *BlockedError of a LockRows that is refused.
func refusal(t *testing.T, tx pgx.Tx, how pglock.RowLock, sql string, args ...any) *pglock.BlockedError {
	t.Helper()
	_, err := pglock.LockRows(t.Context(), tx, how, pgx.RowTo[int], sql, args...)
	blocked, ok := errors.AsType[*pglock.BlockedError](err)
	if !ok || !errors.Is(err, pglock.ErrLocked) {
		t.Fatalf("%s %v: %v, want a *BlockedError", sql, how, err)
	}
	return blocked
}

// A refused NoWait names who is in the way and since when, and nobody else.
func TestLockRows_NamesTheBlockers(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 6)
	exec(t, pool, `CREATE VIEW seen AS SELECT * FROM accounts`)
	const all = `SELECT id FROM accounts WHERE id < 5 ORDER BY 1 -- with a comment`
	a, b, c, asks := begin(t, pool), begin(t, pool), begin(t, pool), begin(t, pool)
	names := map[int32]string{pid(a): "a", pid(b): "b", pid(c): "c"}
	for _, tt := range []struct {
		what string
		do   func()
		how  pglock.RowLock
		sql  string
		want string
	}{
		{"one holder of one row", func() { lockAccount(t, a, pglock.ForUpdate, 2) }, pglock.ForNoKeyUpdate, all, "a"},
		{"a holder of another row", func() { lockAccount(t, a, pglock.ForUpdate, 2); lockAccount(t, b, pglock.ForUpdate, 5) }, pglock.ForUpdate, all, "a"},
		{"holders of two rows", func() { lockAccount(t, a, pglock.ForUpdate, 2); lockAccount(t, b, pglock.ForUpdate, 3) }, pglock.ForUpdate, all, "a b"},
		{"a lock that ours can stand beside", func() { lockAccount(t, a, pglock.ForKeyShare, 1); lockAccount(t, b, pglock.ForNoKeyUpdate, 2) }, pglock.ForNoKeyUpdate, all, "b"},
		{"several holders of one row", func() {
			lockAccount(t, a, pglock.ForShare, 1)
			lockAccount(t, b, pglock.ForShare, 1)
			lockAccount(t, c, pglock.ForKeyShare, 1)
		}, pglock.ForNoKeyUpdate, all, "a b"},
		{"the same, all in the way", func() {
			lockAccount(t, a, pglock.ForShare, 1)
			lockAccount(t, b, pglock.ForShare, 1)
			lockAccount(t, c, pglock.ForKeyShare, 1)
		}, pglock.ForUpdate, all, "a b c"},
		{"one of several has ended", func() {
			lockAccount(t, a, pglock.ForShare, 1)
			lockAccount(t, b, pglock.ForShare, 1)
			exec(t, b, `ROLLBACK; BEGIN`)
		}, pglock.ForUpdate, all, "a"},
		{"in a savepoint of the holder's", func() { lockAccount(t, a, pglock.ForUpdate.NoWait(), 1) }, pglock.ForShare, all, "a"},
		{"the same, which can be of another", func() { lockAccount(t, a, pglock.ForUpdate.NoWait(), 1); lockAccount(t, b, pglock.ForUpdate, 5) }, pglock.ForShare, all, ""},
		{"the same, and others that only read", func() {
			lockAccount(t, a, pglock.ForUpdate.NoWait(), 1)
			exec(t, b, `SELECT pg_current_xact_id() FROM accounts`)
		}, pglock.ForShare, all, "a"},
		{"an open UPDATE", func() { exec(t, a, `UPDATE accounts SET balance = 0 WHERE id = 1`) }, pglock.ForShare, all, "a"},
		{"an open DELETE", func() { exec(t, a, `DELETE FROM accounts WHERE id = 1`) }, pglock.ForKeyShare, all, "a"},
		{"a child's open INSERT", func() { exec(t, a, `INSERT INTO transfers VALUES (1)`) }, pglock.ForUpdate, all, "a"},
		{"a LIMIT", func() { lockAccount(t, a, pglock.ForUpdate, 1); lockAccount(t, b, pglock.ForUpdate, 2) }, pglock.ForUpdate, all[:len(all)-len("-- with a comment")] + "LIMIT 1", "a"},
		{"a WITH query", func() { lockAccount(t, a, pglock.ForUpdate, 1) }, pglock.ForUpdate, `WITH x AS (SELECT 1 AS n) SELECT a.id FROM accounts AS a WHERE id IN (SELECT n FROM x) ORDER BY a.id`, "a"},
		{"rows that the caller has locked itself", func() { lockAccount(t, asks, pglock.ForUpdate, 1); lockAccount(t, a, pglock.ForUpdate, 2) }, pglock.ForUpdate, all, "a"},
		{"a join: can't be told", func() { lockAccount(t, a, pglock.ForUpdate, 1) }, pglock.ForUpdate, `SELECT a.id FROM accounts a JOIN accounts b USING (id) ORDER BY 1`, ""},
		{"a view: can't be told", func() { lockAccount(t, a, pglock.ForUpdate, 1) }, pglock.ForUpdate, `SELECT id FROM seen ORDER BY 1`, ""},
	} {
		tt.do()
		blocked := refusal(t, asks, tt.how.NoWait(), tt.sql)
		var got []string
		for _, pid := range blocked.Pids {
			got = append(got, names[pid])
		}
		slices.Sort(got)
		if diff := cmp.Diff(tt.want, strings.Join(got, " ")); diff != "" {
			t.Errorf("%s: %s", tt.what, diff)
		}
		if tt.want == "a" {
			since := one[time.Time](t, pool, `SELECT xact_start FROM pg_stat_activity WHERE pid = $1`, pid(a))
			if !blocked.Since.Equal(since) || !strings.Contains(blocked.Error(), "by backend [") {
				t.Errorf("%s: %v, want one since %v", tt.what, blocked, since)
			}
		}
		usable(t, asks)
		if _, err := asks.Exec(t.Context(), `RELEASE SAVEPOINT pglock`); sqlState(err) != "3B001" {
			t.Errorf("%s: it leaves its savepoint: %v", tt.what, err)
		}
		for _, tx := range []pgx.Tx{a, b, c, asks} {
			exec(t, tx, `ROLLBACK; BEGIN`)
		}
	}
}

// The question takes the arguments that the query takes.
func TestLockRows_NamesTheBlockersByArguments(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 1)
	holder, asks := begin(t, pool), begin(t, pool)
	lockAccount(t, holder, pglock.ForUpdate, 1)
	for where, args := range map[string][]any{
		"id = $1":   {1},
		"id = @id":  {pgx.NamedArgs{"id": 1}},
		"id = ($1)": {pgx.QueryExecModeSimpleProtocol, 1},
		"$1 = id":   {pgx.QueryExecModeExec, pgx.QueryResultFormats{pgx.TextFormatCode}, 1},
	} {
		blocked := refusal(t, asks, pglock.ForUpdate.NoWait(), `SELECT id FROM accounts WHERE `+where+` ORDER BY id`, args...)
		if diff := cmp.Diff([]int32{pid(holder)}, blocked.Pids); diff != "" {
			t.Errorf("%s: %s", where, diff)
		}
	}
}

// NoWait waits for a lock on the table, and so does who asks then, briefly: the
// transaction and its own timeout stay as they were.
func TestLockRows_NoWaitBesideATableLock(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 1)
	holder, tx := begin(t, pool), begin(t, pool)
	exec(t, holder, `LOCK TABLE accounts`)
	if err := pglock.SetLockTimeout(t.Context(), tx, 20*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if blocked := refusal(t, tx, pglock.ForUpdate.NoWait(), `SELECT id FROM accounts ORDER BY id`); len(blocked.Pids) != 0 {
		t.Errorf("blocked by %v", blocked.Pids)
	}
	if got := one[string](t, tx, `SHOW lock_timeout`); got != "20ms" {
		t.Errorf("its lock_timeout is %s", got)
	}
}

// A prepared transaction has no backend; it counts as 0, as with
// pg_blocking_pids.
func TestLockRows_NamesAPreparedTransaction(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 1)
	if one[string](t, pool, `SHOW max_prepared_transactions`) == "0" {
		pool = accountsOn(t, pgtest.PoolOn(t, pgtest.Server(t, pgserver.With("max_prepared_transactions", "1")).DSN()), 1)
	}
	conn := newConn(t, pool)
	exec(t, conn, `BEGIN`)
	exec(t, conn, `SELECT FROM accounts FOR UPDATE`)
	exec(t, conn, `PREPARE TRANSACTION 'abandoned'`)
	t.Cleanup(func() { _, _ = pool.Exec(context.Background(), `ROLLBACK PREPARED 'abandoned'`) })
	if diff := cmp.Diff([]int32{0}, refusal(t, begin(t, pool), pglock.ForShare.NoWait(), `SELECT id FROM accounts ORDER BY id`).Pids); diff != "" {
		t.Error(diff)
	}
}

// To know the blockers costs nothing where there are none.
func TestLockRow_Statements(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool, spy := spied(t, dsn)
	exec(t, pool, `CREATE TABLE accounts AS SELECT 1 AS id, 100 AS balance`)
	holder := begin(t, pgtest.PoolOn(t, dsn))
	ask := func(how pglock.RowLock, blocked bool, want ...string) {
		t.Helper()
		tx := begin(t, pool)
		_, before := spy.used()
		if _, err := pglock.LockRow(t.Context(), tx, how, pgx.RowTo[int], oneAccount, 1); errors.Is(err, pglock.ErrLocked) != blocked {
			t.Errorf("%v: %v", how, err)
		}
		var got []string
		for _, st := range spy.heard("")[before:] {
			got = append(got, strings.ToUpper(strings.Fields(st.sql)[0]))
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%v: %s", how, diff)
		}
		_ = tx.Rollback(t.Context())
	}
	ask(pglock.ForUpdate, false, "SELECT")
	ask(pglock.ForUpdate.SkipLocked(), false, "SELECT")
	ask(pglock.ForUpdate.NoWait(), false, "SAVEPOINT", "SELECT", "RELEASE")
	lockAccount(t, holder, pglock.ForUpdate, 1)
	ask(pglock.ForUpdate.NoWait(), true, "SAVEPOINT", "SELECT", "ROLLBACK", "WITH", "ROLLBACK")
}

// A context that ends while a query is slow, or waits, says that it was given
// up and not that the row is locked, which nobody knows. So with a pool that
// cancels by request, and whose connections then go on.
func TestLockRow_GivenUp(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	exec(t, pool, `CREATE TABLE accounts AS SELECT 1 AS id, 100 AS balance`)
	byRequest := poolBy(t, dsn, func(c *pgxpool.Config) {
		c.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
			return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: limit}
		}
	})
	for what, from := range map[string]*pgxpool.Pool{"by deadline": pool, "by request": byRequest} {
		for _, sql := range []string{`SELECT id FROM accounts WHERE pg_sleep(60) IS NOT NULL`, `SELECT id FROM accounts`} {
			tx, holder := begin(t, from), begin(t, pool)
			exec(t, holder, `SELECT FROM accounts FOR UPDATE`)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() {
				_, err := pglock.LockRow(ctx, tx, pglock.ForUpdate, pgx.RowTo[int], sql)
				done <- err
			}()
			until(t, pool, "the query run", `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event IN ('PgSleep', 'transactionid'))`, pid(tx))
			cancel()
			err := <-done
			if blocked, ok := errors.AsType[*pglock.BlockedError](err); !ok || !errors.Is(err, pglock.ErrLocked) || !errors.Is(err, context.Canceled) ||
				len(blocked.Pids) != 0 || !strings.HasPrefix(err.Error(), "pglock: gave up on a row, locked or slow to come: ") {
				t.Errorf("%s, %s: %v", what, sql, err)
			}
			if got, want := sqlState(err) == "57014" && !tx.Conn().IsClosed(), from == byRequest; got != want {
				t.Errorf("%s, %s: it goes on: %v, want %v", what, sql, got, want)
			}
			_ = holder.Rollback(t.Context())
		}
	}
}

// What is no wait isn't called one: a statement_timeout, and an error of the
// caller's own in a context that has ended.
func TestLockRow_NoWaitToBlame(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 1)
	tx := begin(t, pool)
	exec(t, tx, `SET LOCAL statement_timeout = 1`)
	_, err := pglock.LockRow(t.Context(), tx, pglock.ForUpdate, pgx.RowTo[int], `SELECT id FROM accounts WHERE pg_sleep(60) IS NOT NULL`)
	if sqlState(err) != "57014" || errors.Is(err, pglock.ErrLocked) {
		t.Errorf("a statement_timeout: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	mine := errors.New("not a row of mine")
	_, err = pglock.LockRow(ctx, begin(t, pool), pglock.ForUpdate, func(pgx.CollectableRow) (int, error) {
		cancel()
		return 0, mine
	}, oneAccount, 1)
	if !errors.Is(err, mine) || errors.Is(err, pglock.ErrLocked) {
		t.Errorf("an error of scan: %v", err)
	}
}

// A holder that was cut off is told that it has lost its locks.
func TestLockRow_AfterTheHoldTimeout(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 1)
	holder := begin(t, pool)
	lockAccount(t, holder, pglock.ForUpdate, 1)
	if err := pglock.SetHoldTimeout(t.Context(), holder, time.Millisecond); err != nil {
		t.Fatal(err)
	}
	until(t, pool, "the holder cut off", `SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)`, pid(holder))
	_, err := pglock.LockRow(t.Context(), holder, pglock.ForUpdate, pgx.RowTo[int], oneAccount, 1)
	// Through a Unix socket the write fails before the server's word is read.
	unheard := strings.HasPrefix(pool.Config().ConnConfig.Host, "/") && sqlState(err) == ""
	if err == nil || errors.Is(err, pglock.ErrLocked) || !unheard && (!errors.Is(err, pglock.ErrLost) || !strings.HasPrefix(sqlState(err), "25P0")) {
		t.Errorf("the holder is told %v, want that it has lost its locks", err)
	}
}
