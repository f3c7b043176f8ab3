package optimistic_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/optimistic"
)

// Behind a pooler in transaction mode statements can't be prepared.
func TestTable_QueryExecModes(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		pool := newPool(t, createAccounts, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
		roundTrip(t, pool, accounts, int64(9), account{ID: 9, Balance: 1}, account{ID: 9, Balance: 2})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		for _, db := range []optimistic.DB{pool, begin(t, pool, pgx.ReadCommitted)} {
			calls := 0
			_, err := accounts.Update(ctx, db, 1, bumpTwice(t, pool, &calls, deposit(1)))
			if err != nil || calls != 3 {
				t.Errorf("%v: %d calls, %v", mode, calls, err)
			}
		}
		want(t, optimistic.Exec(ctx, pool, `UPDATE accounts SET version = version + 1 WHERE id = $1 AND version = $2`, 2, 1), nil)
	}
}

// A ledger lists the first words of all that is sent.
type ledger struct{ sent []string }

func (l *ledger) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	words := strings.Fields(data.SQL)
	l.sent = append(l.sent, strings.ToUpper(words[0]))
	return ctx
}

func (*ledger) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// The statements that the documentation promises, and no others.
func TestStatements(t *testing.T) {
	t.Parallel()
	var l ledger
	pool := newPool(t, createAccounts, func(c *pgxpool.Config) { c.ConnConfig.Tracer = &l })
	other := newSamePool(t, pool)
	ctx := t.Context()
	deadline, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	const set = `UPDATE accounts SET version = version + 1 WHERE id = $1 AND version = $2`
	escalate := func(ctx context.Context) func(optimistic.DB) {
		return func(db optimistic.DB) {
			calls := 0
			_, err := accounts.Update(ctx, db, 1, bumpTwice(t, other, &calls, deposit(1)))
			want(t, err, nil)
		}
	}
	for _, c := range []struct {
		name          string
		do            func(optimistic.DB)
		onPool, inATx string
	}{
		{"Get", func(db optimistic.DB) { _, _ = accounts.Get(ctx, db, 1) }, "SELECT", "SELECT"},
		{"Insert", func(db optimistic.DB) { _, _, _ = accounts.Insert(ctx, db, 3, account{}) }, "INSERT", "INSERT SELECT"},
		{"CompareAndSet", func(db optimistic.DB) { _, _ = accounts.CompareAndSet(ctx, db, 2, 1, account{}) }, "UPDATE", "UPDATE SELECT"},
		{"Touch", func(db optimistic.DB) { _, _ = accounts.Touch(ctx, db, 2, 9) }, "UPDATE SELECT", "UPDATE SELECT"},
		{"CompareAndSetMany", func(db optimistic.DB) {
			_, _ = accounts.CompareAndSetMany(ctx, db, []change{{1, 9, account{}}, {2, 9, account{}}})
		}, "WITH", "WITH"},
		{"Delete", func(db optimistic.DB) { _ = accounts.Delete(ctx, db, 2, 2) }, "DELETE", "DELETE SELECT"},
		{"Update", func(db optimistic.DB) { _, _ = accounts.Update(ctx, db, 1, deposit(1)) }, "SELECT UPDATE", "SELECT UPDATE"},
		{"Update under lock", escalate(ctx),
			"SELECT UPDATE SELECT UPDATE BEGIN SELECT UPDATE COMMIT",
			"SELECT UPDATE SELECT UPDATE SAVEPOINT SELECT UPDATE RELEASE"},
		{"Update under lock with a deadline", escalate(deadline),
			"SELECT UPDATE SELECT UPDATE BEGIN WITH SELECT UPDATE COMMIT",
			"SELECT UPDATE SELECT UPDATE SAVEPOINT WITH SELECT SELECT UPDATE RELEASE"},
		{"Exec", func(db optimistic.DB) { _ = optimistic.Exec(ctx, db, set, 2, 1) }, "BEGIN UPDATE ROLLBACK", "UPDATE"},
	} {
		l.sent = nil
		c.do(pool)
		if diff := cmp.Diff(c.onPool, strings.Join(l.sent, " ")); diff != "" {
			t.Errorf("%s on a pool: %s", c.name, diff)
		}
		tx := begin(t, pool, pgx.ReadCommitted)
		l.sent = nil
		c.do(tx)
		if diff := cmp.Diff(c.inATx, strings.Join(l.sent, " ")); diff != "" {
			t.Errorf("%s in a transaction: %s", c.name, diff)
		}
		want(t, tx.Rollback(ctx), nil)
	}
}
