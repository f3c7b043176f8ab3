package pglock_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// background sends a statement that will wait, and ends with its connection.
func background(t *testing.T, conn *pgx.Conn, sql string, args ...any) (pid int32) {
	t.Helper()
	pid = int32(conn.PgConn().PID())
	done := make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		_, _ = conn.Exec(ctx, sql, args...)
	}()
	return pid
}

// byPid asks until the backend waits, and returns what Blocked says of each.
func byPid(t *testing.T, c *pglock.Client, waiters ...int32) map[int32]pglock.BlockInfo {
	t.Helper()
	for end := time.Now().Add(limit); time.Now().Before(end); {
		infos, err := c.Blocked(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		found := map[int32]pglock.BlockInfo{}
		for _, info := range infos {
			found[info.Pid] = info
		}
		if !slices.ContainsFunc(waiters, func(pid int32) bool { return found[pid].Since.IsZero() }) {
			return found
		}
	}
	t.Fatalf("backends %v never waited", waiters)
	return nil
}

// A row, and a line of two behind its holder: on a database without the schema.
func TestBlocked_Rows(t *testing.T) {
	t.Parallel()
	pool := pgtest.PoolOn(t, pgtest.EmptyDSN(t))
	c := newClient(t, pool)
	if infos, err := c.Blocked(t.Context()); err != nil || len(infos) != 0 {
		t.Fatalf("where nobody waits: %+v, %v", infos, err)
	}
	exec(t, pool, `CREATE TABLE accounts AS SELECT 7 AS id`)
	before := one[time.Time](t, pool, `SELECT clock_timestamp()`)
	holder := newConn(t, pool)
	exec(t, holder, `SET application_name = 'the holder'`)
	exec(t, holder, `BEGIN`)
	exec(t, holder, `SELECT FROM accounts FOR UPDATE`)
	head := int32(holder.PgConn().PID())
	first := background(t, newConn(t, pool), `UPDATE accounts SET id = 8`)
	byPid(t, c, first)
	second := background(t, newConn(t, pool), `DELETE FROM accounts`)
	found := byPid(t, c, first, second)
	if len(found) != 3 {
		t.Errorf("%+v", found)
	}
	h := found[head]
	if len(h.BlockedBy) != 0 || h.Waits != "" || h.Mode != "" || !h.Since.IsZero() || h.Program != "the holder" || h.Role != "postgres" ||
		h.State != "idle in transaction" || h.Query != "SELECT FROM accounts FOR UPDATE" || h.TxSince.Before(before) {
		t.Errorf("the holder: %+v", h)
	}
	for pid, want := range map[int32]pglock.BlockInfo{
		first:  {BlockedBy: []int32{head}, Query: "UPDATE accounts SET id = 8", Mode: "ShareLock"},
		second: {BlockedBy: []int32{first}, Query: "DELETE FROM accounts", Mode: "AccessExclusiveLock"}, // of the row, behind the first
	} {
		got := found[pid]
		if !slices.Equal(got.BlockedBy, want.BlockedBy) || got.Waits != "row (0,1) of accounts" || got.Relation != "accounts" || got.Lease != "" ||
			got.Mode != want.Mode || got.Query != want.Query || got.State != "active" || got.Since.Before(got.TxSince) || got.TxSince.Before(before) {
			t.Errorf("%+v", got)
		}
	}
}

// Each advisory key is the one that its holder took: the halves of pg_locks put
// together, negative ones too.
func TestBlocked_V04_Keys(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	for _, key := range []pglock.Key{
		pglock.KeyInt64(1), pglock.KeyInt64(-1), pglock.KeyInt64(-1 << 63), pglock.KeyInt64(1<<63 - 1), pglock.KeyInt64(-4294967296),
		pglock.KeyPair(1, -2), pglock.KeyPair(-1, 2), pglock.KeyPair(-1, -1),
	} {
		held := lock(t, c, key)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { _, err := c.Lock(ctx, key); done <- err }()
		until(t, pool, "the waiter", `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))`)
		infos, err := c.Blocked(t.Context())
		if err != nil || len(infos) != 2 {
			t.Fatalf("%+v, %v", infos, err)
		}
		if w := infos[0]; w.Key != key || w.Waits != "advisory lock "+key.String() || w.Mode != "ExclusiveLock" || w.Relation != "" {
			t.Errorf("%v is shown as %+v", key, w)
		}
		cancel()
		<-done
		release(t, held)
	}
}

// A release that waits for a guard: the lease's name is told to who may read it,
// and the row's address to a role without any grant.
func TestBlocked_LeaseRows(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	l := acquire(t, c, "accounts/42", time.Hour)
	role := "blocked_" + strings.ToLower(one[string](t, pool, `SELECT substr(md5(random()::text), 1, 8)`))
	exec(t, pool, fmt.Sprintf(`CREATE ROLE %s LOGIN PASSWORD '%[1]s'`, role))
	t.Cleanup(func() { exec(t, pool, `DROP ROLE `+role) })
	inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
		if err := l.Guard(t.Context(), tx); err != nil {
			t.Fatal(err)
		}
		waiter := newConn(t, pool)
		pid := background(t, waiter, `SELECT pglock.release('{accounts/42}', ARRAY[$1]::bigint[], '1 min')`, int64(l.Token()))
		info := byPid(t, c, pid)[pid]
		if info.Lease != "accounts/42" || info.Relation != "pglock.leases" || !slices.Equal(info.BlockedBy, []int32{int32(tx.Conn().PgConn().PID())}) {
			t.Errorf("%+v", info)
		}

		bare := poolBy(t, pool.Config().ConnString(), func(config *pgxpool.Config) { config.ConnConfig.User, config.ConnConfig.Password = role, role })
		seen := byPid(t, newClient(t, bare), pid)[pid]
		if seen.Lease != "" || seen.Waits != info.Waits || seen.Query != "<insufficient privilege>" || !seen.TxSince.IsZero() {
			t.Errorf("a role without grants sees %+v", seen)
		}

		// While the table is locked nothing waits for it, and only the name is missing.
		locker := newConn(t, pool)
		exec(t, locker, `BEGIN`)
		background(t, locker, `LOCK TABLE pglock.leases`)
		blockedBy(t, pool, uint32(pid))
		if infos, err := c.Blocked(t.Context()); err != nil || len(infos) != 3 {
			t.Errorf("beside a table lock: %+v, %v", infos, err)
		}
	})
}

// What looks takes no row locks: of each statement that was sent the locks are
// those of a reader, and no row is marked.
func TestBlocked_R04_TakesNoRowLocks(t *testing.T) {
	t.Parallel()
	pool, heard := spied(t, pgtest.DSN(t))
	c := newClient(t, pool)
	l := acquire(t, c, "a", time.Hour)
	const marked = `SELECT xmax::text FROM pglock.leases`
	inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
		if err := l.Guard(t.Context(), tx); err != nil {
			t.Fatal(err)
		}
		byPid(t, c, background(t, newConn(t, pool), `SELECT pglock.release('{a}', ARRAY[$1]::bigint[], '1 min')`, int64(l.Token())))
	})
	for _, look := range []func() error{
		func() error { _, err := c.Blocked(t.Context()); return err },
		func() error { _, err := c.Leases(t.Context()); return err },
		func() error { _, err := c.Waiters(t.Context()); return err },
	} {
		if err := look(); err != nil {
			t.Fatal(err)
		}
	}
	const rowLocks = `SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid()
		AND (locktype IN ('tuple', 'transactionid') OR locktype = 'relation' AND mode <> 'AccessShareLock')`
	before := one[string](t, pool, marked)
	for _, part := range []string{"pg_blocking_pids", "ctid = ANY", "list_leases", "list_waiters"} {
		sent := heard.heard(part)
		if len(sent) == 0 {
			t.Errorf("no statement with %s was sent", part)
			continue
		}
		inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
			exec(t, tx, sent[0].sql, sent[0].args...)
			if n := one[int64](t, tx, rowLocks); n != 0 {
				t.Errorf("%s took %d locks that a reader has no use for", part, n)
			}
		})
	}
	if after := one[string](t, pool, marked); after != before {
		t.Errorf("the row's xmax went from %s to %s", before, after)
	}
	inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
		exec(t, tx, `SELECT FROM pglock.leases FOR KEY SHARE`)
		if one[int64](t, tx, rowLocks) == 0 {
			t.Error("a row lock is not seen: this test shows nothing")
		}
	})
}
