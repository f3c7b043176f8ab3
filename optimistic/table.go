package optimistic

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Versioned is a row's value and the version it was read at.
type Versioned[T any] struct {
	Value   T
	Version int64
}

// A Table reads and writes the rows of one table, each under its version
// column. T is a struct whose fields name the columns, by the rules of
// pgx.RowToStructByName: a db tag gives the exact name, a field without one is
// its name in snake case, db:"-" is no column. The package comment says what
// the table needs. A Table is safe for concurrent use and keeps no connection.
type Table[T any] struct {
	name    string
	columns []column // what a row is read into, in the order of the SELECT list
	set     []column // what is written: without key and version
	err     error    // what is wrong with the arguments of NewTable
	version string

	selectSQL, lockSQL, insertSQL, insertNewSQL, updateSQL, deleteSQL string
}

// An Option changes a default of NewTable.
type Option func(*options)

type options struct{ key, version string }

// WithKey names the key column, exactly as PostgreSQL stores it. Default: id.
func WithKey(column string) Option { return func(o *options) { o.key = column } }

// WithVersion names the version column, exactly as PostgreSQL stores it.
// Default: version.
func WithVersion(column string) Option { return func(o *options) { o.version = column } }

// NewTable describes a table named "accounts", "billing.accounts" or, where a
// part of the name has a dot in it, `"billing"."odd.name"`. Names keep their
// case and are quoted; unquoted names in SQL are stored in lower case.
//
// It does no I/O and returns no error, so that a package variable can hold the
// Table: a bad name, or a T that is no struct, is the error of every method,
// before any SQL is sent.
func NewTable[T any](name string, opts ...Option) *Table[T] {
	o := options{key: "id", version: "version"}
	for _, opt := range opts {
		opt(&o)
	}
	t := &Table[T]{name: name, version: o.version}
	if err := t.prepare(o); err != nil {
		t.err = fmt.Errorf("optimistic: table %q of %v: %w", name, reflect.TypeFor[T](), err)
	}
	return t
}

// prepare checks the description and writes the statements.
func (t *Table[T]) prepare(o options) error {
	table, err := parseTableName(t.name)
	if err != nil {
		return err
	}
	if err := checkIdentifier(o.key); err != nil {
		return fmt.Errorf("key column %w", err)
	}
	if err := checkIdentifier(o.version); err != nil {
		return fmt.Errorf("version column %w", err)
	}
	if o.key == o.version {
		return fmt.Errorf("column %q can't be both the key and the version", o.key)
	}
	if t.columns, err = columnsOf(reflect.TypeFor[T]()); err != nil {
		return err
	}
	var list, assign, names, values []string
	for _, c := range t.columns {
		list = append(list, quote(c.name))
		if c.name == o.key {
			continue
		}
		if c.name == o.version {
			// Found only when a row comes back, a smaller type would make a
			// failure of a write that was done.
			if f := reflect.TypeFor[T]().FieldByIndex(c.path); f.Type.Kind() != reflect.Int64 {
				return fmt.Errorf("field %s for version column %q is %v: it has to be int64", f.Name, c.name, f.Type)
			}
			continue
		}
		t.set = append(t.set, c)
		names = append(names, quote(c.name))
		assign = append(assign, fmt.Sprintf("%s = $%d, ", quote(c.name), len(t.set)+2))
		values = append(values, fmt.Sprintf("$%d", len(t.set)))
	}
	key, version := quote(o.key), quote(o.version)
	row := strings.Join(append(list, version), ", ")
	from := table.Sanitize()

	t.selectSQL = fmt.Sprintf("SELECT %s FROM %s WHERE %s = $1", row, from, key)
	t.lockSQL = t.selectSQL + " FOR NO KEY UPDATE"
	t.updateSQL = fmt.Sprintf("UPDATE %s SET %s%s = %s + 1 WHERE %s = $1 AND %s = $2 RETURNING %s",
		from, strings.Join(assign, ""), version, version, key, version, row)
	t.deleteSQL = fmt.Sprintf("DELETE FROM %s WHERE %s = $1 AND %s = $2", from, key, version)

	// A new row's version is written here and not left to the column's default,
	// which in most tables is a constant: delete, insert, and a version from
	// before the delete would fit again. A sequence that counts by ones has the
	// same fault, because versions count by ones too and run ahead of it. The
	// clock in microseconds is ahead of any version whose row began at a clock
	// or a constant and was updated less than once a microsecond.
	insert := func(names, values []string) string {
		return fmt.Sprintf("INSERT INTO %s (%s) VALUES (%s) ON CONFLICT (%s) DO NOTHING RETURNING %s",
			from, strings.Join(append(names, version), ", "),
			strings.Join(append(values, "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"), ", "), key, row)
	}
	t.insertNewSQL = insert(names, values)
	t.insertSQL = insert(append(names, key), append(values, fmt.Sprintf("$%d", len(t.set)+1)))
	return nil
}

// Get reads the row with the key. The error is ErrNotFound when there is none.
// One statement, which takes no lock:
//
//	SELECT columns, version FROM table WHERE id = $1
func (t *Table[T]) Get(ctx context.Context, db DB, key any) (Versioned[T], error) {
	if err := t.check(ctx, db, key); err != nil {
		return Versioned[T]{}, err
	}
	row, err := t.look(ctx, db, t.selectSQL, key)
	if err != nil {
		return Versioned[T]{}, t.fail("get", db, key, err)
	}
	return row.Versioned, nil
}

// A row as it was read, and a second decoding of it that shares no memory with
// the first: fn may change the draft in place, slices and maps too, and the row
// that is returned or reported stays what the database holds.
type row[T any] struct {
	Versioned[T]
	draft T
}

// look reads one row, ErrNotFound when there is none.
func (t *Table[T]) look(ctx context.Context, db DB, sql string, key any) (*row[T], error) {
	r, err := t.fetch(ctx, db, sql, key)
	if err == nil && r == nil {
		err = ErrNotFound
	}
	return r, err
}

// fetch runs one statement and decodes the row it returns; nil is no row. The
// rows are read to their end, because an error at the end (a deferred
// constraint, a commit that failed) comes after them.
func (t *Table[T]) fetch(ctx context.Context, db DB, sql string, args ...any) (*row[T], error) {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var r *row[T]
	n := int64(0)
	for ; rows.Next(); n++ {
		if r, err = t.decode(rows); err != nil {
			return nil, &decodeError{err}
		}
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	if n > 1 {
		return nil, notUnique(n)
	}
	return r, nil
}

// decode scans the version first and by itself, so that a NULL there is
// reported as what it is and not as a type that doesn't fit.
func (t *Table[T]) decode(rows pgx.Rows) (*row[T], error) {
	last := len(t.columns)
	dest := make([]any, last+1)
	var version *int64
	dest[last] = &version
	if err := rows.Scan(dest...); err != nil {
		return nil, err
	}
	if version == nil {
		v := quote(t.version)
		return nil, fmt.Errorf("version column %s is NULL, which equals no version: UPDATE %s SET %s = 1 WHERE %s IS NULL, then ALTER TABLE %s ALTER COLUMN %s SET NOT NULL",
			v, t.name, v, v, t.name, v)
	}
	dest[last] = nil
	r := &row[T]{}
	r.Version = *version
	for _, value := range []*T{&r.Value, &r.draft} {
		v := reflect.ValueOf(value).Elem()
		for i, c := range t.columns {
			dest[i] = v.FieldByIndex(c.path).Addr().Interface()
		}
		if err := rows.Scan(dest...); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// values appends to args what value has in the columns that are written.
func (t *Table[T]) values(args []any, value *T) []any {
	v := reflect.ValueOf(value).Elem()
	for _, c := range t.set {
		args = append(args, v.FieldByIndex(c.path).Interface())
	}
	return args
}

// check refuses bad input before any SQL is sent.
func (t *Table[T]) check(ctx context.Context, db DB, key any) error {
	if t == nil || t.err == nil && t.selectSQL == "" {
		return errors.New("optimistic: this Table was not made by NewTable")
	}
	if t.err != nil {
		return t.err
	}
	if v := reflect.ValueOf(key); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return fmt.Errorf("optimistic: table %q: key is nil (%T), which equals no key", t.name, key)
	}
	return checkDB(ctx, db)
}

// fail words an error of the database.
func (t *Table[T]) fail(verb string, db DB, key any, err error) error {
	if code := sqlState(err); joined(db) && (code == serializationFailure || code == deadlockDetected) {
		err = fmt.Errorf("%w: %w", ErrRetryOutside, err)
	}
	return fmt.Errorf("%s %s, key %v: %w%s", verb, t.name, key, err, remedy(err))
}
