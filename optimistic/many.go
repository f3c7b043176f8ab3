package optimistic

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// A Change is what CompareAndSetMany is to make of one row.
type Change[T any] struct {
	Key     any
	Version int64 // that the writer saw
	Value   T
}

// An Outcome is what became of one Change.
type Outcome[T any] struct {
	// Row is the row as stored when Err is nil, and otherwise as it is now, as far
	// as that is known.
	Row Versioned[T]
	// Err is nil for a row that was written, and otherwise what CompareAndSet
	// would have returned, or ErrHeldBack.
	Err error
}

// A ManyOption changes a default of CompareAndSetMany.
type ManyOption func(*manyOptions)

type manyOptions struct{ partial bool }

// Partial has each row written that is at its version, whatever becomes of the
// others. Default: all rows or none.
func Partial() ManyOption { return func(o *manyOptions) { o.partial = true } }

// maxParameters is what the protocol can count.
const maxParameters = 65535

// CompareAndSetMany does what CompareAndSet does to many rows in one statement:
// all of them or, if one isn't at its version, none, unless Partial says
// otherwise. The outcomes are in the order of the changes. The error is nil only
// if every row was written; it counts the rows that weren't and holds the error
// of the first. Like CompareAndSet it never retries with other versions; a
// statement of its own that the server broke off (40001, 40P01) is repeated as it
// was, a few times.
//
// The rows are locked in the order of their keys before any is compared, so that
// two calls on the same rows can't deadlock, whatever order they list them in.
// Within a transaction that holds for the calls taken together only if they come
// in key order too.
//
// In a transaction of the caller's a conflict and a missing row leave it usable.
// A veto, where all rows were to be written, does not: it shows only after other
// rows have been written, which one statement can take back only by failing. At
// REPEATABLE READ and above a row that changed after the snapshot is
// ErrRetryOutside.
//
// The parameters bound the number of rows: 65,535 divided by the columns that
// are written, key and version among them. A row that the statement doesn't find
// costs a SELECT that tells why.
func (t *Table[T]) CompareAndSetMany(ctx context.Context, db DB, changes []Change[T], opts ...ManyOption) ([]Outcome[T], error) {
	if err := t.checkMany(changes); err != nil {
		return nil, err
	}
	if err := checkDB(ctx, db); err != nil || len(changes) == 0 {
		return nil, err
	}
	var o manyOptions
	for _, opt := range opts {
		opt(&o)
	}
	sql, args := t.manySQL(changes, o)
	m := &many[T]{Table: t, changes: changes, partial: o.partial}
	run := func(db DB) error {
		m.outcomes, m.missing = make([]Outcome[T], len(changes)), nil
		return each(ctx, db, sql, args, m.scan)
	}
	err := write(ctx, db, run)
	for n := 1; n < updateAttempts && brokenOff(db, err) && pause(ctx, n); n++ {
		err = within(ctx, db, func(db DB) (bool, error) { err := run(db); return err == nil, err })
	}
	if err = m.vetoes(err); err == nil {
		err = m.explain(ctx, db)
	}
	if err != nil {
		return nil, fmt.Errorf("compare and set many in %s: %w%s", t.name, outside(db, err), remedy(err))
	}
	for i, outcome := range m.outcomes {
		t.tell(ctx, changes[i].Key, 1, outcome.Err)
	}
	return m.outcomes, m.sum()
}

// brokenOff says that nothing was written and that the same comparison may be
// made again: the database's default isolation is above READ COMMITTED, or a
// writer that locks these rows in another order made a deadlock.
func brokenOff(db DB, err error) bool {
	code := sqlState(err)
	return !joined(db) && !errors.Is(err, ErrUnknownCommit) && (code == serializationFailure || code == deadlockDetected)
}

func (t *Table[T]) checkMany(changes []Change[T]) error {
	if err := t.made(); err != nil {
		return err
	}
	seen := make(map[string]bool, len(changes))
	for i, c := range changes {
		if err := t.checkKey(c.Key); err != nil {
			return fmt.Errorf("optimistic: table %q: change %d: %w", t.name, i, err)
		}
		// By their text: 7 and int64(7) are one key.
		key := fmt.Sprintf("%q", dereferenced(t.args(c.Key)))
		if seen[key] {
			return fmt.Errorf("optimistic: table %q: change %d: key %v is there twice", t.name, i, c.Key)
		}
		seen[key] = true
	}
	if n := 1 + len(changes)*t.width(); n > maxParameters {
		return fmt.Errorf("optimistic: table %q: %d changes of %d columns are %d parameters, the protocol has %d: split them",
			t.name, len(changes), t.width(), n, maxParameters)
	}
	return nil
}

// dereferenced is args without their pointers, whose text is an address.
func dereferenced(args []any) []string {
	texts := make([]string, len(args))
	for i, arg := range args {
		v := reflect.ValueOf(arg)
		for v.Kind() == reflect.Pointer && !v.IsNil() {
			v = v.Elem()
		}
		texts[i] = fmt.Sprint(v.Interface())
	}
	return texts
}

// width is the number of parameters of a change.
func (t *Table[T]) width() int { return len(t.keys) + 1 + len(t.set) }

// A many is one call of CompareAndSetMany.
type many[T any] struct {
	*Table[T]
	changes  []Change[T]
	partial  bool
	outcomes []Outcome[T]
	missing  []int // the changes whose row the statement didn't find
}

// scan takes one row of the statement's answer.
func (m *many[T]) scan(rows pgx.Rows) error {
	dest := make([]any, 3+len(m.columns)+1)
	var n int
	var written, found bool
	dest[0], dest[1], dest[2] = &n, &written, &found
	if err := rows.Scan(dest...); err != nil {
		return err
	}
	change, outcome := m.changes[n-1], &m.outcomes[n-1]
	if !found {
		m.missing = append(m.missing, n-1)
		return nil
	}
	r, err := m.decode(rows, 3)
	if err != nil {
		return err
	}
	outcome.Row = r.Versioned
	switch {
	case written:
		_, outcome.Err = counted(r, change.Version, nil)
	case r.Version != change.Version:
		outcome.Err = m.conflict(change.Key, change.Version, r)
	default:
		outcome.Err = errFits
	}
	return nil
}

// errFits stands for a row that was at its version and was not written, until it
// is known why.
var errFits = errors.New("fits")

// vetoes takes the statement's failure for what it is, if it is one of ours.
func (m *many[T]) vetoes(err error) error {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != "22P02" {
		return err
	}
	_, list, ok := strings.Cut(pg.Message, `"`+vetoMark)
	if !ok {
		return err
	}
	list, _, _ = strings.Cut(list, `"`)
	for i := range m.outcomes {
		m.outcomes[i] = Outcome[T]{Err: ErrHeldBack}
	}
	for text := range strings.SplitSeq(list, ",") {
		if n, err := strconv.Atoi(text); err == nil && n >= 1 && n <= len(m.outcomes) {
			m.outcomes[n-1].Err = ErrVetoed
		}
	}
	return nil
}

// explain finds the reason for each row that fitted and wasn't written, and for
// those that weren't found: they may have come since, or be hidden from writes
// by row security.
func (m *many[T]) explain(ctx context.Context, db DB) error {
	for _, i := range m.missing {
		now, err := m.why(ctx, db, m.changes[i].Key, m.changes[i].Version, nil)
		var conflict *ConflictError
		if !errors.As(err, &conflict) && !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrVetoed) {
			return err
		}
		m.outcomes[i] = Outcome[T]{Row: now, Err: err}
	}
	// Where all were to be written and one doesn't fit, the statement wrote none;
	// in any other case somebody vetoed the row.
	refused := func(o Outcome[T]) bool { return o.Err != nil && o.Err != errFits }
	reason := ErrVetoed
	if !m.partial && slices.ContainsFunc(m.outcomes, refused) {
		reason = ErrHeldBack
	}
	for i := range m.outcomes {
		if m.outcomes[i].Err == errFits {
			m.outcomes[i].Err = reason
		}
	}
	return nil
}

// sum is the error of the whole: that of the first row which is to blame.
func (m *many[T]) sum() error {
	failed, first := 0, -1
	for i, o := range m.outcomes {
		if o.Err == nil {
			continue
		}
		failed++
		if first < 0 || m.outcomes[first].Err == ErrHeldBack && o.Err != ErrHeldBack {
			first = i
		}
	}
	if failed == 0 {
		return nil
	}
	return fmt.Errorf("compare and set many in %s: %d of %d rows not written, key %v: %w",
		m.name, failed, len(m.outcomes), m.changes[first].Key, m.outcomes[first].Err)
}
