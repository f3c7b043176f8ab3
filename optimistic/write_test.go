package optimistic_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/pawl-go/pawl/optimistic"
)

// vetoes makes every write to the accounts do nothing, and say nothing.
const vetoes = `
	CREATE FUNCTION veto() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
	CREATE TRIGGER veto BEFORE INSERT OR UPDATE OR DELETE ON accounts FOR EACH ROW EXECUTE FUNCTION veto()`

func TestInsert(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	before := time.Now().Add(-time.Hour)
	row, created, err := accounts.Insert(t.Context(), pool, 3, account{ID: 99, Balance: 5})
	want(t, err, nil)
	if !created || row.Value != (account{ID: 3, Balance: 5}) {
		t.Errorf("created %v: %+v", created, row)
	}
	if at := time.UnixMicro(row.Version); at.Before(before) || at.After(before.Add(2*time.Hour)) {
		t.Errorf("first version %d is %v", row.Version, at)
	}
	again, created, err := accounts.Insert(t.Context(), pool, 3, account{Balance: 6})
	want(t, err, nil)
	if diff := cmp.Diff(row, again); created || diff != "" {
		t.Errorf("created %v: %s", created, diff)
	}
}

func TestInsert_DatabaseDrawsTheKey(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createDocuments)
	documents := optimistic.NewTable[document]("documents")
	for want := int64(1); want < 3; want++ {
		row, created, err := documents.Insert(t.Context(), pool, nil, document{DocID: 99, Meta: map[string]string{}})
		if err != nil || !created || row.Value.DocID != want {
			t.Errorf("created %v: %+v, %v", created, row, err)
		}
	}
}

func TestInsert_ServerErrors(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts+`; DELETE FROM accounts WHERE id = 2; ALTER TABLE accounts ADD UNIQUE (balance)`)
	_, _, err := accounts.Insert(t.Context(), pool, 3, account{Balance: 100})
	wantState(t, err, "23505") // another constraint than the key's
	exec(t, pool, vetoes)
	_, _, err = accounts.Insert(t.Context(), pool, 4, account{Balance: 7})
	want(t, err, optimistic.ErrVetoed)
}

// Of many who insert one key, one created it and all see the same row, also
// where the default isolation would make the others' statements fail.
func TestInsert_Race(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		pool := newPool(t, createAccounts, runtimeParam("default_transaction_isolation", level))
		var created atomic.Int64
		parallel(16, func(i int) {
			row, won, err := accounts.Insert(t.Context(), pool, 3, account{Balance: int64(i)})
			if err != nil {
				t.Errorf("%s: %v", level, err)
			}
			if won {
				created.Add(1)
			}
			if got, err := accounts.Get(t.Context(), pool, 3); err != nil || got != row {
				t.Errorf("%s: inserted %+v, there is %+v, %v", level, row, got, err)
			}
		})
		if n := created.Load(); n != 1 {
			t.Errorf("%s: %d created the row", level, n)
		}
	}
}

// Delete and insert must not let a version through that was read before. The
// control is the same with an INSERT that leaves the version to a constant
// default, or to a sequence, which the updates of the first row have overtaken.
func TestInsert_ABA(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts+`; CREATE SEQUENCE versions`)
	plain := func(version string) func() error {
		return func() error {
			_, err := pool.Exec(t.Context(), `INSERT INTO accounts (id, balance, version) VALUES (3, 0, `+version+`)`)
			return err
		}
	}
	for name, c := range map[string]struct {
		insert  func() error
		accepts bool
	}{
		"Insert":   {func() error { _, _, err := accounts.Insert(t.Context(), pool, 3, account{}); return err }, false},
		"constant": {plain("DEFAULT"), true},
		"sequence": {plain("nextval('versions')"), true},
	} {
		want(t, c.insert(), nil)
		var first optimistic.Versioned[account]
		for range 4 {
			var err error
			first, err = accounts.Update(t.Context(), pool, 3, deposit(1))
			want(t, err, nil)
		}
		want(t, accounts.Delete(t.Context(), pool, 3, first.Version), nil)
		want(t, c.insert(), nil)
		accepted := false
		for range 6 { // the new row passes through its versions
			_, err := accounts.CompareAndSet(t.Context(), pool, 3, first.Version, account{Balance: -1})
			if accepted = err == nil; accepted {
				break
			}
			want(t, err, optimistic.ErrConflict)
			_, err = accounts.Update(t.Context(), pool, 3, deposit(1))
			want(t, err, nil)
		}
		exec(t, pool, `DELETE FROM accounts WHERE id = 3`)
		if accepted != c.accepts {
			t.Errorf("%s: a version from before the delete was accepted: %v, want %v", name, accepted, c.accepts)
		}
	}
}

func TestCompareAndSet(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	got, err := accounts.CompareAndSet(t.Context(), pool, 1, 1, account{Balance: 7})
	want(t, err, nil)
	if diff := cmp.Diff(optimistic.Versioned[account]{Value: account{ID: 1, Balance: 7}, Version: 2}, got); diff != "" {
		t.Error(diff)
	}
	if other := stored(t, pool, 2); other.Version != 1 || other.Value.Balance != 100 {
		t.Errorf("the other row is %+v", other)
	}
}

func TestCompareAndSet_O04_Increment(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	for version := int64(1); version < 20; version++ {
		var row optimistic.Versioned[account]
		var outcomes []optimistic.Outcome[account]
		var err error
		switch version % 4 {
		case 0:
			row, err = accounts.CompareAndSet(t.Context(), pool, 1, version, account{Balance: version})
		case 1:
			row, err = accounts.Update(t.Context(), pool, 1, deposit(1))
		case 2:
			row, err = accounts.Touch(t.Context(), pool, 1, version)
		case 3:
			outcomes, err = accounts.CompareAndSetMany(t.Context(), pool, []change{{1, version, account{Balance: version}}})
			row = outcomes[0].Row
		}
		want(t, err, nil)
		if is := stored(t, pool, 1); is.Version != version+1 || is != row {
			t.Fatalf("returned %+v, there is %+v, want version %d", row, is, version+1)
		}
	}
	// The control: who doesn't count goes unnoticed.
	seen := stored(t, pool, 2)
	exec(t, pool, `UPDATE accounts SET balance = 1 WHERE id = 2`)
	_, err := accounts.CompareAndSet(t.Context(), pool, 2, seen.Version, seen.Value)
	want(t, err, nil)
}

// A trigger that puts the old number back leaves nothing to compare.
func TestCompareAndSet_O04_IncrementUndone(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts+`;
		CREATE FUNCTION undo() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.version := OLD.version; RETURN NEW; END';
		CREATE TRIGGER undo BEFORE UPDATE ON accounts FOR EACH ROW EXECUTE FUNCTION undo()`)
	_, err := accounts.CompareAndSet(t.Context(), pool, 1, 1, account{})
	if err == nil || errors.Is(err, optimistic.ErrConflict) || !strings.Contains(err.Error(), "undid the increment") {
		t.Errorf("CompareAndSet: %v", err)
	}
	_, err = accounts.Update(t.Context(), pool, 1, deposit(1))
	if err == nil || !strings.Contains(err.Error(), "undid the increment") {
		t.Errorf("Update: %v", err)
	}
}

func TestCompareAndSet_O08_StaleIsConflict(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	bump(t, pool, 1)
	bump(t, pool, 1)
	for verb, do := range map[string]func() (optimistic.Versioned[account], error){
		"compare and set": func() (optimistic.Versioned[account], error) {
			return accounts.CompareAndSet(t.Context(), pool, 1, 1, account{})
		},
		"delete from": func() (optimistic.Versioned[account], error) {
			return stored(t, pool, 1), accounts.Delete(t.Context(), pool, 1, 1)
		},
	} {
		now, err := do()
		want(t, err, optimistic.ErrConflict)
		var conflict *optimistic.ConflictError
		if !errors.As(err, &conflict) {
			t.Fatalf("%s: %T holds no *ConflictError", verb, err)
		}
		is := stored(t, pool, 1)
		if diff := cmp.Diff(&optimistic.ConflictError{
			Table: "accounts", Key: 1, Expected: 1, Actual: 3, Current: is.Value,
		}, conflict); diff != "" {
			t.Error(diff)
		}
		if is.Version != 3 || is.Value.Balance != 2100 || now != is {
			t.Errorf("%s: returned %+v, there is %+v", verb, now, is)
		}
		for _, word := range []string{verb, "accounts", "key 1", "version 3", "expected 1"} {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("error %q lacks %q", err, word)
			}
		}
	}
}

func TestCompareAndSet_O08_GoneIsNotFound(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	_, err := accounts.CompareAndSet(t.Context(), pool, 3, 1, account{})
	want(t, err, optimistic.ErrNotFound)
	want(t, accounts.Delete(t.Context(), pool, 3, 1), optimistic.ErrNotFound)
	_, err = accounts.Update(t.Context(), pool, 3, deposit(1))
	want(t, err, optimistic.ErrNotFound)
	for _, other := range []error{optimistic.ErrConflict, optimistic.ErrVetoed} {
		if errors.Is(err, other) {
			t.Errorf("%v is also %v", err, other)
		}
	}
}

// A loads, B deletes, A saves: nothing comes back to life, as it does with an
// upsert, the control.
func TestCompareAndSet_O11_NoResurrection(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	loaded, err := accounts.Get(t.Context(), pool, 1)
	want(t, err, nil)
	want(t, accounts.Delete(t.Context(), pool, 1, loaded.Version), nil)
	_, err = accounts.CompareAndSet(t.Context(), pool, 1, loaded.Version, loaded.Value)
	want(t, err, optimistic.ErrNotFound)
	_, err = accounts.Update(t.Context(), pool, 1, deposit(1))
	want(t, err, optimistic.ErrNotFound)
	for _, never := range []int64{0, -1} { // what "new" looks like elsewhere
		_, err = accounts.CompareAndSet(t.Context(), pool, 1, never, loaded.Value)
		want(t, err, optimistic.ErrNotFound)
	}
	outcomes, err := accounts.CompareAndSetMany(t.Context(), pool, []change{{1, loaded.Version, loaded.Value}})
	want(t, err, optimistic.ErrNotFound)
	wantOutcomes(t, outcomes, optimistic.ErrNotFound)
	back := func() bool { return query[bool](t, pool, `SELECT EXISTS (SELECT FROM accounts WHERE id = 1)`) }
	if back() {
		t.Error("the row is back")
	}
	exec(t, pool, `INSERT INTO accounts AS a VALUES (1, $1, 1)
		ON CONFLICT (id) DO UPDATE SET balance = $1, version = a.version + 1 WHERE a.version = $2`, loaded.Value.Balance, loaded.Version)
	if !back() {
		t.Error("control: the upsert brought nothing back")
	}
}

// A and B load, B updates, A writes what it loaded, version field and all.
func TestCompareAndSet_O02_OldVersionInTheValue(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	type versioned struct{ ID, Balance, Version int64 }
	table := optimistic.NewTable[versioned]("accounts")
	loaded, err := table.Get(t.Context(), pool, 1)
	want(t, err, nil)
	for range 2 {
		_, err = table.Update(t.Context(), pool, 1, func(v versioned) (versioned, error) { v.Balance++; return v, nil })
		want(t, err, nil)
	}
	_, err = table.CompareAndSet(t.Context(), pool, 1, loaded.Version, loaded.Value)
	want(t, err, optimistic.ErrConflict)
	// With the right version, an old one inside the value doesn't count.
	row, err := table.CompareAndSet(t.Context(), pool, 1, 3, loaded.Value)
	want(t, err, nil)
	if row.Version != 4 || row.Value.Version != 4 {
		t.Errorf("got %+v, want version 4", row)
	}
	row, err = table.Update(t.Context(), pool, 1, func(versioned) (versioned, error) { return loaded.Value, nil })
	want(t, err, nil)
	if row.Version != 5 {
		t.Errorf("got %+v, want version 5", row)
	}
}

// A saved version is worth the same after dump and restore, here by COPY, which
// is what pg_dump does with the rows. xmin, the control, isn't.
func TestCompareAndSet_O13_DumpAndRestore(t *testing.T) {
	t.Parallel()
	source := newPool(t, createAccounts)
	target := newPool(t, createAccounts+`; TRUNCATE accounts`)
	bump(t, source, 1)
	saved, err := accounts.Get(t.Context(), source, 1)
	want(t, err, nil)
	xmin := query[uint32](t, source, `SELECT xmin FROM accounts WHERE id = 1`)

	var dump bytes.Buffer
	out, in := acquire(t, source), acquire(t, target)
	_, err = out.PgConn().CopyTo(t.Context(), &dump, `COPY accounts TO STDOUT`)
	want(t, err, nil)
	exec(t, in, `CREATE TABLE other_work ()`)
	_, err = in.PgConn().CopyFrom(t.Context(), &dump, `COPY accounts FROM STDIN`)
	want(t, err, nil)
	if query[uint32](t, target, `SELECT xmin FROM accounts WHERE id = 1`) == xmin {
		t.Error("control: xmin came through")
	}
	_, err = accounts.CompareAndSet(t.Context(), target, 1, saved.Version, account{Balance: 1})
	want(t, err, nil)
	_, err = accounts.CompareAndSet(t.Context(), target, 1, saved.Version, account{Balance: 2})
	want(t, err, optimistic.ErrConflict)
}

func TestWrite_Vetoed(t *testing.T) {
	t.Parallel()
	trigger := newPool(t, createAccounts+`;`+vetoes)
	role := "pawl_" + strings.ToLower(rand.Text()[:10]) // roles are the whole server's
	secured := newPool(t, createAccounts+`;
		ALTER TABLE accounts ENABLE ROW LEVEL SECURITY;
		CREATE POLICY see ON accounts FOR SELECT USING (true);
		CREATE POLICY change ON accounts FOR UPDATE USING (balance > 100);
		CREATE POLICY remove ON accounts FOR DELETE USING (balance > 100);
		CREATE ROLE `+role+`; GRANT ALL ON accounts TO `+role)
	t.Cleanup(func() {
		if _, err := secured.Exec(context.Background(), `DROP OWNED BY `+role+`; DROP ROLE `+role); err != nil {
			t.Error(err)
		}
	})
	restricted := begin(t, secured, "")
	exec(t, restricted, `SET LOCAL ROLE `+role)
	for name, db := range map[string]optimistic.DB{"trigger": trigger, "row security": restricted} {
		calls := 0
		_, err := accounts.CompareAndSet(t.Context(), db, 1, 1, account{})
		for verb, err := range map[string]error{
			"CompareAndSet": err,
			"Delete":        accounts.Delete(t.Context(), db, 1, 1),
			"Update": func() error {
				_, err := accounts.Update(t.Context(), db, 1, func(a account) (account, error) { calls++; return a, nil })
				return err
			}(),
		} {
			if !errors.Is(err, optimistic.ErrVetoed) || errors.Is(err, optimistic.ErrConflict) {
				t.Errorf("%s, %s: %v", name, verb, err)
			}
		}
		if calls != 1 {
			t.Errorf("%s: fn was called %d times for a veto", name, calls)
		}
		want(t, optimistic.Exec(t.Context(), db, `UPDATE accounts SET balance = 0 WHERE id = 1`), optimistic.ErrConflict)
	}
}

// An answer that is lost leaves the outcome open, and says so; what was never
// sent doesn't.
func TestWrite_UnknownCommit(t *testing.T) {
	t.Parallel()
	var w wire
	pool := newPool(t, createAccounts, w.configure)
	watch := newSamePool(t, pool)
	version := int64(1)
	for verb, do := range map[string]func() error{
		"CompareAndSet": func() error {
			_, err := accounts.CompareAndSet(t.Context(), pool, 1, version, account{Balance: version})
			return err
		},
		"Update": func() error {
			calls := 0
			_, err := accounts.Update(t.Context(), pool, 1, func(a account) (account, error) {
				if calls++; calls > 1 {
					t.Error("the write was repeated though it may have been done")
				}
				w.cut.Store(true) // between the read and the write
				return a, nil
			})
			return err
		},
		"Insert": func() error { _, _, err := accounts.Insert(t.Context(), pool, 10, account{}); return err },
		"Delete": func() error { return accounts.Delete(t.Context(), pool, 2, 1) },
	} {
		// Prepared beforehand, so that the first answer is the write's.
		conn, err := pool.Acquire(t.Context())
		want(t, err, nil)
		everyMethod(t.Context(), accounts, conn, 77, func(string, error) {})
		exec(t, conn, `DELETE FROM accounts WHERE id = 77`)
		conn.Release()

		w.cut.Store(verb != "Update")
		err = do()
		w.cut.Store(false)
		if !errors.Is(err, optimistic.ErrUnknownCommit) {
			t.Errorf("%s: %v", verb, err)
		}
		version = query[int64](t, watch, `SELECT version FROM accounts WHERE id = 1`)
	}
	// All of them were done.
	if n := query[int64](t, watch, `SELECT count(*) FROM accounts WHERE id = 1 AND version = 3 OR id = 10`); n != 2 {
		t.Errorf("%d of 2 rows are as they should be", n)
	}

	// An argument that can't be sent, and a pool that is closed.
	type odd struct{ Balance chan int }
	_, err := optimistic.NewTable[odd]("accounts").CompareAndSet(t.Context(), watch, 1, 1, odd{make(chan int)})
	if err == nil || errors.Is(err, optimistic.ErrUnknownCommit) {
		t.Errorf("unsendable: %v", err)
	}
	_, err = accounts.CompareAndSet(t.Context(), watch, make(chan int), 1, account{})
	if err == nil || errors.Is(err, optimistic.ErrUnknownCommit) {
		t.Errorf("unsendable key: %v", err)
	}
	// In the caller's transaction a broken connection has committed nothing.
	tx := begin(t, pool, "")
	w.cut.Store(true)
	_, err = accounts.CompareAndSet(t.Context(), tx, 1, version, account{})
	if err == nil || errors.Is(err, optimistic.ErrUnknownCommit) {
		t.Errorf("in a transaction: %v", err)
	}
	_ = tx.Rollback(t.Context())
	watch.Close()
	_, err = accounts.CompareAndSet(t.Context(), watch, 1, 1, account{})
	if err == nil || errors.Is(err, optimistic.ErrUnknownCommit) {
		t.Errorf("closed pool: %v", err)
	}
}

// A server process that is told to go while it writes may have committed.
func TestWrite_Terminated(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	tx := begin(t, pool, "")
	exec(t, tx, `SELECT FROM accounts WHERE id = 1 FOR UPDATE`)
	done := make(chan error, 1)
	go func() {
		defer close(done)
		_, err := accounts.CompareAndSet(t.Context(), pool, 1, 1, account{})
		done <- err
	}()
	waitBlocked(t, pool, tx, done)
	exec(t, pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE $1::int = ANY (pg_blocking_pids(pid))`, tx.Conn().PgConn().PID())
	err := receive(t, done)
	want(t, err, optimistic.ErrUnknownCommit)
	wantState(t, err, "57P01")
}

// A statement outside a transaction returns its rows and its row count before
// it is committed: a constraint checked at the commit must not be a success.
func TestWrite_CommitFails(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts+`;
		UPDATE accounts SET balance = 200 WHERE id = 2;
		ALTER TABLE accounts ADD UNIQUE (balance) DEFERRABLE INITIALLY DEFERRED;
		CREATE TABLE children (account bigint REFERENCES accounts DEFERRABLE INITIALLY DEFERRED);
		INSERT INTO children VALUES (1)`)
	ctx := t.Context()
	_, err := accounts.CompareAndSet(ctx, pool, 1, 1, account{Balance: 200})
	wantState(t, err, "23505")
	_, err = accounts.Update(ctx, pool, 1, deposit(100))
	wantState(t, err, "23505")
	_, _, err = accounts.Insert(ctx, pool, 3, account{Balance: 200})
	wantState(t, err, "23505")
	wantState(t, accounts.Delete(ctx, pool, 1, 1), "23503")
	wantState(t, optimistic.Exec(ctx, pool, `DELETE FROM accounts WHERE id = 1`), "23503")
	if errors.Is(err, optimistic.ErrUnknownCommit) {
		t.Errorf("the server said what happened: %v", err)
	}
}

// The default isolation turns a conflict of a single statement into 40001.
func TestCompareAndSet_DefaultIsolation(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"repeatable read", "serializable"} {
		pool := newPool(t, createAccounts, runtimeParam("default_transaction_isolation", level))
		for _, c := range []struct {
			name string
			do   func() error
		}{
			{"CompareAndSet", func() error {
				_, err := accounts.CompareAndSet(t.Context(), pool, 1, stored(t, pool, 1).Version, account{})
				return err
			}},
			{"Delete", func() error { return accounts.Delete(t.Context(), pool, 1, stored(t, pool, 1).Version) }},
			{"Exec", func() error {
				return optimistic.Exec(t.Context(), pool, `UPDATE accounts SET version = version + 1 WHERE id = 1 AND version = $1`, stored(t, pool, 1).Version)
			}},
		} {
			tx := begin(t, pool, "")
			bump(t, tx, 1)
			done := make(chan error, 1)
			go func() { done <- c.do() }()
			waitBlocked(t, pool, tx, done)
			commit(t, tx)
			if err := receive(t, done); !errors.Is(err, optimistic.ErrConflict) {
				t.Errorf("%s at %s: %v", c.name, level, err)
			}
		}
	}
}
