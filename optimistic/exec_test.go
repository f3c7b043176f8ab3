package optimistic_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/optimistic"
)

func TestExec_O08_RowCount(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	tx := begin(t, pool, pgx.ReadCommitted)
	inTx := acquire(t, pool)
	exec(t, inTx, `BEGIN`)
	ctx := t.Context()
	const update = `UPDATE accounts SET balance = $1, version = version + 1 WHERE id = $2 AND version = $3`

	want(t, optimistic.Exec(ctx, pool, update, 7, 1, 1), nil)
	if is := stored(t, pool, 1); is.Version != 2 || is.Value.Balance != 7 {
		t.Errorf("there is %+v", is)
	}
	for name, db := range map[string]optimistic.DB{"pool": pool, "conn": acquire(t, pool), "tx": tx, "conn in a transaction": inTx} {
		if err := optimistic.Exec(ctx, db, update, 8, 1, 1); !errors.Is(err, optimistic.ErrConflict) {
			t.Errorf("%s, stale: %v", name, err)
		}
		usable(t, db)
		// The control: without Exec it is a success.
		tag, err := db.Exec(ctx, update, 8, 1, 1)
		if err != nil || tag.RowsAffected() != 0 {
			t.Errorf("%s, control: %v, %v", name, tag, err)
		}
	}
	want(t, tx.Rollback(ctx), nil)
	exec(t, inTx, `ROLLBACK`)
	want(t, optimistic.Exec(ctx, pool, `DELETE FROM accounts WHERE id = $1 AND version = $2`, 1, 1), optimistic.ErrConflict)
	want(t, optimistic.Exec(ctx, pool, `DELETE FROM accounts WHERE id = $1 AND version = $2`, 1, 2), nil)
	want(t, optimistic.Exec(ctx, pool, `INSERT INTO accounts VALUES ($1, 0, 1) ON CONFLICT DO NOTHING`, 2), optimistic.ErrConflict)
}

// The key is missing in the WHERE clause, and the other rows happen to be at the
// same version: nothing of it stays.
func TestExec_TooManyRows(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	for name, db := range map[string]optimistic.DB{"pool": pool, "conn": acquire(t, pool), "tx": begin(t, pool, "")} {
		err := optimistic.Exec(t.Context(), db, `UPDATE accounts SET balance = 0, version = version + 1 WHERE version = $1`, 1)
		if !errors.Is(err, optimistic.ErrConflict) || !strings.Contains(err.Error(), "2 rows") || !strings.Contains(err.Error(), "WHERE") {
			t.Errorf("%s: %v", name, err)
		}
		if tx, ok := db.(pgx.Tx); ok {
			want(t, tx.Rollback(t.Context()), nil)
		}
		if n := query[int64](t, pool, `SELECT count(*) FROM accounts WHERE version = 1 AND balance = 100`); n != 2 {
			t.Errorf("%s: %d of 2 rows are as they were", name, n)
		}
	}
}

// A SELECT has a row count too, and it says nothing about what was changed.
func TestExec_O08_CountOfSomethingElse(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	for _, sql := range []string{
		`SELECT 1`,
		`WITH u AS (UPDATE accounts SET balance = 0 WHERE version = 17 RETURNING 1) SELECT count(*) FROM u`,
		`WITH u AS (UPDATE accounts SET balance = 0 RETURNING 1) SELECT count(*) FROM u`,
		`CREATE TABLE made ()`,
		`-- nothing`,
	} {
		err := optimistic.Exec(t.Context(), pool, sql)
		if err == nil || errors.Is(err, optimistic.ErrConflict) || !strings.Contains(err.Error(), "UPDATE") {
			t.Errorf("%s: %v", sql, err)
		}
	}
	if query[bool](t, pool, `SELECT to_regclass('made') IS NOT NULL OR EXISTS (SELECT FROM accounts WHERE balance = 0)`) {
		t.Error("something was changed")
	}
}

func TestExec_Merge(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	if query[int](t, pool, `SELECT current_setting('server_version_num')::int`) < 150000 {
		return // MERGE came with 15
	}
	const merge = `MERGE INTO accounts a USING (VALUES ($1::bigint, $2::bigint)) AS v (id, version) ON a.id = v.id AND a.version = v.version
		WHEN MATCHED THEN UPDATE SET version = a.version + 1`
	want(t, optimistic.Exec(t.Context(), pool, merge, 1, 1), nil)
	want(t, optimistic.Exec(t.Context(), pool, merge, 1, 1), optimistic.ErrConflict)
}

func TestExec_BadInput(t *testing.T) {
	t.Parallel()
	if err := optimistic.Exec(t.Context(), noSQL{t}, ""); err == nil || !strings.Contains(err.Error(), "empty") {
		t.Errorf("empty SQL: %v", err)
	}
	if err := optimistic.Exec(t.Context(), nil, "UPDATE"); err == nil || !strings.Contains(err.Error(), "db is nil") {
		t.Errorf("no db: %v", err)
	}
	pool := newPool(t, createAccounts)
	wantState(t, optimistic.Exec(t.Context(), pool, `UPDATE nowhere SET version = version + 1 WHERE id = $1`, 1), "42P01")
	err := optimistic.Exec(t.Context(), pool, `UPDATE accounts SET balance = 0 WHERE id = $1`, make(chan int))
	if err == nil || errors.Is(err, optimistic.ErrUnknownCommit) {
		t.Errorf("unsendable: %v", err)
	}
}

func TestExec_UnknownCommit(t *testing.T) {
	t.Parallel()
	var w wire
	pool := newPool(t, createAccounts+`;
		CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NULL; END';
		CREATE CONSTRAINT TRIGGER late AFTER UPDATE ON accounts DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW EXECUTE FUNCTION late()`, w.configure)
	other := newSamePool(t, pool)
	holder := begin(t, other, "")
	exec(t, holder, `SELECT pg_advisory_xact_lock(1)`)
	done := make(chan error, 1)
	go func() {
		defer close(done)
		done <- optimistic.Exec(t.Context(), pool, `UPDATE accounts SET version = version + 1 WHERE id = $1`, 1)
	}()
	waitBlocked(t, other, holder, done) // in COMMIT
	w.cut.Store(true)
	commit(t, holder)
	want(t, receive(t, done), optimistic.ErrUnknownCommit)
	// An answer lost before the COMMIT is known to have done nothing.
	err := optimistic.Exec(t.Context(), pool, `UPDATE accounts SET version = version + 1 WHERE id = $1`, 1)
	if err == nil || errors.Is(err, optimistic.ErrUnknownCommit) {
		t.Errorf("before the commit: %v", err)
	}
	if is := stored(t, other, 1); is.Version != 2 {
		t.Errorf("there is %+v", is)
	}
}
