package optimistic

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
)

// Sentinels, one for each outcome. Whatever wraps them keeps the server's
// *pgconn.PgError, where there was one, within reach of errors.As.
var (
	// ErrConflict says that the row is no longer at the version that the writer
	// saw. Returned by CompareAndSet and Delete with a *ConflictError, by Exec
	// without one (it knows neither table nor version), and found inside the
	// ErrExhausted of Update. Nothing was written.
	ErrConflict = errors.New("optimistic: row has changed")

	// ErrNotFound says that no row has the key, or none that this role and this
	// transaction's snapshot can see. Returned by Get, CompareAndSet, Update and
	// Delete.
	ErrNotFound = errors.New("optimistic: row not found")

	// ErrVetoed says that the row stands at the expected version and yet nothing
	// was written: a BEFORE trigger returned NULL, or a row security policy hides
	// the row from writes. Trying again gives the same answer. Returned by
	// Insert, CompareAndSet, Update, Touch and Delete, and found in the outcomes of
	// CompareAndSetMany.
	ErrVetoed = errors.New("optimistic: write was vetoed by a trigger or by row security")

	// ErrHeldBack says that the row was at its version and was not written because
	// another row wasn't. Found in the outcomes of CompareAndSetMany.
	ErrHeldBack = errors.New("optimistic: held back because of another row")

	// ErrSchema says that the table isn't what this package needs. Returned by
	// Verify, as a *SchemaError.
	ErrSchema = errors.New("optimistic: the table is not as it has to be")

	// ErrPreconditionRequired says that a request has no If-Match (428),
	// ErrPreconditionFailed that none of its tags is the row's (412), and
	// ErrBadPrecondition that they can't be read (400). Returned by IfMatch,
	// IfNoneMatch and Match.Version.
	ErrPreconditionRequired = errors.New("optimistic: a precondition is required")
	ErrPreconditionFailed   = errors.New("optimistic: the precondition failed")
	ErrBadPrecondition      = errors.New("optimistic: the precondition can't be read")

	// ErrUnknownCommit says that the connection broke, or the context ended,
	// after the write or its COMMIT was sent and before the answer came: it may
	// have been done, it may even be done later, by a server process that is
	// still waiting for a lock. Nothing was retried. Read the row before trying
	// again. Returned by every function that writes, but not when the
	// transaction is the caller's: there the broken connection is known to have
	// committed nothing.
	ErrUnknownCommit = errors.New("optimistic: the connection ended before the outcome was known")

	// ErrExhausted says that the retries are used up, or that the context's
	// deadline leaves no room for another. It holds the last conflict. Nothing
	// was written. Returned by Update and RunInTx.
	ErrExhausted = errors.New("optimistic: retries used up")

	// ErrNoChange is for the function given to Update to return when the row is
	// right as it is: Update then writes nothing and returns the row and nil.
	ErrNoChange = errors.New("optimistic: no change wanted")

	// ErrRetryOutside says that the caller's transaction met a serialization
	// failure or a deadlock (40001, 40P01), which aborts it: no retry inside it
	// can succeed, because its snapshot stays as it is. Run the whole transaction
	// again, which is what RunInTx does. Returned by every function when db is a
	// transaction of the caller's.
	ErrRetryOutside = errors.New("optimistic: the whole transaction has to run again: see RunInTx")
)

// A ConflictError is an ErrConflict with what is known of it.
type ConflictError struct {
	Table    string // as given to NewTable
	Key      any    // as given to the call
	Expected int64  // the version that the writer saw
	Actual   int64  // the version of the row now
	Current  any    // the row now, a T; nil, and Actual 0, if ctx ended before it was read
}

func (e *ConflictError) Error() string {
	if e.Current == nil {
		return fmt.Sprintf("%v: expected version %d", ErrConflict, e.Expected)
	}
	return fmt.Sprintf("%v: it is at version %d, expected %d", ErrConflict, e.Actual, e.Expected)
}

// Unwrap makes a ConflictError an ErrConflict.
func (e *ConflictError) Unwrap() error { return ErrConflict }

// SQLSTATEs that this package causes, and so explains.
const (
	serializationFailure = "40001"
	deadlockDetected     = "40P01"
	lockNotAvailable     = "55P03"
)

// sqlState returns the SQLSTATE of err, "" when it isn't the server's.
func sqlState(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// remedy says what to do about the mistakes in a table or in T that only the
// server can see.
func remedy(err error) string {
	switch sqlState(err) {
	case "42P01": // undefined_table
		return " (names are taken as PostgreSQL stores them, which is in lower case unless they were quoted; write schema.table for one that isn't on the search_path)"
	case "42703": // undefined_column
		return ` (a field's column: give its exact name in a db tag, or db:"-"; the version's: ALTER TABLE … ADD COLUMN version bigint NOT NULL DEFAULT 1, or WithVersion; the key's: WithKey)`
	case "42P10": // invalid_column_reference, here only from ON CONFLICT
		return " (the key column needs a PRIMARY KEY or UNIQUE constraint of its own)"
	case "22003": // numeric_value_out_of_range
		return " (the version column has to be bigint)"
	case "428C9": // generated_always
		return ` (tag a generated column of T with readonly, as in db:"total,readonly")`
	}
	return ""
}
