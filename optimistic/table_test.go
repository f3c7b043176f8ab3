package optimistic_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/optimistic"
)

// everyMethod calls each method of a table, and says which.
func everyMethod[T any](ctx context.Context, table *optimistic.Table[T], db optimistic.DB, key any, do func(string, error)) {
	var value T
	_, err := table.Get(ctx, db, key)
	do("Get", err)
	_, err = table.CompareAndSet(ctx, db, key, 1, value)
	do("CompareAndSet", err)
	_, err = table.Update(ctx, db, key, func(v T) (T, error) { return v, nil })
	do("Update", err)
	_, err = table.Touch(ctx, db, key, 1)
	do("Touch", err)
	_, err = table.CompareAndSetMany(ctx, db, []optimistic.Change[T]{{Key: key, Version: 1, Value: value}})
	do("CompareAndSetMany", err)
	do("Delete", table.Delete(ctx, db, key, 1))
	if key != nil {
		_, _, err = table.Insert(ctx, db, key, value)
		do("Insert", err)
	}
}

// refuses fails unless every method returns an error that has all the words in
// it, without any SQL.
func refuses[T any](t *testing.T, table *optimistic.Table[T], db optimistic.DB, key any, words ...string) {
	t.Helper()
	everyMethod(t.Context(), table, db, key, func(method string, err error) {
		if err == nil {
			t.Errorf("%s: no error", method)
			return
		}
		for _, word := range words {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("%s: error %q lacks %q", method, err, word)
			}
		}
	})
}

func TestNewTable_BadInput(t *testing.T) {
	t.Parallel()
	db := noSQL{t}
	for name, words := range map[string][]string{
		"":                                  {`""`, "empty"},
		"a.":                                {`"a."`, "empty"},
		".a":                                {`".a"`, "empty"},
		"db.schema.t":                       {"db.schema.t", "3 parts", "schema.table"},
		`"open`:                             {"not closed"},
		`a"b`:                               {`a\"b`, "quote a whole part"},
		`"a"b`:                              {"quote a whole part"},
		"nul\x00":                           {`nul\x00`, "NUL"},
		"bad\xff":                           {`bad\xff`, "UTF-8"},
		strings.Repeat("x", 64):             {"64 bytes", "63"},
		"s." + strings.Repeat("é", 32):      {"64 bytes", "63"},
		`"` + strings.Repeat("y", 70) + `"`: {"70 bytes"},
	} {
		refuses(t, optimistic.NewTable[account](name), db, 1, words...)
	}
	refuses(t, optimistic.NewTable[account]("t", optimistic.WithKey("")), db, 1, "key column", "empty")
	refuses(t, optimistic.NewTable[account]("t", optimistic.WithVersion("")), db, 1, "version column", "empty")
	refuses(t, optimistic.NewTable[account]("t", optimistic.WithVersion("id")), db, 1, `"id"`, "both")

	refuses(t, optimistic.NewTable[int]("t"), db, 1, "int is not a struct")
	refuses(t, optimistic.NewTable[*account]("t"), db, 1, "*optimistic_test.account is not a struct")
	refuses(t, optimistic.NewTable[any]("t"), db, 1, "not a struct")
	refuses(t, optimistic.NewTable[struct{}]("t"), db, 1, "no exported field")
	refuses(t, optimistic.NewTable[struct{ a int }]("t"), db, 1, "no exported field")
	refuses(t, optimistic.NewTable[struct {
		A int `db:""`
	}]("t"), db, 1, "field A", "empty")
	refuses(t, optimistic.NewTable[struct {
		A int `db:"x"`
		X int
	}]("t"), db, 1, `"x"`, "two fields")
	refuses(t, optimistic.NewTable[struct{ Version int32 }]("t"), db, 1, "version", "int32", "int64")

	refuses(t, (*optimistic.Table[account])(nil), db, 1, "NewTable")
	refuses(t, new(optimistic.Table[account]), db, 1, "NewTable")
	refuses(t, accounts, db, (*int64)(nil), "key is nil", "*int64")
	refuses(t, accounts, db, nil, "key is nil")
	refuses(t, accounts, nil, 1, "db is nil")
	refuses(t, accounts, (*pgxpool.Pool)(nil), 1, "db is nil", "*pgxpool.Pool")
	if _, err := accounts.Update(t.Context(), db, 1, nil); err == nil || !strings.Contains(err.Error(), "fn is nil") {
		t.Errorf("Update without fn: %v", err)
	}
}

func TestTable_ContextIsOver(t *testing.T) {
	t.Parallel()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	expired, cancel := context.WithDeadline(t.Context(), time.Unix(0, 0))
	defer cancel()
	for _, ctx := range []context.Context{cancelled, expired} {
		check := func(method string, err error) {
			if !errors.Is(err, ctx.Err()) {
				t.Errorf("%s: %v", method, err)
			}
		}
		everyMethod(ctx, accounts, noSQL{t}, 1, check)
		check("Exec", optimistic.Exec(ctx, noSQL{t}, "UPDATE t SET a = 1"))
	}
}

func TestGet(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	got, err := accounts.Get(t.Context(), pool, 1)
	want(t, err, nil)
	if diff := cmp.Diff(optimistic.Versioned[account]{Value: account{ID: 1, Balance: 100}, Version: 1}, got); diff != "" {
		t.Error(diff)
	}
	_, err = accounts.Get(t.Context(), pool, 3)
	want(t, err, optimistic.ErrNotFound)
	for _, word := range []string{"get", "accounts", "key 3"} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q lacks %q", err, word)
		}
	}
}

func TestTable_WrongSchema(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts+`;
		CREATE TABLE small (id int PRIMARY KEY, balance int, version int NOT NULL DEFAULT 1);
		CREATE TABLE loose (id int, balance int, version bigint NOT NULL DEFAULT 1);
		INSERT INTO loose VALUES (1, 1, 1), (1, 1, 1);
		CREATE TABLE computed (id int PRIMARY KEY, balance int, twice int GENERATED ALWAYS AS (balance * 2) STORED, version bigint NOT NULL)`)
	ctx := t.Context()
	check := func(err error, state string, words ...string) {
		t.Helper()
		if state != "" {
			wantState(t, err, state)
		}
		for _, word := range words {
			if err == nil || !strings.Contains(err.Error(), word) {
				t.Errorf("error %v lacks %q", err, word)
			}
		}
	}
	_, err := optimistic.NewTable[account]("Accounts").Get(ctx, pool, 1)
	check(err, "42P01", "Accounts", "lower case")
	_, err = optimistic.NewTable[struct{ Owner string }]("accounts").Get(ctx, pool, 1)
	check(err, "42703", "owner", "db tag")
	_, err = optimistic.NewTable[account]("accounts", optimistic.WithVersion("rev")).Get(ctx, pool, 1)
	check(err, "42703", "rev", "WithVersion", "ADD COLUMN version bigint NOT NULL DEFAULT 1")
	_, _, err = optimistic.NewTable[account]("small").Insert(ctx, pool, 1, account{})
	check(err, "22003", "bigint")
	_, _, err = optimistic.NewTable[struct{ Twice int }]("computed").Insert(ctx, pool, 1, struct{ Twice int }{1})
	check(err, "428C9", `db:"total,readonly"`)
	_, err = optimistic.NewTable[struct{ Balance bool }]("accounts").Get(ctx, pool, 1)
	check(err, "", "balance", "bool")

	// A key that isn't one: reads refuse before anything is changed, and writes
	// say what they met.
	loose := optimistic.NewTable[account]("loose")
	_, _, err = loose.Insert(ctx, pool, 2, account{})
	check(err, "42P10", "UNIQUE")
	_, err = loose.Get(ctx, pool, 1)
	check(err, "", "2 rows", "UNIQUE")
	_, err = loose.Update(ctx, pool, 1, deposit(1))
	check(err, "", "2 rows", "UNIQUE")
	if n := query[int64](t, pool, `SELECT count(*) FROM loose WHERE version = 1`); n != 2 {
		t.Errorf("%d rows are as they were, want 2", n)
	}
	_, err = loose.CompareAndSet(ctx, pool, 1, 1, account{})
	check(err, "", "2 rows", "UNIQUE")
	check(loose.Delete(ctx, pool, 1, 2), "", "2 rows", "UNIQUE")
}

func TestTable_O01_NullVersion(t *testing.T) {
	t.Parallel()
	pool := newPool(t, `
		CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL, version bigint);
		INSERT INTO accounts VALUES (1, 100, NULL)`)
	type withVersion struct{ ID, Balance, Version int64 }
	check := func(method string, err error) {
		if method == "Insert" {
			method = "Insert on the row that is there"
		}
		if err == nil || errors.Is(err, optimistic.ErrConflict) || errors.Is(err, optimistic.ErrVetoed) || errors.Is(err, optimistic.ErrNotFound) {
			t.Errorf("%s: %v, want an error of its own", method, err)
			return
		}
		for _, word := range []string{`"version" is NULL`, "SET NOT NULL", "accounts", "1"} {
			if !strings.Contains(err.Error(), word) {
				t.Errorf("%s: error %q lacks %q", method, err, word)
			}
		}
	}
	everyMethod(t.Context(), accounts, pool, 1, check)
	everyMethod(t.Context(), optimistic.NewTable[withVersion]("accounts"), pool, 1, check)
	if n := query[int64](t, pool, `SELECT count(*) FROM accounts WHERE balance = 100 AND version IS NULL`); n != 1 {
		t.Error("the row was changed")
	}
	// The control: compared by hand it looks like a conflict, whatever was read.
	for _, version := range []any{nil, 0} {
		tag, err := pool.Exec(t.Context(), `UPDATE accounts SET version = version + 1 WHERE id = 1 AND version = $1`, version)
		if err != nil || tag.RowsAffected() != 0 {
			t.Errorf("control: %v, %v", tag, err)
		}
	}
}

func TestTable_O07_Quoting(t *testing.T) {
	t.Parallel()
	pool := newPool(t, `
		CREATE SCHEMA "My.Schema";
		CREATE TABLE "My.Schema"."Say ""Hi""; DROP TABLE canary" (
			"Select" text PRIMARY KEY,
			"a""b; --" int NOT NULL,
			"Größe" int NOT NULL,
			"Version No" bigint NOT NULL
		);
		CREATE TABLE canary ();
		CREATE SCHEMA billing;
		CREATE TABLE billing."Accounts" (id int PRIMARY KEY, "userID" int NOT NULL, version bigint NOT NULL)`)
	ctx := t.Context()

	type odd struct {
		Key  string `db:"Select"`
		B    int    `db:"a\"b; --"`
		Size int    `db:"Größe"`
	}
	table := optimistic.NewTable[odd](`"My.Schema"."Say ""Hi""; DROP TABLE canary"`,
		optimistic.WithKey("Select"), optimistic.WithVersion("Version No"))
	roundTrip(t, pool, table, `'; DROP TABLE canary; --`, odd{`'; DROP TABLE canary; --`, 1, 2}, odd{`'; DROP TABLE canary; --`, 3, 4})

	type user struct {
		ID     int
		UserID int `db:"userID"`
	}
	roundTrip(t, pool, optimistic.NewTable[user]("billing.Accounts"), 7, user{7, 1}, user{7, 2})

	if query[bool](t, pool, `SELECT to_regclass('canary') IS NULL`) {
		t.Error("the canary table is gone")
	}
	_, err := table.Get(ctx, pool, "none")
	want(t, err, optimistic.ErrNotFound)

	// The control: names between quotes that nobody doubled, and without any.
	for sql, state := range map[string]string{
		`SELECT 1 FROM "My.Schema"."Say "Hi"; DROP TABLE canary"`: "42601",
		`SELECT 1 FROM billing.Accounts`:                          "42P01",
	} {
		_, err := pool.Exec(ctx, sql)
		wantState(t, err, state)
	}
}

// roundTrip takes one row through every method.
func roundTrip[T any](t *testing.T, db optimistic.DB, table *optimistic.Table[T], key any, first, second T) {
	t.Helper()
	ctx := t.Context()
	same := func(got, want T) {
		t.Helper()
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	}
	inserted, created, err := table.Insert(ctx, db, key, first)
	want(t, err, nil)
	if !created {
		t.Fatal("not created")
	}
	same(inserted.Value, first)
	got, err := table.Get(ctx, db, key)
	want(t, err, nil)
	same(got.Value, first)
	set, err := table.CompareAndSet(ctx, db, key, got.Version, second)
	want(t, err, nil)
	same(set.Value, second)
	updated, err := table.Update(ctx, db, key, func(v T) (T, error) {
		same(v, second)
		return first, nil
	})
	want(t, err, nil)
	same(updated.Value, first)
	touched, err := table.Touch(ctx, db, key, updated.Version)
	want(t, err, nil)
	same(touched.Value, first)
	outcomes, err := table.CompareAndSetMany(ctx, db, []optimistic.Change[T]{{Key: key, Version: touched.Version, Value: second}})
	want(t, err, nil)
	same(outcomes[0].Row.Value, second)
	last := outcomes[0].Row.Version
	if last != inserted.Version+4 {
		t.Errorf("version %d after four updates of %d", last, inserted.Version)
	}
	want(t, table.Delete(ctx, db, key, last), nil)
	_, err = table.Get(ctx, db, key)
	want(t, err, optimistic.ErrNotFound)
}

// An option that did nothing would be noticed by some method.
func TestTable_O09_OptionsReachEveryMethod(t *testing.T) {
	t.Parallel()
	pool := newPool(t, `
		CREATE TABLE books (id int NOT NULL DEFAULT 0, version int NOT NULL DEFAULT 0,
			isbn text PRIMARY KEY, title text NOT NULL, rev bigint NOT NULL)`)
	type book struct{ Isbn, Title string }
	table := optimistic.NewTable[book]("books", optimistic.WithKey("isbn"), optimistic.WithVersion("rev"))
	roundTrip(t, pool, table, "a", book{"a", "x"}, book{"a", "y"})
	_, _, err := table.Insert(t.Context(), pool, "a", book{Title: "x"})
	want(t, err, nil)
	if n := query[int64](t, pool, `SELECT count(*) FROM books WHERE id = 0 AND version = 0 AND rev > 1000`); n != 1 {
		t.Error("the columns of the defaults were used")
	}

	// The control: without an option it is the default's column.
	_, err = optimistic.NewTable[book]("books", optimistic.WithVersion("rev")).Get(t.Context(), pool, "a")
	if err == nil || errors.Is(err, optimistic.ErrNotFound) {
		t.Errorf("without WithKey: %v", err)
	}
	row, err := optimistic.NewTable[book]("books", optimistic.WithKey("isbn")).Get(t.Context(), pool, "a")
	if err != nil || row.Version != 0 {
		t.Errorf("without WithVersion: %+v, %v", row, err)
	}
}

type Stamps struct {
	CreatedAt time.Time
	By        *string `db:"created_by"`
}

type document struct {
	Stamps
	DocID    int64             `db:"id"`
	HTTPPath string            // http_path
	Tags     []string          `db:"tags,omitempty"`
	Meta     map[string]string // jsonb
	Version  int64             // filled when read, never written
	Cache    string            `db:"-"`
	private  int
}

const createDocuments = `
	CREATE TABLE documents (
		id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
		http_path  text NOT NULL,
		tags       text[],
		meta       jsonb NOT NULL,
		created_at timestamptz NOT NULL,
		created_by text,
		version    bigint NOT NULL DEFAULT 1
	)`

func TestTable_Columns(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createDocuments+`;
		INSERT INTO documents (http_path, tags, meta, created_at) VALUES ('/a', '{x,y}', '{"k": "v"}', '2024-01-02 03:04:05.678901Z')`)
	documents := optimistic.NewTable[document]("documents")
	at := time.Date(2024, 1, 2, 3, 4, 5, 678901000, time.UTC)
	by := "me"
	read := document{
		Stamps: Stamps{CreatedAt: at}, DocID: 1, HTTPPath: "/a",
		Tags: []string{"x", "y"}, Meta: map[string]string{"k": "v"}, Version: 1,
	}
	compare := func(got, want document) {
		t.Helper()
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(document{})); diff != "" {
			t.Error(diff)
		}
	}
	got, err := documents.Get(t.Context(), pool, 1)
	want(t, err, nil)
	compare(got.Value, read)

	// Key and version in the value are not written: not a forged version, and
	// not the zero of a request body that had no id.
	next := read
	next.DocID, next.Version, next.Cache, next.private = 99, 77, "mine", 1
	next.Tags, next.Meta, next.By = nil, map[string]string{}, &by
	next.CreatedAt = at.Add(999 * time.Nanosecond)
	set, err := documents.CompareAndSet(t.Context(), pool, 1, got.Version, next)
	want(t, err, nil)
	if set.Version != 2 {
		t.Errorf("version %d, want 2", set.Version)
	}
	stored := next
	stored.DocID, stored.Version, stored.Cache, stored.private = 1, 2, "", 0
	stored.CreatedAt = set.Value.CreatedAt
	compare(set.Value, stored) // as stored, so with the microseconds that PostgreSQL keeps
	if ns := set.Value.CreatedAt.Nanosecond() % 1000; ns != 0 {
		t.Errorf("%d ns past what PostgreSQL keeps: not what is stored", ns)
	}
}

// T without the key's field, and T with nothing that is written.
func TestTable_FewColumns(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	type balance struct{ Balance int64 }
	roundTrip(t, pool, optimistic.NewTable[balance]("public.accounts"), 9, balance{1}, balance{2})
	type id struct{ ID int64 }
	touch := optimistic.NewTable[id]("accounts")
	got, err := touch.Update(t.Context(), pool, 1, func(v id) (id, error) { return v, nil })
	want(t, err, nil)
	if got.Version != 2 || stored(t, pool, 1).Value.Balance != 100 {
		t.Errorf("got %+v", got)
	}
}

// Every kind of DB, and a type of the user's own around one.
func TestTable_DBs(t *testing.T) {
	t.Parallel()
	pool := newPool(t, createAccounts)
	conn, err := pool.Acquire(t.Context())
	want(t, err, nil)
	defer conn.Release()
	tx := begin(t, pool, "")
	nested, err := tx.Begin(t.Context())
	want(t, err, nil)
	type wrapped struct{ optimistic.DB }
	for i, db := range []optimistic.DB{pool, conn, conn.Conn(), tx, nested, wrapped{pool}} {
		id := int64(100 + i)
		roundTrip(t, db, accounts, id, account{ID: id}, account{ID: id, Balance: 5})
	}
}
