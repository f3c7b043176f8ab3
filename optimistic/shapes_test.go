package optimistic_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/optimistic"
)

// A line's key has two columns, of which the table is partitioned by one.
type line struct {
	OrderID int64
	Line    int
	Text    string
}

func TestTable_CompositeKey(t *testing.T) {
	t.Parallel()
	pool := newPool(t, `
		CREATE TABLE lines (order_id bigint, line int, text text NOT NULL, version bigint NOT NULL, PRIMARY KEY (order_id, line))
			PARTITION BY HASH (order_id);
		CREATE TABLE lines_0 PARTITION OF lines FOR VALUES WITH (MODULUS 2, REMAINDER 0);
		CREATE TABLE lines_1 PARTITION OF lines FOR VALUES WITH (MODULUS 2, REMAINDER 1)`)
	ctx := t.Context()
	lines := optimistic.NewTable[line]("lines", optimistic.WithKey("order_id", "line"))
	roundTrip(t, pool, lines, optimistic.Key{1, 2}, line{1, 2, "a"}, line{1, 2, "b"})

	var changes []optimistic.Change[line]
	for n := range 6 {
		key := optimistic.Key{int64(n % 3), n}
		row, created, err := lines.Insert(ctx, pool, key, line{Text: "old"})
		if err != nil || !created {
			t.Fatal(created, err)
		}
		changes = append(changes, optimistic.Change[line]{Key: key, Version: row.Version, Value: line{Text: "new"}})
	}
	outcomes, err := lines.CompareAndSetMany(ctx, pool, changes)
	want(t, err, nil)
	for i, o := range outcomes {
		if o.Row.Value != (line{int64(i % 3), i, "new"}) {
			t.Errorf("%d: %+v", i, o.Row)
		}
	}
	// Neighbours, which share one column of the key, are other rows.
	_, err = lines.Get(ctx, pool, optimistic.Key{1, 2})
	want(t, err, optimistic.ErrNotFound)

	for _, key := range []any{1, optimistic.Key{1}, optimistic.Key{1, 2, 3}, optimistic.Key{1, nil}, optimistic.Key{}, nil} {
		if _, err := lines.Get(ctx, noSQL{t}, key); err == nil {
			t.Errorf("key %v: no error", key)
		}
	}
	for _, opts := range [][]optimistic.Option{
		{optimistic.WithKey()}, {optimistic.WithKey("a", "a")}, {optimistic.WithKey("a", "version")}, {optimistic.WithLive(" ")},
	} {
		if _, err := optimistic.NewTable[line]("lines", opts...).Get(ctx, noSQL{t}, optimistic.Key{1, 2}); err == nil {
			t.Error("no error for bad options")
		}
	}
}

// A note is deleted softly.
type note struct {
	ID        int64
	Text      string
	DeletedAt *time.Time
}

func TestTable_SoftDelete(t *testing.T) {
	t.Parallel()
	pool := newPool(t, `
		CREATE TABLE notes (id bigint NOT NULL, text text NOT NULL, deleted_at timestamptz, version bigint NOT NULL);
		CREATE UNIQUE INDEX ON notes (id) WHERE deleted_at IS NULL`)
	ctx := t.Context()
	notes := optimistic.NewTable[note]("notes", optimistic.WithLive("text <> 'dead'"))
	_, _, err := notes.Insert(ctx, pool, 1, note{})
	wantState(t, err, "42P10") // the index holds for another condition
	notes = optimistic.NewTable[note]("notes", optimistic.WithLive("deleted_at IS NULL"))
	roundTrip(t, pool, notes, int64(1), note{ID: 1, Text: "a"}, note{ID: 1, Text: "b"})

	first, _, err := notes.Insert(ctx, pool, 2, note{Text: "first"})
	want(t, err, nil)
	gone := first.Value
	at := time.Now()
	gone.DeletedAt = &at
	dead, err := notes.CompareAndSet(ctx, pool, 2, first.Version, gone)
	want(t, err, nil)
	if dead.Value.DeletedAt == nil || dead.Version != first.Version+1 {
		t.Errorf("deleted: %+v", dead)
	}
	everyMethod(ctx, notes, pool, 2, func(method string, err error) {
		if method != "Insert" && !errors.Is(err, optimistic.ErrNotFound) {
			t.Errorf("%s of a dead row: %v", method, err)
		}
	})
	if n := query[int64](t, pool, `SELECT count(*) FROM notes WHERE id = 2 AND deleted_at IS NOT NULL`); n != 1 {
		t.Fatalf("%d dead rows", n)
	}
	if n := query[int64](t, pool, `SELECT count(*) FROM notes WHERE id = 2 AND deleted_at IS NULL`); n != 1 {
		t.Errorf("%d live rows", n)
	}

	// Where the key is unique among the dead too, one of them is in the way.
	exec(t, pool, `DELETE FROM notes; CREATE UNIQUE INDEX ON notes (id); INSERT INTO notes VALUES (3, 'x', now(), 1)`)
	_, created, err := notes.Insert(ctx, pool, 3, note{})
	if created || !errors.Is(err, optimistic.ErrVetoed) {
		t.Errorf("created %v, %v", created, err)
	}
}

// What row security hides from a role is not there for it, and what it hides
// from the role's writes is vetoed.
func TestTable_RowSecurity(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts+`; INSERT INTO accounts VALUES (3, 100, 1);
		ALTER TABLE accounts ENABLE ROW LEVEL SECURITY;
		CREATE POLICY look ON accounts FOR SELECT USING (id <> 3);
		CREATE POLICY change ON accounts FOR UPDATE USING (id = 1);
		CREATE POLICY remove ON accounts FOR DELETE USING (id = 1)`)
	tx := begin(t, pool, pgx.ReadCommitted)
	exec(t, tx, `CREATE ROLE clerk; GRANT SELECT, UPDATE, DELETE ON accounts TO clerk; SET LOCAL ROLE clerk`)
	for id, reason := range map[int64]error{1: nil, 2: optimistic.ErrVetoed, 3: optimistic.ErrNotFound} {
		_, err := accounts.CompareAndSet(t.Context(), tx, id, 1, account{})
		want(t, err, reason)
		version := int64(1)
		if reason == nil {
			version = 2
		}
		_, err = accounts.Touch(t.Context(), tx, id, version)
		want(t, err, reason)
		outcomes, err := accounts.CompareAndSetMany(t.Context(), tx, []change{{id, version + version/2, account{}}})
		want(t, err, reason)
		wantOutcomes(t, outcomes, reason)
		if reason != nil {
			want(t, accounts.Delete(t.Context(), tx, id, 1), reason)
		}
	}
	usable(t, tx)
}

// Generated and identity columns are read, never written.
func TestTable_ReadOnlyColumns(t *testing.T) {
	t.Parallel()
	pool := newPool(t, `
		CREATE TABLE items (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, serial bigint GENERATED BY DEFAULT AS IDENTITY,
			net int NOT NULL, gross int GENERATED ALWAYS AS (net * 2) STORED, version bigint NOT NULL)`)
	type item struct {
		ID     int64
		Serial int64 `db:"serial,readonly"`
		Net    int
		Gross  int `db:"gross,readonly"`
	}
	items := optimistic.NewTable[item]("items")
	row, created, err := items.Insert(t.Context(), pool, nil, item{Serial: 77, Net: 5, Gross: 1})
	if err != nil || !created {
		t.Fatal(created, err)
	}
	if diff := cmp.Diff(item{1, 1, 5, 10}, row.Value); diff != "" {
		t.Error(diff)
	}
	row, err = items.Update(t.Context(), pool, 1, func(i item) (item, error) {
		i.Net, i.Gross, i.Serial = 6, 0, 0
		return i, nil
	})
	want(t, err, nil)
	if diff := cmp.Diff(item{1, 1, 6, 12}, row.Value); diff != "" {
		t.Error(diff)
	}
}

func TestCompareAndSetMany_O07_Quoting(t *testing.T) {
	t.Parallel()
	pool := newPool(t, `
		CREATE SCHEMA "My.Schema";
		CREATE TABLE "My.Schema"."T" ("Select" text, "a""b; --" int, "k0" int, "Version No" bigint NOT NULL, PRIMARY KEY ("Select", "a""b; --"));
		INSERT INTO "My.Schema"."T" VALUES ('''; --', 1, 2, 3)`)
	type odd struct {
		K0 int
	}
	table := optimistic.NewTable[odd](`"My.Schema"."T"`, optimistic.WithKey("Select", `a"b; --`), optimistic.WithVersion("Version No"))
	outcomes, err := table.CompareAndSetMany(t.Context(), pool, []optimistic.Change[odd]{{Key: optimistic.Key{"'; --", 1}, Version: 3, Value: odd{9}}})
	if err != nil || outcomes[0].Row.Version != 4 {
		t.Fatal(outcomes, err)
	}
	if n := query[int](t, pool, `SELECT k0 FROM "My.Schema"."T"`); n != 9 {
		t.Errorf("k0 is %d", n)
	}
}
