package optimistic

import (
	"context"
	"errors"
	"fmt"
)

// Insert adds a row with the key and returns it as stored, with its first
// version, and true. When a row with the key is there already it changes
// nothing and returns that row, false and nil. A nil key leaves the choice to
// the column (an identity, a default); the key then comes back in T's field for
// it. The key and version fields of value are not looked at.
//
// The first version is the database's clock in microseconds since 1970, a
// number that no earlier row of this key can have reached: a version from
// before a delete never fits the row inserted after it.
//
// One statement, and when it inserted nothing a SELECT to tell why:
//
//	INSERT INTO table (columns, id, version)
//	VALUES ($1, …, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint)
//	ON CONFLICT (id) DO NOTHING RETURNING columns, version
//
// A server error (another unique constraint, say) aborts a transaction of the
// caller's; ErrVetoed leaves it usable.
func (t *Table[T]) Insert(ctx context.Context, db DB, key any, value T) (row Versioned[T], created bool, err error) {
	const verb = "insert into"
	drawn := key == nil
	if err := t.made(); err != nil {
		return row, false, err
	}
	checked := key
	if drawn {
		if err := checkDB(ctx, db); err != nil {
			return row, false, err
		}
		checked = "to be drawn"
	} else if err := t.check(ctx, db, key); err != nil {
		return row, false, err
	}
	sql, args := t.insertNewSQL, t.values(nil, &value)
	if !drawn {
		sql, args = t.insertSQL, append(args, t.args(key)...)
	}
	// Twice, because the row in the way may be deleted before it is looked at.
	for range 2 {
		r, err := t.writeRow(ctx, db, sql, args...)
		switch {
		case err != nil && (joined(db) || sqlState(err) != serializationFailure):
			return row, false, t.fail(verb, db, checked, err)
		case r != nil:
			return r.Versioned, true, nil
		case drawn:
			return row, false, t.fail(verb, db, checked, ErrVetoed)
		}
		r, err = t.look(ctx, db, t.selectSQL, t.args(key)...)
		if err == nil {
			return r.Versioned, false, nil
		}
		if !errors.Is(err, ErrNotFound) {
			return row, false, t.fail(verb, db, key, err)
		}
	}
	return row, false, t.fail(verb, db, key, ErrVetoed)
}

// CompareAndSet writes value to the row with the key if the row is still at
// version, and returns the row as stored, with its new version. It is for a
// version that a person or another program has seen, so it never retries: what
// they decided, they decided on what they saw. The key and version columns are
// not taken from value.
//
// ErrConflict comes with a *ConflictError, and the Versioned returned with it is
// the row as it is now. ErrNotFound, ErrVetoed and ErrUnknownCommit are the
// other outcomes. In a transaction of the caller's these leave it usable, while
// an error of the server aborts it, ErrRetryOutside among them; at REPEATABLE
// READ and above the comparison is with the row of that transaction's snapshot.
//
// One statement, and when it changed no row a SELECT to tell why:
//
//	UPDATE table SET a = $3, b = $4, …, version = version + 1
//	WHERE id = $1 AND version = $2 RETURNING columns, version
func (t *Table[T]) CompareAndSet(ctx context.Context, db DB, key any, version int64, value T) (Versioned[T], error) {
	if err := t.check(ctx, db, key); err != nil {
		return Versioned[T]{}, err
	}
	r, err := t.swap(ctx, db, key, version, &value)
	if err == nil && r != nil {
		return r.Versioned, nil
	}
	now, err := t.why(ctx, db, key, version, err)
	t.tell(ctx, key, 1, err)
	return now, t.fail("compare and set", db, key, err)
}

// Touch counts the row's version up by one if the row is still at version, and
// changes nothing else. It is for the root of an aggregate, whose parts stand in
// other tables: who changes a part touches the root first, in one transaction,
// and two that change different parts meet there. Its outcomes are those of
// CompareAndSet.
//
// One statement, and when it changed no row a SELECT to tell why:
//
//	UPDATE table SET version = version + 1
//	WHERE id = $1 AND version = $2 RETURNING columns, version
func (t *Table[T]) Touch(ctx context.Context, db DB, key any, version int64) (Versioned[T], error) {
	if err := t.check(ctx, db, key); err != nil {
		return Versioned[T]{}, err
	}
	r, err := t.writeRow(ctx, db, t.touchSQL, append(t.args(key), version)...)
	if r, err = counted(r, version, err); err == nil && r != nil {
		return r.Versioned, nil
	}
	now, err := t.why(ctx, db, key, version, err)
	t.tell(ctx, key, 1, err)
	return now, t.fail("touch", db, key, err)
}

// Delete removes the row with the key if it is still at version. Its errors and
// what they leave behind are those of CompareAndSet, but for the row, which only
// the *ConflictError has. One statement, and when it removed no row a SELECT to
// tell why:
//
//	DELETE FROM table WHERE id = $1 AND version = $2
func (t *Table[T]) Delete(ctx context.Context, db DB, key any, version int64) error {
	if err := t.check(ctx, db, key); err != nil {
		return err
	}
	var gone int64
	err := write(ctx, db, func(db DB) error {
		tag, err := db.Exec(ctx, t.deleteSQL, append(t.args(key), version)...)
		gone = tag.RowsAffected()
		return err
	})
	switch {
	case err == nil && gone == 1:
		return nil
	case err == nil && gone > 1:
		err = notUnique(gone)
	default:
		_, err = t.why(ctx, db, key, version, err)
		t.tell(ctx, key, 1, err)
	}
	return t.fail("delete from", db, key, err)
}

// swap runs the UPDATE. No row and no error is a row that didn't match.
func (t *Table[T]) swap(ctx context.Context, db DB, key any, version int64, value *T) (*row[T], error) {
	r, err := t.writeRow(ctx, db, t.updateSQL, t.values(append(t.args(key), version), value)...)
	return counted(r, version, err)
}

// counted makes an error of a row that was written and didn't count.
func counted[T any](r *row[T], version int64, err error) (*row[T], error) {
	if r != nil && r.Version <= version {
		return nil, fmt.Errorf("written, but a trigger undid the increment and left the row at version %d: until that trigger is gone the column protects nothing", r.Version)
	}
	return r, err
}

// writeRow runs a writing statement that returns the row it wrote.
func (t *Table[T]) writeRow(ctx context.Context, db DB, sql string, args ...any) (r *row[T], err error) {
	err = write(ctx, db, func(db DB) error {
		r, err = t.fetch(ctx, db, sql, args...)
		return err
	})
	return r, err
}

// why tells for what reason a write changed no row, by a second statement: one
// statement that also returns the current row would return it from its own
// snapshot, which is the one that was too old. Where the database's default
// isolation is higher than READ COMMITTED, a statement of its own that meets a
// concurrent writer is 40001 instead of no row, and means the same.
func (t *Table[T]) why(ctx context.Context, db DB, key any, version int64, cause error) (Versioned[T], error) {
	if cause != nil && (joined(db) || sqlState(cause) != serializationFailure) {
		return Versioned[T]{}, cause
	}
	r, err := t.look(ctx, db, t.selectSQL, t.args(key)...)
	switch {
	case err != nil && cause == nil && !errors.Is(err, ErrNotFound):
		return Versioned[T]{}, fmt.Errorf("nothing was written, and reading why: %w", err)
	case err != nil:
		return Versioned[T]{}, err
	case r.Version != version:
		return r.Versioned, t.conflict(key, version, r)
	case cause != nil:
		return Versioned[T]{}, cause
	}
	return Versioned[T]{}, ErrVetoed
}

func (t *Table[T]) conflict(key any, expected int64, now *row[T]) *ConflictError {
	return &ConflictError{Table: t.name, Key: key, Expected: expected, Actual: now.Version, Current: now.Value}
}

// notUnique is what a statement that met n rows says. Outside a transaction of
// the caller's it can't be taken back any more; a check before each write would
// cost every caller for a mistake in the schema.
func notUnique(n int64) error {
	return fmt.Errorf("%d rows have this key, and the statement met them all: the key column needs a PRIMARY KEY or UNIQUE constraint", n)
}
