package optimistic_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/optimistic"
)

// newSQL is a *sql.DB with one connection, so that one that isn't given back
// stops the test, on a new database.
func newSQL(t *testing.T, script string) (*sql.DB, string) {
	t.Helper()
	dsn := pgtest.EmptyDSN(t)
	db, err := sql.Open("pgx", dsn)
	want(t, err, nil)
	t.Cleanup(func() { _ = db.Close() })
	db.SetMaxOpenConns(1)
	_, err = db.ExecContext(t.Context(), script)
	want(t, err, nil)
	return db, dsn
}

func TestSQL(t *testing.T) {
	t.Parallel()
	db, dsn := newSQL(t, createAccounts)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	other := pgtest.PoolOn(t, dsn)
	tx, err := db.BeginTx(ctx, nil)
	want(t, err, nil)
	for i, d := range []optimistic.DB{optimistic.SQLTx(tx), optimistic.SQL(db)} {
		id := int64(100 + i)
		roundTrip(t, d, accounts, id, account{ID: id}, account{ID: id, Balance: 5})
		calls := 0
		_, err := accounts.Update(ctx, d, 1, bumpTwice(t, other, &calls, deposit(1)))
		if err != nil || calls != 3 {
			t.Errorf("%T: %d calls, %v", d, calls, err)
		}
		_, err = accounts.CompareAndSet(ctx, d, 1, 1, account{})
		want(t, err, optimistic.ErrConflict)
		want(t, optimistic.Exec(ctx, d, `UPDATE accounts SET version = version + 1 WHERE id = $1`, 2), nil)
		now, err := accounts.Get(ctx, d, 2)
		want(t, err, nil)
		_, err = accounts.CompareAndSetMany(ctx, d, []change{{2, now.Version, account{Balance: 7}}})
		want(t, err, nil)
		want(t, accounts.Verify(ctx, d), nil)
		if found, err := accounts.Inspect(ctx, d); err != nil || len(found) != 2 {
			t.Errorf("found %v, %v", found, err)
		}
		if i == 0 {
			// What was done belongs to the owner of the transaction.
			var balance int64
			want(t, tx.QueryRowContext(ctx, `SELECT balance FROM accounts WHERE id = 2`).Scan(&balance), nil)
			if balance != 7 || stored(t, other, 2).Value.Balance != 100 {
				t.Errorf("in the transaction %d, outside %+v", balance, stored(t, other, 2))
			}
			want(t, tx.Rollback(), nil)
			_, err := accounts.Get(ctx, d, 1)
			want(t, err, sql.ErrTxDone)
		}
	}
	if is := stored(t, other, 2); is.Value.Balance != 7 {
		t.Errorf("not committed: %+v", is)
	}
}

// Arrays, jsonb and NULLs come as they do from pgx, and not as database/sql
// would scan them.
func TestSQL_Types(t *testing.T) {
	t.Parallel()
	db, _ := newSQL(t, createDocuments)
	documents := optimistic.NewTable[document]("documents")
	tx, err := db.BeginTx(t.Context(), nil)
	want(t, err, nil)
	row, _, err := documents.Insert(t.Context(), optimistic.SQLTx(tx), nil, document{HTTPPath: "/", Tags: []string{"a", "b"}, Meta: map[string]string{"k": "v"}})
	want(t, err, nil)
	want(t, tx.Commit(), nil)
	row, err = documents.Get(t.Context(), optimistic.SQL(db), row.Value.DocID)
	if err != nil || len(row.Value.Tags) != 2 || row.Value.Meta["k"] != "v" || row.Value.By != nil {
		t.Errorf("%+v, %v", row, err)
	}
}

// A context that ends while a statement waits ends the transaction, and leaves
// the pool with connections that work.
func TestSQL_ContextEnds(t *testing.T) {
	t.Parallel()
	db, dsn := newSQL(t, createAccounts)
	other := pgtest.PoolOn(t, dsn)
	for _, inTx := range []bool{true, false} {
		blocker := begin(t, other, "")
		bump(t, blocker, 1)
		ctx, cancel := context.WithCancel(t.Context())
		d := optimistic.SQL(db)
		if inTx {
			tx, err := db.BeginTx(ctx, nil)
			want(t, err, nil)
			d = optimistic.SQLTx(tx)
		}
		done := make(chan error, 1)
		go func() {
			_, err := accounts.CompareAndSet(ctx, d, 1, 1, account{})
			done <- err
		}()
		waitBlocked(t, other, blocker, done)
		cancel()
		err := receive(t, done)
		want(t, err, context.Canceled)
		if errors.Is(err, optimistic.ErrUnknownCommit) == inTx {
			t.Errorf("in a transaction %v: %v", inTx, err)
		}
		want(t, blocker.Rollback(t.Context()), nil)
		if _, err := accounts.Get(t.Context(), optimistic.SQL(db), 1); err != nil {
			t.Errorf("afterwards: %v", err)
		}
	}
}

func TestSQL_BadInput(t *testing.T) {
	t.Parallel()
	for _, d := range []optimistic.DB{optimistic.SQL(nil), optimistic.SQLTx(nil), optimistic.SQL(sql.OpenDB(foreign{}))} {
		if _, err := accounts.Get(t.Context(), d, 1); err == nil {
			t.Errorf("%T: no error", d)
		}
		if _, err := accounts.CompareAndSet(t.Context(), d, 1, 1, account{}); err == nil || errors.Is(err, optimistic.ErrUnknownCommit) && d != nil {
			t.Errorf("%T: %v", d, err)
		}
	}
}

// A foreign driver is none of pgx's.
type foreign struct{}

func (foreign) Connect(context.Context) (driver.Conn, error) { return foreign{}, nil }
func (foreign) Driver() driver.Driver                        { return stdlib.GetDefaultDriver() }
func (foreign) Prepare(string) (driver.Stmt, error)          { return nil, errors.ErrUnsupported }
func (foreign) Close() error                                 { return nil }
func (foreign) Begin() (driver.Tx, error)                    { return nil, errors.ErrUnsupported }
