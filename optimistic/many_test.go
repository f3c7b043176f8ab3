package optimistic_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/optimistic"
)

type change = optimistic.Change[account]

// manyAccounts are accounts 1 to 200, with nothing in them, at version 1.
const manyAccounts = `
	CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL, version bigint NOT NULL);
	INSERT INTO accounts SELECT n, 0, 1 FROM generate_series(1, 200) n`

// wantOutcomes compares the errors of the outcomes, by their meaning.
func wantOutcomes[T any](t *testing.T, outcomes []optimistic.Outcome[T], errs ...error) {
	t.Helper()
	if len(outcomes) != len(errs) {
		t.Fatalf("%d outcomes, want %d", len(outcomes), len(errs))
	}
	for i, o := range outcomes {
		if !errors.Is(o.Err, errs[i]) || (errs[i] == nil) != (o.Err == nil) {
			t.Errorf("outcome %d is %v, want %v", i, o.Err, errs[i])
		}
	}
}

func TestCompareAndSetMany(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts+`; INSERT INTO accounts VALUES (3, 100, 7), (4, 100, 1)`)
	ctx := t.Context()
	changes := []change{{3, 7, account{Balance: 30}}, {1, 1, account{Balance: 10}}, {2, 1, account{Balance: 20}}}
	for _, db := range []optimistic.DB{begin(t, pool, ""), pool} {
		outcomes, err := accounts.CompareAndSetMany(ctx, db, changes)
		want(t, err, nil)
		if diff := cmp.Diff([]optimistic.Outcome[account]{
			{Row: optimistic.Versioned[account]{Value: account{3, 30}, Version: 8}},
			{Row: optimistic.Versioned[account]{Value: account{1, 10}, Version: 2}},
			{Row: optimistic.Versioned[account]{Value: account{2, 20}, Version: 2}},
		}, outcomes); diff != "" {
			t.Error(diff)
		}
		if tx, ok := db.(pgx.Tx); ok {
			want(t, tx.Rollback(ctx), nil)
		}
	}

	// One stale, one missing: nothing is written, and each says why.
	changes = []change{{1, 2, account{Balance: 11}}, {3, 7, account{Balance: 31}}, {99, 1, account{}}}
	for _, db := range []optimistic.DB{pool, begin(t, pool, "")} {
		outcomes, err := accounts.CompareAndSetMany(ctx, db, changes)
		want(t, err, optimistic.ErrConflict)
		wantOutcomes(t, outcomes, optimistic.ErrHeldBack, optimistic.ErrConflict, optimistic.ErrNotFound)
		var conflict *optimistic.ConflictError
		if !errors.As(outcomes[1].Err, &conflict) || conflict.Actual != 8 || conflict.Current != (account{3, 30}) || outcomes[1].Row.Version != 8 {
			t.Errorf("conflict %+v, row %+v", conflict, outcomes[1].Row)
		}
		if is := stored(t, db, 1); is.Version != 2 {
			t.Errorf("written: %+v", is)
		}
		if tx, ok := db.(pgx.Tx); ok {
			want(t, tx.Rollback(ctx), nil)
		}
	}

	// The same, each by itself.
	outcomes, err := accounts.CompareAndSetMany(ctx, pool, changes, optimistic.Partial())
	want(t, err, optimistic.ErrConflict)
	wantOutcomes(t, outcomes, nil, optimistic.ErrConflict, optimistic.ErrNotFound)
	if is := stored(t, pool, 1); is.Version != 3 || is.Value.Balance != 11 {
		t.Errorf("not written: %+v", is)
	}
}

// Any number of rows is one statement and, once the server has prepared it, one
// round trip: whatever is sent is sent before anything comes back. A row at a
// time, the control, it is one for each.
func TestCompareAndSetMany_OneRoundTrip(t *testing.T) {
	t.Parallel()
	var l ledger
	var w wire
	pool := newPool(t, `CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL, version bigint NOT NULL);
		INSERT INTO accounts SELECT n, 0, 1 FROM generate_series(1, 1000) n`,
		func(c *pgxpool.Config) { c.ConnConfig.Tracer, c.MaxConns = &l, 1 }, w.configure)
	turns := func(do func()) int64 {
		before := w.turns.Load()
		l.sent = nil
		do()
		return w.turns.Load() - before
	}
	version := int64(0)
	for _, size := range []int{1000, 65, 64, 63, 3, 2, 1} {
		// Sizes up to a power of two share its text.
		for _, prepared := range []bool{size == 63, true} {
			version++
			var changes []change
			for n := range size {
				changes = append(changes, change{int64(n + 1), version, account{Balance: version}})
			}
			var outcomes []optimistic.Outcome[account]
			took := turns(func() {
				var err error
				outcomes, err = accounts.CompareAndSetMany(t.Context(), pool, changes)
				want(t, err, nil)
			})
			if prepared && took != 1 || !prepared && took != 2 || len(l.sent) != 1 {
				t.Errorf("%d rows, prepared %v: %d round trips, sent %v", size, prepared, took, l.sent)
			}
			for i, o := range outcomes {
				if o.Row.Value != (account{int64(i + 1), version}) || o.Row.Version != version+1 {
					t.Fatalf("%d rows: outcome %d is %+v", size, i, o)
				}
			}
		}
	}

	one := func(id int64) {
		_, err := accounts.CompareAndSet(t.Context(), pool, id, stored(t, pool, id).Version, account{})
		want(t, err, nil)
	}
	one(1) // prepares
	took := turns(func() {
		for id := range int64(10) {
			one(id + 1)
		}
	})
	if took != 10*3 { // stored reads twice
		t.Errorf("control: %d round trips", took)
	}
}

func TestCompareAndSetMany_BadInput(t *testing.T) {
	t.Parallel()
	for name, changes := range map[string][]change{
		"a key twice":           {{1, 1, account{}}, {2, 1, account{}}, {int64(1), 1, account{}}},
		"a key that is nil":     {{nil, 1, account{}}},
		"a composite key":       {{optimistic.Key{1, 2}, 1, account{}}},
		"more than is possible": make([]change, 0, 30000),
	} {
		if name == "more than is possible" {
			for n := range cap(changes) {
				changes = append(changes, change{n, 1, account{}})
			}
		}
		if outcomes, err := accounts.CompareAndSetMany(t.Context(), noSQL{t}, changes); err == nil || outcomes != nil {
			t.Errorf("%s: %v, %v", name, outcomes, err)
		}
	}
	outcomes, err := accounts.CompareAndSetMany(t.Context(), noSQL{t}, nil)
	if outcomes != nil || err != nil {
		t.Errorf("no change at all: %v, %v", outcomes, err)
	}
}

// A veto shows after other rows have been written: all are taken back.
func TestCompareAndSetMany_Vetoed(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts+`;
		CREATE FUNCTION veto() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			RETURN CASE WHEN NEW.id <> 2 THEN NEW END; END $$;
		CREATE TRIGGER veto BEFORE UPDATE ON accounts FOR EACH ROW EXECUTE FUNCTION veto()`)
	changes := []change{{1, 1, account{Balance: 1}}, {2, 1, account{Balance: 2}}}
	outcomes, err := accounts.CompareAndSetMany(t.Context(), pool, changes)
	want(t, err, optimistic.ErrVetoed)
	wantOutcomes(t, outcomes, optimistic.ErrHeldBack, optimistic.ErrVetoed)
	if is := stored(t, pool, 1); is.Version != 1 {
		t.Errorf("written: %+v", is)
	}
	outcomes, err = accounts.CompareAndSetMany(t.Context(), pool, changes, optimistic.Partial())
	want(t, err, optimistic.ErrVetoed)
	wantOutcomes(t, outcomes, nil, optimistic.ErrVetoed)
	if is := stored(t, pool, 1); is.Version != 2 {
		t.Errorf("not written: %+v", is)
	}
}

// A row that changes while the statement waits for its lock is compared as it is
// then, and nothing of the others is written. Above READ COMMITTED the caller's
// transaction has to run again; a default of that kind doesn't reach the caller.
func TestCompareAndSetMany_Waits(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		pool := newPool(t, createAccounts, runtimeParam("default_transaction_isolation", level))
		for _, inTx := range []bool{false, true} {
			first, second := stored(t, pool, 1), stored(t, pool, 2)
			tx := begin(t, pool, pgx.ReadCommitted)
			bump(t, tx, 2)
			var db optimistic.DB = pool
			if inTx {
				db = begin(t, pool, "")
			}
			var outcomes []optimistic.Outcome[account]
			done := make(chan error, 1)
			go func() {
				var err error
				outcomes, err = accounts.CompareAndSetMany(t.Context(), db, []change{{2, second.Version, account{}}, {1, first.Version, account{}}})
				done <- err
			}()
			waitBlocked(t, pool, tx, done)
			commit(t, tx)
			err := receive(t, done)
			if inTx && level != "read committed" {
				want(t, err, optimistic.ErrRetryOutside)
			} else {
				want(t, err, optimistic.ErrConflict)
				wantOutcomes(t, outcomes, optimistic.ErrConflict, optimistic.ErrHeldBack)
				if outcomes[0].Row.Version != second.Version+1 {
					t.Errorf("%s: the row now is %+v", level, outcomes[0].Row)
				}
			}
			if tx, ok := db.(pgx.Tx); ok {
				want(t, tx.Rollback(t.Context()), nil)
			}
			if stored(t, pool, 1) != first {
				t.Errorf("%s: account 1 was written", level)
			}
		}
	}
}

// Writers of many rows in random order: with the lock in key order none meets a
// deadlock, with an UPDATE that joins the same list some do.
func TestCompareAndSetMany_NoDeadlock(t *testing.T) {
	t.Parallel()
	const writers, rows = 8, 50
	pool := newPool(t, manyAccounts, runtimeParam("deadlock_timeout", "10ms"))
	writeAll := func(limit time.Duration, set func(ctx context.Context, changes []change) error) (calls, deadlocks int64) {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		var called, dead atomic.Int64
		parallel(writers, func(int) {
			for ctx.Err() == nil {
				var changes []change
				for _, n := range rand.Perm(200)[:rows] {
					changes = append(changes, change{int64(n + 1), 0, account{}})
				}
				versions := map[int64]int64{}
				found, err := pool.Query(t.Context(), `SELECT id, version FROM accounts`)
				if err != nil {
					t.Error(err)
					return
				}
				var id, version int64
				if _, err := pgx.ForEachRow(found, []any{&id, &version}, func() error { versions[id] = version; return nil }); err != nil {
					t.Error(err)
					return
				}
				for i := range changes {
					changes[i].Version = versions[changes[i].Key.(int64)]
				}
				called.Add(1)
				switch err := set(t.Context(), changes); {
				case wantedState(err, "40P01"):
					dead.Add(1)
				case err != nil && !errors.Is(err, optimistic.ErrConflict):
					t.Error(err)
					return
				}
			}
		})
		return called.Load(), dead.Load()
	}
	limit := pgtest.Lasting(10*time.Second, 3*time.Second, time.Second)
	var written atomic.Int64
	many := func(opts ...optimistic.ManyOption) func(context.Context, []change) error {
		return func(ctx context.Context, changes []change) error {
			outcomes, err := accounts.CompareAndSetMany(ctx, pool, changes, opts...)
			for _, o := range outcomes {
				if o.Err == nil {
					written.Add(1)
				}
			}
			return err
		}
	}
	for name, opts := range map[string][]optimistic.ManyOption{"all or none": nil, "partial": {optimistic.Partial()}} {
		calls, deadlocks := writeAll(limit, many(opts...))
		if deadlocks != 0 || calls < writers {
			t.Errorf("%s: %d deadlocks in %d calls", name, deadlocks, calls)
		}
		t.Logf("%s: %d calls in %v, no deadlock", name, calls, limit)
	}
	if sum := query[int64](t, pool, `SELECT sum(version - 1)::bigint FROM accounts`); sum != written.Load() || sum == 0 {
		t.Errorf("versions count %d updates, reported were %d", sum, written.Load())
	}

	// The control: the same list, joined without an order, by a plan that takes
	// the rows as they are listed. A hash join would happen to take them as they
	// are stored.
	unordered := newPoolOn(t, pool, func(c *pgxpool.Config) {
		for _, plan := range []string{"enable_hashjoin", "enable_mergejoin", "enable_seqscan", "enable_bitmapscan"} {
			c.ConnConfig.RuntimeParams[plan] = "off"
		}
	})
	for range 10 {
		calls, deadlocks := writeAll(limit, func(ctx context.Context, changes []change) error {
			var ids, versions []int64
			for _, c := range changes {
				ids, versions = append(ids, c.Key.(int64)), append(versions, c.Version)
			}
			_, err := unordered.Exec(ctx, `UPDATE accounts t SET balance = 0, version = t.version + 1
				FROM unnest($1::bigint[], $2::bigint[]) c (id, version) WHERE t.id = c.id AND t.version = c.version`, ids, versions)
			return err
		})
		t.Logf("without the order: %d deadlocks in %d calls in %v", deadlocks, calls, limit)
		if deadlocks > 0 {
			return
		}
	}
	t.Error("the control met no deadlock")
}

// Types that an array of parameters would stumble over: arrays, jsonb, enums,
// domains, NULLs, and a key that is one of them.
func TestCompareAndSetMany_Types(t *testing.T) {
	t.Parallel()
	pool := newPool(t, `
		CREATE TYPE mood AS ENUM ('happy', 'sad');
		CREATE DOMAIN amount AS numeric(10, 2) CHECK (VALUE >= 0);
		CREATE TABLE things (id mood PRIMARY KEY, tags text[], meta jsonb, cost amount, at timestamptz, raw bytea,
			twice numeric GENERATED ALWAYS AS (cost * 2) STORED, version bigint NOT NULL)`)
	type thing struct {
		ID    string
		Tags  []string
		Meta  map[string]any
		Cost  *string
		At    *time.Time
		Raw   []byte
		Twice *string `db:"twice,readonly"`
	}
	things := optimistic.NewTable[thing]("things")
	cost, twice, at := "12.50", "25.00", time.UnixMicro(1e15).UTC()
	full := thing{"happy", []string{"a", "b,c"}, map[string]any{"k": []any{"v"}}, &cost, &at, []byte{0, 1}, &twice}
	_, _, err := things.Insert(t.Context(), pool, "happy", full)
	want(t, err, nil)
	_, _, err = things.Insert(t.Context(), pool, "sad", thing{})
	want(t, err, nil)
	changes := make([]optimistic.Change[thing], 2)
	for i, id := range []string{"sad", "happy"} {
		row, err := things.Get(t.Context(), pool, id)
		want(t, err, nil)
		changes[i] = optimistic.Change[thing]{Key: id, Version: row.Version}
	}
	changes[0].Value = full
	outcomes, err := things.CompareAndSetMany(t.Context(), pool, changes)
	want(t, err, nil)
	now := full
	now.ID = "sad"
	ignoreZone := cmp.Comparer(func(a, b time.Time) bool { return a.Equal(b) })
	for i, w := range []thing{now, {ID: "happy"}} {
		if diff := cmp.Diff(w, outcomes[i].Row.Value, ignoreZone); diff != "" {
			t.Errorf("outcome %d: %s", i, diff)
		}
	}
}

func TestCompareAndSetMany_QueryExecModes(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		pool := newPool(t, manyAccounts, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode })
		outcomes, err := accounts.CompareAndSetMany(t.Context(), pool, []change{{int64(3), 1, account{Balance: -3}}, {int64(1), 1, account{Balance: 1}}, {int64(2), 1, account{}}})
		if err != nil || outcomes[0].Row.Value != (account{3, -3}) {
			t.Errorf("%v: %+v, %v", mode, outcomes, err)
		}
	}
}

func TestCompareAndSetMany_UnknownCommit(t *testing.T) {
	t.Parallel()
	var w wire
	pool := newPool(t, createAccounts)
	cut := newPoolOn(t, pool, w.configure)
	usable(t, cut)
	w.cut.Store(true)
	_, err := accounts.CompareAndSetMany(t.Context(), cut, []change{{1, 1, account{}}})
	want(t, err, optimistic.ErrUnknownCommit)
}

// A touch with an old version is a conflict. The control is one that writes back
// the version it remembers: the row passes through a version it had before, and
// a stale writer gets through.
func TestTouch_O02_Stale(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	for _, remembering := range []bool{false, true} {
		a := stored(t, pool, 2)
		bump(t, pool, 2)
		stale := stored(t, pool, 2)
		bump(t, pool, 2)
		if remembering {
			exec(t, pool, `UPDATE accounts SET version = $1 + 1 WHERE id = 2`, a.Version)
		} else {
			_, err := accounts.Touch(t.Context(), pool, 2, a.Version)
			want(t, err, optimistic.ErrConflict)
		}
		_, err := accounts.CompareAndSet(t.Context(), pool, 2, stale.Version, account{})
		if (err == nil) != remembering {
			t.Errorf("remembering %v: the stale write: %v", remembering, err)
		}
	}

	a, err := accounts.Get(t.Context(), pool, 1)
	want(t, err, nil)
	_, err = accounts.CompareAndSet(t.Context(), pool, 1, a.Version, account{Balance: 5}) // B was faster
	want(t, err, nil)
	now, err := accounts.Touch(t.Context(), pool, 1, a.Version)
	want(t, err, optimistic.ErrConflict)
	if is := stored(t, pool, 1); is.Version != a.Version+1 || now != is {
		t.Errorf("after a stale touch there is %+v, returned was %+v", is, now)
	}
	now, err = accounts.Touch(t.Context(), pool, 1, now.Version)
	want(t, err, nil)
	if now != stored(t, pool, 1) || now.Version != a.Version+2 || now.Value.Balance != 5 {
		t.Errorf("touched: %+v", now)
	}
	_, err = accounts.Touch(t.Context(), pool, 9, 1)
	want(t, err, optimistic.ErrNotFound)
}

// Whoever changes a part of an aggregate touches its root first: two that change
// different parts meet there. Without the touch both would succeed.
func TestTouch_Aggregate(t *testing.T) {
	t.Parallel()
	type order struct{ ID int64 }
	orders := optimistic.NewTable[order]("orders")
	for _, touching := range []bool{true, false} {
		pool := newPool(t, `
			CREATE TABLE orders (id bigint PRIMARY KEY, version bigint NOT NULL);
			CREATE TABLE lines (order_id bigint REFERENCES orders, line int, n int NOT NULL, PRIMARY KEY (order_id, line));
			INSERT INTO orders VALUES (1, 1); INSERT INTO lines VALUES (1, 1, 0), (1, 2, 0)`)
		root, err := orders.Get(t.Context(), pool, 1)
		want(t, err, nil)
		change := func(line int) error {
			return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				if touching {
					if _, err := orders.Touch(t.Context(), tx, 1, root.Version); err != nil {
						return err
					}
				}
				_, err := tx.Exec(t.Context(), `UPDATE lines SET n = n + 1 WHERE line = $1`, line)
				return err
			})
		}
		want(t, change(1), nil)
		if err := change(2); errors.Is(err, optimistic.ErrConflict) != touching {
			t.Errorf("touching %v: %v", touching, err)
		}
	}
}

func ExampleTable_CompareAndSetMany() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()

	outcomes, err := accounts.CompareAndSetMany(ctx, pool, []optimistic.Change[account]{
		{Key: 1, Version: 1, Value: account{Balance: 70}},
		{Key: 2, Version: 0, Value: account{Balance: 130}},
	})
	fmt.Println(errors.Is(err, optimistic.ErrConflict))
	fmt.Println(outcomes[0].Err)
	fmt.Println(outcomes[1].Row.Value.Balance, outcomes[1].Row.Version)
	// Output:
	// true
	// optimistic: held back because of another row
	// 100 1
}
