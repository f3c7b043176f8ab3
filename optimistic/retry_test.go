package optimistic_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/optimistic"
)

var repeatableRead = optimistic.WithTxOptions(pgx.TxOptions{IsoLevel: pgx.RepeatableRead})

// onCall is an SQL condition of each doctor's absence: at least one is on call.
const onCall = `
	CREATE TABLE doctors (id int PRIMARY KEY, on_call bool NOT NULL);
	INSERT INTO doctors VALUES (1, true), (2, true)`

// Write skew: each sees the other on call and leaves. No version column notices,
// because they write to different rows.
func TestRunInTx_WriteSkew(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		opts   []optimistic.TxOption
		broken bool
	}{
		{"default", nil, false},
		{"control at READ COMMITTED", []optimistic.TxOption{optimistic.WithTxOptions(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})}, true},
		{"control at the database's default", []optimistic.TxOption{optimistic.WithTxOptions(pgx.TxOptions{})}, true},
		{"control at REPEATABLE READ", []optimistic.TxOption{repeatableRead}, true},
	} {
		pool := newPool(t, onCall)
		var reading, calls atomic.Int64
		bothRead := make(chan struct{})
		parallel(2, func(i int) {
			think := once(func() {
				if reading.Add(1) == 2 {
					close(bothRead)
				}
				receive(t, bothRead)
			})
			err := optimistic.RunInTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
				calls.Add(1)
				var others int
				if err := tx.QueryRow(ctx, `SELECT count(*) FROM doctors WHERE on_call AND id <> $1`, i+1).Scan(&others); err != nil {
					return err
				}
				think()
				if others == 0 {
					return nil
				}
				_, err := tx.Exec(ctx, `UPDATE doctors SET on_call = false WHERE id = $1`, i+1)
				return err
			}, c.opts...)
			if err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
		})
		left := query[int64](t, pool, `SELECT count(*) FROM doctors WHERE on_call`)
		if broken := left == 0; broken != c.broken || !c.broken && calls.Load() < 3 {
			t.Errorf("%s: %d on call after %d calls", c.name, left, calls.Load())
		}
	}
}

// Random writers in transactions of several rows: nothing is lost, and nobody is
// bothered with a serialization failure or a deadlock.
func TestRunInTx_Counts(t *testing.T) {
	t.Parallel()
	for name, opts := range map[string][]optimistic.TxOption{"serializable": nil, "repeatable read": {repeatableRead}} {
		pool := newPool(t, createAccounts, runtimeParam("deadlock_timeout", "20ms"))
		const workers, ops = 6, 5
		var calls atomic.Int64
		parallel(workers, func(i int) {
			for range ops {
				err := optimistic.RunInTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
					calls.Add(1)
					for k := range int64(2) {
						id := 1 + (k+int64(i))%2 // in two orders
						if _, err := accounts.Update(ctx, tx, id, deposit(1)); err != nil {
							return err
						}
					}
					return nil
				}, opts...)
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
		})
		for id := int64(1); id < 3; id++ {
			if is := stored(t, pool, id); is.Value.Balance != 100+workers*ops || is.Version != 1+workers*ops {
				t.Errorf("%s: after %d updates there is %+v", name, workers*ops, is)
			}
		}
		if calls.Load() == workers*ops {
			t.Logf("%s: no transaction was run twice", name)
		}
	}
}

// What is retried, and what isn't.
func TestRunInTx_Errors(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	for _, c := range []struct {
		err   error
		again bool
	}{
		{errors.New("mine"), false},
		{&pgconn.PgError{Code: "40001"}, true},
		{fmt.Errorf("wrapped: %w", &pgconn.PgError{Code: "40P01"}), true},
		{optimistic.ErrRetryOutside, true},
		{&pgconn.PgError{Code: "23505"}, false},
		{&pgconn.PgError{Code: "55P03"}, false},
		{optimistic.ErrConflict, false},
		{fmt.Errorf("%w: %w", optimistic.ErrUnknownCommit, &pgconn.PgError{Code: "40001"}), false},
	} {
		calls := 0
		before := stored(t, pool, 1)
		err := optimistic.RunInTx(t.Context(), pool, func(_ context.Context, tx pgx.Tx) error {
			bump(t, tx, 1)
			if calls++; calls == 1 {
				return c.err
			}
			return nil
		})
		after := stored(t, pool, 1)
		if c.again && (err != nil || calls != 2 || after.Version != before.Version+1) {
			t.Errorf("%v: %d calls, %v", c.err, calls, err)
		}
		if !c.again && (err != c.err || calls != 1 || after != before) {
			t.Errorf("%v: %d calls, %v", c.err, calls, err)
		}
	}
}

// SERIALIZABLE may say no as late as at COMMIT, which belongs to what is run
// again. The trigger says no there: to the control, and twice more.
func TestRunInTx_CommitIsInTheLoop(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts+`;
		CREATE SEQUENCE refused;
		CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN
				IF nextval('refused') < 4 THEN
					RAISE serialization_failure;
				END IF;
				RETURN NULL;
			END $$;
		CREATE CONSTRAINT TRIGGER refuse AFTER UPDATE ON accounts DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW EXECUTE FUNCTION refuse()`)
	calls := 0
	fn := func(_ context.Context, tx pgx.Tx) error {
		calls++
		bump(t, tx, 1)
		return nil
	}
	once := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return fn(t.Context(), tx) })
	wantState(t, once, "40001")
	calls = 0
	want(t, optimistic.RunInTx(t.Context(), pool, fn), nil)
	if is := stored(t, pool, 1); calls != 3 || is.Version != 2 {
		t.Errorf("after %d calls there is %+v", calls, is)
	}
}

func TestRunInTx_Exhausted(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	calls := 0
	err := optimistic.RunInTx(t.Context(), pool, func(context.Context, pgx.Tx) error {
		calls++
		return &pgconn.PgError{Code: "40001"}
	})
	want(t, err, optimistic.ErrExhausted)
	wantState(t, err, "40001")
	if calls != 20 || !strings.Contains(err.Error(), "20 attempts") {
		t.Errorf("%d calls: %v", calls, err)
	}

	// A pause that the deadline cuts short isn't begun.
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	err = optimistic.RunInTx(ctx, pool, func(context.Context, pgx.Tx) error { return &pgconn.PgError{Code: "40001"} })
	if !errors.Is(err, optimistic.ErrExhausted) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("near the deadline: %v", err)
	}

	ctx, cancel = context.WithCancel(t.Context())
	err = optimistic.RunInTx(ctx, pool, func(context.Context, pgx.Tx) error {
		cancel()
		return &pgconn.PgError{Code: "40001"}
	})
	want(t, err, context.Canceled)
	wantState(t, err, "40001")
}

// fn dropped an error that aborted its transaction: that isn't a success.
func TestRunInTx_DroppedError(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	err := optimistic.RunInTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error {
		bump(t, tx, 1)
		_, _ = tx.Exec(ctx, `SELECT 1/0`)
		return nil
	})
	want(t, err, pgx.ErrTxCommitRollback)
	err = optimistic.RunInTx(t.Context(), pool, func(ctx context.Context, tx pgx.Tx) error { return tx.Rollback(ctx) })
	want(t, err, pgx.ErrTxClosed)
	if is := stored(t, pool, 1); is.Version != 1 {
		t.Errorf("there is %+v", is)
	}
}

func TestRunInTx_UnknownCommit(t *testing.T) {
	t.Parallel()
	var w wire
	pool := newPool(t, createAccounts, w.configure)
	calls := 0
	err := optimistic.RunInTx(t.Context(), pool, func(_ context.Context, tx pgx.Tx) error {
		calls++
		bump(t, tx, 1)
		w.cut.Store(true)
		return nil
	})
	want(t, err, optimistic.ErrUnknownCommit)
	if is := stored(t, newSamePool(t, pool), 1); calls != 1 || is.Version != 2 {
		t.Errorf("after %d calls there is %+v", calls, is)
	}
}

func TestRunInTx_BadInput(t *testing.T) {
	t.Parallel()
	fn := func(context.Context, pgx.Tx) error { t.Error("fn was called"); return nil }
	if err := optimistic.RunInTx(t.Context(), nil, fn); err == nil || !strings.Contains(err.Error(), "db is nil") {
		t.Errorf("no pool: %v", err)
	}
	pool := newPool(t, "")
	if err := optimistic.RunInTx(t.Context(), pool, nil); err == nil || !strings.Contains(err.Error(), "fn is nil") {
		t.Errorf("no fn: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	want(t, optimistic.RunInTx(ctx, pool, fn), context.Canceled)
	closed, err := pgxpool.NewWithConfig(t.Context(), pool.Config())
	want(t, err, nil)
	closed.Close()
	if err := optimistic.RunInTx(t.Context(), closed, fn); err == nil {
		t.Error("closed pool: no error")
	}
}

func TestRunInTx_Panic(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	func() {
		defer func() {
			if recover() != "mine" {
				t.Error("the panic was swallowed")
			}
		}()
		_ = optimistic.RunInTx(t.Context(), pool, func(_ context.Context, tx pgx.Tx) error {
			bump(t, tx, 1)
			panic("mine")
		})
	}()
	exec(t, pool, `SELECT FROM accounts WHERE id = 1 AND version = 1 FOR UPDATE NOWAIT`)
}
