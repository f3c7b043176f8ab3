package optimistic

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
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
// its name in snake case, db:"-" is no column. A column that the database fills,
// a generated one or an identity that is not the key, is read and never written
// when its tag says so: db:"total,readonly". The package comment says what the
// table needs. A Table is safe for concurrent use and keeps no connection.
type Table[T any] struct {
	statements
	name    string
	columns []column // what a row is read into, in the order of the SELECT list
	set     []column // what is written: without key, version and what is read only
	watch   Observer // nil: none
	err     error    // what is wrong with the arguments of NewTable
}

// An Option changes a default of NewTable.
type Option func(*options)

type options struct {
	keys    []string
	version string
	live    *string
	watch   Observer
}

// WithKey names the key column, exactly as PostgreSQL stores it, or several that
// are the key together: see Key. Default: id.
func WithKey(columns ...string) Option {
	return func(o *options) { o.keys = slices.Clone(columns) }
}

// WithVersion names the version column, exactly as PostgreSQL stores it.
// Default: version.
func WithVersion(column string) Option { return func(o *options) { o.version = column } }

// WithLive names the rows that count, by an SQL condition on the table's columns:
//
//	optimistic.WithLive("deleted_at IS NULL")
//
// Every method then treats the others as if they weren't there. Who deletes
// softly sets the column by CompareAndSet or Update, which return the row as
// stored; the next Get is ErrNotFound. Delete removes a live row for good.
// Insert beside a dead row with the same key works where the unique index is
// limited to live rows (CREATE UNIQUE INDEX … WHERE deleted_at IS NULL);
// otherwise it is ErrVetoed. The condition goes into every statement as it is:
// it must not come from outside the program. Default: all rows.
func WithLive(condition string) Option { return func(o *options) { o.live = &condition } }

// check refuses names that can't be, and options that contradict each other.
func (o *options) check() error {
	if len(o.keys) == 0 {
		return errors.New("key column: WithKey names none")
	}
	for i, key := range o.keys {
		if err := checkIdentifier(key); err != nil {
			return fmt.Errorf("key column %w", err)
		}
		if slices.Contains(o.keys[:i], key) {
			return fmt.Errorf("key column %q is named twice", key)
		}
	}
	if err := checkIdentifier(o.version); err != nil {
		return fmt.Errorf("version column %w", err)
	}
	if o.isKey(o.version) {
		return fmt.Errorf("column %q can't be both the key and the version", o.version)
	}
	if o.live != nil && strings.TrimSpace(*o.live) == "" {
		return errors.New("live-row condition: WithLive names none")
	}
	return nil
}

func (o *options) isKey(column string) bool { return slices.Contains(o.keys, column) }

// NewTable describes a table named "accounts", "billing.accounts" or, where a
// part of the name has a dot in it, `"billing"."odd.name"`. Names keep their
// case and are quoted; unquoted names in SQL are stored in lower case.
//
// It does no I/O and returns no error, so that a package variable can hold the
// Table: a bad name, or a T that is no struct, is the error of every method,
// before any SQL is sent.
func NewTable[T any](name string, opts ...Option) *Table[T] {
	o := options{keys: []string{"id"}, version: "version"}
	for _, opt := range opts {
		opt(&o)
	}
	t := &Table[T]{name: name, watch: o.watch}
	if err := t.prepare(o); err != nil {
		t.err = fmt.Errorf("optimistic: table %q of %v: %w", name, reflect.TypeFor[T](), err)
	}
	return t
}

// Get reads the row with the key. The error is ErrNotFound when there is none.
// One statement, which takes no lock:
//
//	SELECT columns, version FROM table WHERE id = $1
func (t *Table[T]) Get(ctx context.Context, db DB, key any) (Versioned[T], error) {
	if err := t.check(ctx, db, key); err != nil {
		return Versioned[T]{}, err
	}
	row, err := t.look(ctx, db, t.selectSQL, t.args(key)...)
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
func (t *Table[T]) look(ctx context.Context, db DB, sql string, args ...any) (*row[T], error) {
	r, err := t.fetch(ctx, db, sql, args...)
	if err == nil && r == nil {
		err = ErrNotFound
	}
	return r, err
}

// fetch runs one statement and decodes the row it returns; nil is no row.
func (t *Table[T]) fetch(ctx context.Context, db DB, sql string, args ...any) (*row[T], error) {
	var r *row[T]
	n := int64(0)
	err := each(ctx, db, sql, args, func(rows pgx.Rows) (err error) {
		n++
		r, err = t.decode(rows, 0)
		return err
	})
	if err != nil {
		return nil, err
	}
	if n > 1 {
		return nil, notUnique(n)
	}
	return r, nil
}

// decode scans the version first and by itself, so that a NULL there is
// reported as what it is and not as a type that doesn't fit. It leaves out the
// first columns of the row, skip of them.
func (t *Table[T]) decode(rows pgx.Rows, skip int) (*row[T], error) {
	last := skip + len(t.columns)
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
			dest[skip+i] = v.FieldByIndex(c.path).Addr().Interface()
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
	if err := t.made(); err != nil {
		return err
	}
	if err := t.checkKey(key); err != nil {
		return fmt.Errorf("optimistic: table %q: %w", t.name, err)
	}
	return checkDB(ctx, db)
}

// made refuses a Table that NewTable didn't make, or made of bad arguments.
func (t *Table[T]) made() error {
	if t == nil || t.err == nil && t.selectSQL == "" {
		return errors.New("optimistic: this Table was not made by NewTable")
	}
	return t.err
}

// fail words an error of the database.
func (t *Table[T]) fail(verb string, db DB, key any, err error) error {
	return fmt.Errorf("%s %s, key %v: %w%s", verb, t.name, key, outside(db, err), remedy(err))
}

// outside adds to an error that aborts the caller's transaction what can be done
// about it.
func outside(db DB, err error) error {
	if code := sqlState(err); joined(db) && (code == serializationFailure || code == deadlockDetected) {
		return fmt.Errorf("%w: %w", ErrRetryOutside, err)
	}
	return err
}
