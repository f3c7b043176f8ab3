package optimistic_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/optimistic"
)

// A withdrawal takes 1 from account 1 and calls think between its first read and
// its first write.
type withdrawal func(ctx context.Context, pool *pgxpool.Pool, think func()) error

// once returns f for its first call and nothing for the others.
func once(f func()) func() {
	var done bool
	return func() {
		if !done {
			done = true
			f()
		}
	}
}

// byHand is the loop that people write, with the UPDATE they write into it.
func byHand(update string, attempts int) withdrawal {
	return func(ctx context.Context, pool *pgxpool.Pool, think func()) error {
		think = once(think)
		for range attempts {
			now, err := accounts.Get(ctx, pool, 1)
			if err != nil {
				return err
			}
			think()
			err = optimistic.Exec(ctx, pool, update, now.Value.Balance-1, 1, now.Version)
			if !errors.Is(err, optimistic.ErrConflict) {
				return err
			}
		}
		return optimistic.ErrExhausted
	}
}

// lostUpdates has workers withdraw at once, ops times each, and returns how many
// reported successes the row doesn't show. The first read of each worker comes
// before the first write of any.
func lostUpdates(t *testing.T, pool *pgxpool.Pool, withdraw withdrawal) (lost, done int64) {
	t.Helper()
	const workers, ops = 8, 10
	before := stored(t, pool, 1)
	var reading, success atomic.Int64
	allRead := make(chan struct{})
	parallel(workers, func(int) {
		think := once(func() {
			if reading.Add(1) == workers {
				close(allRead)
			}
			receive(t, allRead)
		})
		for range ops {
			switch err := withdraw(t.Context(), pool, think); {
			case err == nil:
				success.Add(1)
			case !errors.Is(err, optimistic.ErrExhausted):
				t.Error(err)
			}
		}
	})
	after := stored(t, pool, 1)
	done = success.Load()
	return done - (before.Value.Balance - after.Value.Balance), done
}

func TestUpdate_O08_NoLostUpdates(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	const (
		compare = `UPDATE accounts SET balance = $1, version = version + 1 WHERE id = $2 AND version = $3`
		// The mutant: everything but the comparison.
		blind = `UPDATE accounts SET balance = $1, version = version + 1 WHERE id = $2 AND $3::bigint IS NOT NULL`
	)
	for _, c := range []struct {
		name     string
		withdraw withdrawal
		loses    bool
	}{
		{"plain read and write", func(ctx context.Context, pool *pgxpool.Pool, think func()) error {
			now, err := accounts.Get(ctx, pool, 1)
			if err != nil {
				return err
			}
			think()
			_, err = pool.Exec(ctx, `UPDATE accounts SET balance = $1 WHERE id = 1`, now.Value.Balance-1)
			return err
		}, true},
		{"mutant without the comparison", byHand(blind, 1), true},
		{"Exec", byHand(compare, 1000), false},
		{"CompareAndSet", func(ctx context.Context, pool *pgxpool.Pool, think func()) error {
			think = once(think)
			now, err := accounts.Get(ctx, pool, 1)
			for err == nil {
				think()
				now.Value.Balance--
				now, err = accounts.CompareAndSet(ctx, pool, 1, now.Version, now.Value)
				if !errors.Is(err, optimistic.ErrConflict) {
					return err
				}
				err = nil // now is the current row
			}
			return err
		}, false},
		{"Update", func(ctx context.Context, pool *pgxpool.Pool, think func()) error {
			think = once(think)
			_, err := accounts.Update(ctx, pool, 1, func(a account) (account, error) {
				think()
				a.Balance--
				return a, nil
			})
			return err
		}, false},
	} {
		version := stored(t, pool, 1).Version
		lost, done := lostUpdates(t, pool, c.withdraw)
		if done == 0 || c.loses != (lost > 0) || lost < 0 {
			t.Errorf("%s: %d of %d updates were lost, loses: %v", c.name, lost, done, c.loses)
		}
		if counted := stored(t, pool, 1).Version - version; !c.loses && counted != done {
			t.Errorf("%s: the version counted %d of %d updates", c.name, counted, done)
		}
	}
}

// On one hot row nobody gives up, final value = successes, version = first +
// updates, and no two updates return the same version.
func TestUpdate_HotRow(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		pool := newPool(t, createAccounts, runtimeParam("default_transaction_isolation", level))
		const workers, ops = 16, 5
		first := stored(t, pool, 1)
		var seen [workers * ops]atomic.Int32
		var calls atomic.Int64
		parallel(workers, func(int) {
			for range ops {
				row, err := accounts.Update(t.Context(), pool, 1, func(a account) (account, error) {
					calls.Add(1)
					a.Balance++
					return a, nil
				})
				if err != nil {
					t.Errorf("%s: %v", level, err)
					continue
				}
				seen[row.Version-first.Version-1].Add(1)
			}
		})
		last := stored(t, pool, 1)
		if last.Value.Balance != first.Value.Balance+workers*ops || last.Version != first.Version+workers*ops {
			t.Errorf("%s: after %d updates of %+v there is %+v", level, workers*ops, first, last)
		}
		for i := range seen {
			if n := seen[i].Load(); n != 1 {
				t.Errorf("%s: version %d was returned %d times", level, first.Version+1+int64(i), n)
			}
		}
		t.Logf("%s: %.1f attempts per update", level, float64(calls.Load())/(workers*ops))
	}
}

func TestUpdate(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	calls := 0
	row, err := accounts.Update(t.Context(), pool, 1, func(a account) (account, error) {
		if calls++; calls == 1 {
			bump(t, pool, 1)
		}
		a.Balance *= 2
		return a, nil
	})
	want(t, err, nil)
	if diff := cmp.Diff(optimistic.Versioned[account]{Value: account{ID: 1, Balance: 2200}, Version: 3}, row); diff != "" || calls != 2 {
		t.Errorf("%d calls: %s", calls, diff)
	}
	if is := stored(t, pool, 1); is != row {
		t.Errorf("returned %+v, there is %+v", row, is)
	}
}

// Every attempt gets a value of its own, also behind slices, maps and pointers.
func TestUpdate_FreshValue(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createDocuments+`;
		INSERT INTO documents (http_path, tags, meta, created_at, created_by) VALUES ('/a', '{x,y}', '{"k": "v"}', now(), 'me')`)
	documents := optimistic.NewTable[document]("documents")
	spoil := func(d document) document {
		d.Tags[0], d.Meta["k"], *d.By = "spoilt", "spoilt", "spoilt"
		return d
	}
	calls := 0
	row, err := documents.Update(t.Context(), pool, 1, func(d document) (document, error) {
		if d.Tags[0] != "x" || d.Meta["k"] != "v" || *d.By != "me" {
			t.Errorf("call %d got %+v", calls, d)
		}
		if calls++; calls < 3 {
			exec(t, pool, `UPDATE documents SET version = version + 1`)
			return spoil(d), nil
		}
		spoil(d)
		return d, optimistic.ErrNoChange
	})
	want(t, err, nil)
	if row.Value.Tags[0] != "x" || row.Value.Meta["k"] != "v" || *row.Value.By != "me" || row.Version != 3 || calls != 3 {
		t.Errorf("after %d calls: %+v", calls, row)
	}
	now, err := documents.CompareAndSet(t.Context(), pool, 1, 1, row.Value)
	want(t, err, optimistic.ErrConflict)
	if diff := cmp.Diff(row, now, cmp.AllowUnexported(document{})); diff != "" {
		t.Error(diff)
	}
}

func TestUpdate_ErrNoChange(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	tx := begin(t, pool, "")
	for _, db := range []optimistic.DB{pool, tx} {
		row, err := accounts.Update(t.Context(), db, 1, func(a account) (account, error) {
			return account{}, fmt.Errorf("nothing to do: %w", optimistic.ErrNoChange)
		})
		want(t, err, nil)
		if row != stored(t, pool, 1) || row.Version != 1 {
			t.Errorf("got %+v", row)
		}
	}
}

// An error of fn is returned as it is, at once, whatever it wraps, and leaves the
// caller's transaction usable, also out of the savepoint.
func TestUpdate_ErrorOfFn(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	for _, mine := range []error{
		errors.New("insufficient funds"),
		&pgconn.PgError{Code: "40001"},
		&pgconn.PgError{Code: "55P03"},
		optimistic.ErrConflict,
		context.Canceled,
	} {
		for stopAt := range 4 {
			tx := begin(t, pool, pgx.ReadCommitted)
			for _, db := range []optimistic.DB{pool, tx} {
				before := stored(t, pool, 2)
				calls := 0
				_, err := accounts.Update(t.Context(), db, 2, func(a account) (account, error) {
					if calls == stopAt || calls == 2 { // the third call has the row locked
						return a, mine
					}
					calls++
					bump(t, pool, 2)
					return account{}, nil
				})
				if err != mine {
					t.Errorf("got %v, want %v itself", err, mine)
				}
				if after := stored(t, pool, 2); after.Version != before.Version+int64(calls) {
					t.Errorf("after %d updates of others: %+v became %+v", calls, before, after)
				}
				// The row is free.
				exec(t, pool, `SELECT FROM accounts WHERE id = 2 FOR UPDATE NOWAIT`)
			}
			usable(t, tx)
			commit(t, tx)
		}
	}
}

// bumpTwice loses the first two attempts, then does what is given.
func bumpTwice(t testing.TB, other optimistic.DB, calls *int, then func(a account) (account, error)) func(account) (account, error) {
	return func(a account) (account, error) {
		if *calls++; *calls <= 2 {
			bump(t, other, 1)
			a.Balance++
			return a, nil
		}
		return then(a)
	}
}

// The third attempt holds a row lock, and one that foreign keys can live with.
func TestUpdate_Escalates(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts+`; CREATE TABLE children (account bigint REFERENCES accounts)`)
	tx := begin(t, pool, pgx.ReadCommitted)
	conn := acquire(t, pool)
	byHand := acquire(t, pool)
	exec(t, byHand, `BEGIN`)
	for name, db := range map[string]optimistic.DB{"pool": pool, "conn": conn, "tx": tx, "conn in a transaction": byHand} {
		before := stored(t, pool, 1)
		calls := 0
		row, err := accounts.Update(t.Context(), db, 1, bumpTwice(t, pool, &calls, func(a account) (account, error) {
			_, err := pool.Exec(t.Context(), `SELECT FROM accounts WHERE id = 1 FOR SHARE NOWAIT`)
			wantState(t, err, "55P03")
			exec(t, pool, `INSERT INTO children VALUES (1)`)
			a.Balance++
			return a, nil
		}))
		if err != nil || calls != 3 {
			t.Fatalf("%s: %d calls, %v", name, calls, err)
		}
		if row.Version != before.Version+3 || row.Value.Balance != before.Value.Balance+2001 {
			t.Errorf("%s: %+v became %+v", name, before, row)
		}
		switch db {
		case tx, byHand:
			if is := stored(t, pool, 1); is.Version != before.Version+2 {
				t.Errorf("%s: others see %+v before the commit", name, is)
			}
			usable(t, db)
			exec(t, db, `COMMIT`)
		}
		if is := stored(t, pool, 1); is != row {
			t.Errorf("%s: returned %+v, there is %+v", name, row, is)
		}
	}
}

// While somebody else holds the row, the wait for the lock ends before the
// context does: the error holds the conflict, and the caller's transaction is
// usable and has the lock_timeout it had.
func TestUpdate_LockTimeout(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		session  string        // lock_timeout of the session
		deadline time.Duration // of the context; 0 is none
	}{
		{"from the deadline", "0", 2 * time.Second},
		{"from the session, which is lower", "20ms", time.Minute},
		{"from the session, without a deadline", "20ms", 0},
	} {
		pool := newPool(t, createAccounts, runtimeParam("lock_timeout", c.session))
		for _, inTx := range []bool{false, true} {
			var db optimistic.DB = pool
			tx := begin(t, pool, pgx.ReadCommitted)
			if inTx {
				db = tx
			}
			ctx, cancel := t.Context(), context.CancelFunc(func() {})
			if c.deadline > 0 {
				ctx, cancel = context.WithTimeout(ctx, c.deadline)
			}
			holder := begin(t, pool, "")
			calls := 0
			now, err := accounts.Update(ctx, db, 1, func(a account) (account, error) {
				if calls++; calls == 2 {
					exec(t, holder, `UPDATE accounts SET version = version + 1 WHERE id = 1`)
					exec(t, holder, `COMMIT; BEGIN; SELECT FROM accounts WHERE id = 1 FOR UPDATE`)
				} else {
					bump(t, pool, 1)
				}
				return a, nil
			})
			ended := ctx.Err()
			cancel()
			want(t, err, optimistic.ErrExhausted)
			want(t, err, optimistic.ErrConflict)
			wantState(t, err, "55P03")
			if errors.Is(err, optimistic.ErrUnknownCommit) || ended != nil || calls != 2 {
				t.Errorf("%s, in a transaction: %v: %d calls, context %v: %v", c.name, inTx, calls, ended, err)
			}
			var conflict *optimistic.ConflictError
			if is := stored(t, pool, 1); !errors.As(err, &conflict) || conflict.Actual != is.Version || now != is {
				t.Errorf("%s: the conflict is %+v, returned %+v, there is %+v", c.name, conflict, now, is)
			}
			commit(t, holder)
			usable(t, tx)
			if is := query[string](t, tx, `SHOW lock_timeout`); is != c.session {
				t.Errorf("%s: lock_timeout is %s", c.name, is)
			}
			_, err = accounts.Update(t.Context(), tx, 1, deposit(1))
			want(t, err, nil)
			commit(t, tx)
		}
	}
}

// A lock that comes in time leaves lock_timeout as it was, too.
func TestUpdate_LockTimeoutIsSetBack(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts, runtimeParam("lock_timeout", "70s"))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tx := begin(t, pool, pgx.ReadCommitted)
	calls := 0
	_, err := accounts.Update(ctx, tx, 1, bumpTwice(t, pool, &calls, deposit(1)))
	want(t, err, nil)
	if is := query[string](t, tx, `SHOW lock_timeout`); is != "70s" || calls != 3 {
		t.Errorf("%d calls, lock_timeout is %s", calls, is)
	}
}

// fn itself changes the row, in the same transaction, so that no lock helps.
func TestUpdate_Exhausted(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	tx := begin(t, pool, pgx.ReadCommitted)
	calls := 0
	_, err := accounts.Update(t.Context(), tx, 1, func(a account) (account, error) {
		calls++
		bump(t, tx, 1)
		return a, nil
	})
	want(t, err, optimistic.ErrExhausted)
	want(t, err, optimistic.ErrConflict)
	var conflict *optimistic.ConflictError
	if !errors.As(err, &conflict) || conflict.Expected != 3 || conflict.Actual != 4 || calls != 3 {
		t.Errorf("%d calls: %+v", calls, conflict)
	}
	if !strings.Contains(err.Error(), "3 attempts") {
		t.Errorf("error %q doesn't tell of 3 attempts", err)
	}
	usable(t, tx)
}

// A context that ends between attempts, in a wait for the lock, and in a pause.
func TestUpdate_ContextEnds(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	ctx, cancel := context.WithCancel(t.Context())
	calls := 0
	_, err := accounts.Update(ctx, pool, 1, func(a account) (account, error) {
		if calls++; calls == 2 {
			cancel()
		}
		bump(t, pool, 1)
		return a, nil
	})
	want(t, err, context.Canceled)
	if calls != 2 || errors.Is(err, optimistic.ErrExhausted) {
		t.Errorf("%d calls: %v", calls, err)
	}

	ctx, cancel = context.WithCancel(t.Context())
	holder := begin(t, pool, "")
	calls = 0
	done := make(chan error, 1)
	go func() {
		defer close(done)
		_, err := accounts.Update(ctx, pool, 1, func(a account) (account, error) {
			if calls++; calls == 1 {
				bump(t, pool, 1)
			} else {
				exec(t, holder, `UPDATE accounts SET version = version + 1 WHERE id = 1`)
				exec(t, holder, `COMMIT; BEGIN; SELECT FROM accounts WHERE id = 1 FOR UPDATE`)
			}
			return a, nil
		})
		done <- err
	}()
	waitBlocked(t, pool, holder, done)
	cancel()
	err = receive(t, done)
	want(t, err, context.Canceled)
	if errors.Is(err, optimistic.ErrUnknownCommit) {
		t.Errorf("nothing was written: %v", err)
	}
}

// The connection breaks at the COMMIT of the transaction that holds the lock.
func TestUpdate_UnknownCommitUnderLock(t *testing.T) {
	t.Parallel()
	var w wire
	pool := newPool(t, createAccounts+`;
		CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NULL; END';
		CREATE CONSTRAINT TRIGGER late AFTER UPDATE ON accounts DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW WHEN (NEW.balance = 0) EXECUTE FUNCTION late()`, w.configure)
	other := newSamePool(t, pool)
	holder := begin(t, other, "")
	exec(t, holder, `SELECT pg_advisory_xact_lock(1)`)
	calls := 0
	done := make(chan error, 1)
	go func() {
		defer close(done)
		_, err := accounts.Update(t.Context(), pool, 1, bumpTwice(t, other, &calls, func(a account) (account, error) {
			a.Balance = 0
			return a, nil
		}))
		done <- err
	}()
	waitBlocked(t, other, holder, done) // in COMMIT
	w.cut.Store(true)
	commit(t, holder)
	want(t, receive(t, done), optimistic.ErrUnknownCommit)
	if is := stored(t, other, 1); is.Value.Balance != 0 || calls != 3 {
		t.Errorf("after %d calls there is %+v", calls, is)
	}
}

// A commit under the lock that the server refuses is known, and is no conflict.
func TestUpdate_CommitFailsUnderLock(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts+`;
		UPDATE accounts SET balance = 5 WHERE id = 2;
		ALTER TABLE accounts ADD UNIQUE (balance) DEFERRABLE INITIALLY DEFERRED`)
	calls := 0
	_, err := accounts.Update(t.Context(), pool, 1, bumpTwice(t, pool, &calls, func(a account) (account, error) {
		a.Balance = 5
		return a, nil
	}))
	wantState(t, err, "23505")
	if errors.Is(err, optimistic.ErrUnknownCommit) || calls != 3 {
		t.Errorf("%d calls: %v", calls, err)
	}
}

func TestUpdate_PanicOfFn(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	func() {
		defer func() {
			if recover() != "mine" {
				t.Error("the panic was swallowed")
			}
		}()
		calls := 0
		_, _ = accounts.Update(t.Context(), pool, 1, bumpTwice(t, pool, &calls, func(account) (account, error) { panic("mine") }))
	}()
	exec(t, pool, `SELECT FROM accounts WHERE id = 1 FOR UPDATE NOWAIT`) // and newPool sees that no connection is left
}
