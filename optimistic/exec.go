package optimistic

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
)

// Exec runs a hand-written statement that compares and sets, and makes sure that
// it changed exactly one row:
//
//	UPDATE accounts SET balance = $1, version = version + 1 WHERE id = $2 AND version = $3
//
// No row is ErrConflict: the row has another version, or is gone, or the write
// was vetoed; Exec can't tell which, Table can. More than one row is
// ErrConflict too, with the count in its text: the WHERE clause lacks the key.
// The statement is an UPDATE, DELETE, INSERT or MERGE; anything else is an
// error, because its row count counts something else.
//
// On a pool or a connection it runs in a transaction of its own at READ
// COMMITTED (three statements), because a statement that commits by itself can't
// be taken back when it has met too many rows: after any error but
// ErrUnknownCommit nothing was written. In a transaction of the caller's it is
// that one statement; no row leaves tx usable, after too many rows roll tx back,
// and an error of the server aborts it: 40001 and 40P01 as ErrRetryOutside.
// Exec never retries.
func Exec(ctx context.Context, db DB, sql string, args ...any) error {
	if err := checkDB(ctx, db); err != nil {
		return err
	}
	if sql == "" {
		return errors.New("optimistic: exec: the SQL is empty")
	}
	run := func(db DB) (bool, error) {
		tag, err := db.Exec(ctx, sql, args...)
		if err == nil {
			err = oneRow(tag)
		}
		return err == nil, err
	}
	var err error
	if !joined(db) {
		err = within(ctx, db, run)
	} else if _, err = run(db); wholeAgain(err) {
		err = fmt.Errorf("%w: %w", ErrRetryOutside, err)
	}
	if err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	return nil
}

func oneRow(tag pgconn.CommandTag) error {
	s := tag.String()
	switch {
	case !tag.Update() && !tag.Delete() && !tag.Insert() && !isMerge(s):
		return fmt.Errorf("the server answered %q: write an UPDATE, DELETE, INSERT or MERGE", s)
	case tag.RowsAffected() == 0:
		return ErrConflict
	case tag.RowsAffected() > 1:
		return fmt.Errorf("%w: %d rows matched, wanted one: name the key in the WHERE clause", ErrConflict, tag.RowsAffected())
	}
	return nil
}

func isMerge(tag string) bool { return len(tag) >= 5 && tag[:5] == "MERGE" }
