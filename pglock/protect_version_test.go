package pglock_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// A large table is given its version column without being rewritten.
func TestGuardVersion_RewritesNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE accounts AS SELECT n AS id, 100 AS balance FROM generate_series(1, $1::int) n`, scale(1_000_000, 50_000))
	const file = `SELECT concat(pg_relation_filenode('accounts'), ' ', pg_relation_size('accounts'))`
	before := one[string](t, pool, file)
	const most = time.Second // ten times what it is to take
	took := most + 1
	for try := 0; try < 3 && took > most; try++ { // the machine may be busy with something else
		exec(t, pool, `DROP TRIGGER IF EXISTS pglock_guard_version ON accounts; ALTER TABLE accounts DROP COLUMN IF EXISTS version`)
		start := time.Now()
		exec(t, pool, `SELECT pglock.guard_version('accounts')`)
		took = min(took, time.Since(start))
	}
	t.Logf("took %v", took)
	if took > most {
		t.Errorf("it took %v", took)
	}
	if after := one[string](t, pool, file); after != before {
		t.Errorf("the table was in file and size %s, and is in %s", before, after)
	}
	if versions := one[int64](t, pool, `SELECT sum(version) / count(*) FROM accounts`); versions != 1 {
		t.Errorf("the versions are %d, want 1", versions)
	}
	// The control: a default that differs from row to row.
	exec(t, pool, `ALTER TABLE accounts ADD COLUMN other bigint NOT NULL DEFAULT (random() * 10)::bigint`)
	if one[string](t, pool, file) == before {
		t.Error("a rewritten table looks the same: this test shows nothing")
	}
}

// A writer who forgets the version is bumped; one who doesn't never reaches the
// function.
func TestGuardVersion_Bumps(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE accounts (id int PRIMARY KEY, balance int); INSERT INTO accounts VALUES (1, 100);
		SELECT pglock.guard_version('accounts')`)
	conn := newConn(t, pool)
	exec(t, conn, `SET track_functions = 'pl'`)
	for _, tt := range []struct {
		name, sql string
		want      int64 // by how much the version goes up
		called    int64
	}{
		{"conforms", `UPDATE accounts SET balance = 1, version = version + 1`, 1, 0},
		{"forgets", `UPDATE accounts SET balance = 2`, 1, 1},
		{"sets it to what it was", `UPDATE accounts SET version = version`, 1, 1},
		{"sets it back", `UPDATE accounts SET version = version - 1`, 1, 1},
		{"leaps", `UPDATE accounts SET version = version + 100`, 1, 1},
		{"sets NULL", `UPDATE accounts SET version = NULL`, 1, 1},
		{"on conflict", `INSERT INTO accounts VALUES (1, 0) ON CONFLICT (id) DO UPDATE SET balance = 3`, 1, 1},
		{"hits nothing", `UPDATE accounts SET balance = 0 WHERE id = 2`, 0, 0},
	} {
		inTx(t, conn, pgx.ReadCommitted, func(tx pgx.Tx) {
			const called = `SELECT coalesce(pg_stat_get_xact_function_calls('pglock.bump_version'::regproc), 0)`
			before := one[int64](t, tx, `SELECT version FROM accounts`)
			callsBefore := one[int64](t, tx, called)
			exec(t, tx, tt.sql)
			if up := one[int64](t, tx, `SELECT version FROM accounts`) - before; up != tt.want {
				t.Errorf("%s: the version went up by %d, want %d", tt.name, up, tt.want)
			}
			if n := one[int64](t, tx, called) - callsBefore; n != tt.called {
				t.Errorf("%s: the function was called %d times, want %d", tt.name, n, tt.called)
			}
		})
	}
	// The control.
	exec(t, pool, `DROP TRIGGER pglock_guard_version ON accounts; UPDATE accounts SET balance = 0`)
	if v := one[int64](t, pool, `SELECT version FROM accounts`); v != 1 {
		t.Errorf("without the trigger the version is %d, want 1", v)
	}
}

// What a table has already is kept, or refused with a reason.
func TestGuardVersion_ExistingColumn(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for _, tt := range []struct{ name, table, want string }{
		{"bigint", `(id int, version bigint NOT NULL DEFAULT 7)`, ""},
		{"no default", `(id int, version bigint NOT NULL)`, ""},
		{"dropped", `(id int, version text); ALTER TABLE made DROP COLUMN version`, ""},
		{"partitioned", `(id int) PARTITION BY LIST (id); CREATE TABLE part PARTITION OF made DEFAULT`, ""},
		{"NULL", `(id int, version bigint DEFAULT 7)`, "42804"},
		{"int", `(id int, version int NOT NULL DEFAULT 7)`, "42804"},
		{"text", `(id int, version text)`, "42804"},
	} {
		inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
			exec(t, tx, `CREATE TABLE made `+tt.table)
			_, err := tx.Exec(t.Context(), `SELECT pglock.guard_version('made'), pglock.guard_version('made')`)
			if sqlState(err) != tt.want {
				t.Errorf("%s: %v, want SQLSTATE %q", tt.name, err, tt.want)
			}
			if err != nil {
				return
			}
			exec(t, tx, `INSERT INTO made (id, version) VALUES (1, 8); UPDATE made SET id = 2`)
			if v := one[int64](t, tx, `SELECT version FROM made`); v != 9 {
				t.Errorf("%s: the version is %d, want 9", tt.name, v)
			}
		})
	}
}

// Beside a transaction that has the table, it waits in turns: writers get
// through meanwhile, and it succeeds when that transaction has ended.
func TestGuardVersion_BesideALongTransaction(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE accounts (id int PRIMARY KEY, balance int); INSERT INTO accounts VALUES (1, 100)`)
	long := newConn(t, pool)
	exec(t, long, `BEGIN; SELECT FROM accounts`)
	done := guardVersion(pool)
	blockedBy(t, pool, long.PgConn().PID())
	// A writer queues behind it for a turn, no longer.
	writer := newConn(t, pool)
	exec(t, writer, `SET lock_timeout = '10 s'; UPDATE accounts SET balance = 99`)
	select {
	case err := <-done:
		t.Fatalf("it did not wait: %v", err)
	default:
	}
	exec(t, long, `COMMIT`)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if v := one[int64](t, pool, `SELECT version FROM accounts`); v != 1 {
		t.Errorf("the version is %d, want 1", v)
	}
	if testing.Short() {
		return
	}
	exec(t, long, `BEGIN; UPDATE accounts SET balance = 0`)
	if err := <-guardVersion(pool); sqlState(err) != "55P03" {
		t.Errorf("beside one that doesn't end: %v, want 55P03", err)
	}
}

func guardVersion(pool *pgxpool.Pool) <-chan error {
	done := make(chan error, 1)
	go func() {
		_, err := pool.Exec(context.Background(), `SELECT pglock.guard_version('accounts')`)
		done <- err
	}()
	return done
}
