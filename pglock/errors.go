package pglock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// Sentinels, one for each meaning. Each says who returns it; the typed errors
// below carry the data and match them by errors.Is.
var (
	// ErrLocked says that the caller never had the lock: somebody else holds
	// it. Returned by every Try function, by NoWait and a lock timeout, and
	// together with the context's error by a wait that was given up, whether it
	// was for somebody or for a slow server.
	ErrLocked = errors.New("pglock: locked")

	// ErrLost says that the caller had the lock and has it no longer. It is the
	// cause of a lease's or a lock's Context, and what Err, Guard, InTx and
	// Release return after that. Returned too by LockRow, LockRows and LockTx in
	// a transaction that the server has ended for its SetHoldTimeout.
	ErrLost = errors.New("pglock: lost")

	// ErrFenced says that the resource has accepted a higher token, so that the
	// write comes too late. Returned by Fence, Explain and InTx; the transaction is
	// aborted.
	ErrFenced = errors.New("pglock: fenced")

	// ErrUnpresented says that a protected table was written to without a lease
	// that it accepts. Returned by Explain and InTx.
	ErrUnpresented = errors.New("pglock: the table is protected, and no lease that it accepts was presented")

	// ErrNotFound says that the query found no row to lock. Returned by
	// LockRow; it matches pgx.ErrNoRows too.
	ErrNotFound = errors.New("pglock: row not found")

	// ErrNoSchema says that the database lacks the schema pglock, or that it is
	// older than this package needs. Returned by whatever is first to use it.
	ErrNoSchema = errors.New("pglock: schema pglock is missing or too old: apply the migrations (run pglock migrate up, migrations.Up or goose)")

	// ErrFull says that the server has no room for one more lock, or would soon have
	// none. Returned by Lock and LockTx and their kin.
	ErrFull = errors.New("pglock: no room for more advisory locks")

	// ErrReleased is what Err returns, and the cause of Context, once the
	// holder has released: nothing was lost.
	ErrReleased = errors.New("pglock: released")

	// ErrClosed says that the Client was closed before.
	ErrClosed = errors.New("pglock: client is closed")
)

// HeldError says who holds a lease and until when. It matches ErrLocked.
// Owner, Token and ExpiresAt are zero where the holder could not be read, as
// when another session is just creating the name.
type HeldError struct {
	Name      string
	Owner     string    // what the holder's WithOwner says
	Token     Token     // the holder's
	ExpiresAt time.Time // by the database's clock
}

func (e *HeldError) Error() string {
	if e.Token == 0 {
		return fmt.Sprintf("pglock: lease %q is being taken by somebody else", e.Name)
	}
	return fmt.Sprintf("pglock: lease %q is held by %q with token %d until %s",
		e.Name, e.Owner, e.Token, e.ExpiresAt.Format(time.RFC3339Nano))
}

// Is makes errors.Is(err, ErrLocked) true.
func (e *HeldError) Is(target error) bool { return target == ErrLocked }

// Cause says how a lease or a lock was lost.
type Cause string

// The causes of a loss.
const (
	Expired       Cause = "expired"                // its time ran out and nobody else is known to have it
	Taken         Cause = "taken"                  // its time ran out and somebody else was granted it
	GivenBack     Cause = "released by its holder" // the handle was used after its own Release; matches ErrReleased too
	ForceReleased Cause = "released by force"      // its row was freed, but not by this handle
	Unreachable   Cause = "unreachable"            // the server could not be asked in time, or its answer was lost
)

// LostError says which lock was lost and how. It matches ErrLost, and what
// made the server unreachable is found by errors.As.
type LostError struct {
	Name  string // the lease's name, or the key of an advisory lock
	Token Token  // of the tenure that ended; 0 for an advisory lock
	Cause Cause
	Err   error // what the server or the network said; may be nil
}

func (e *LostError) Error() string {
	s := fmt.Sprintf("pglock: %q lost: %s", e.Name, e.Cause)
	if e.Token != 0 {
		s = fmt.Sprintf("pglock: lease %q with token %d lost: %s", e.Name, e.Token, e.Cause)
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Is makes errors.Is(err, ErrLost) true.
func (e *LostError) Is(target error) bool { return target == ErrLost }

// Unwrap returns what made the server unreachable.
func (e *LostError) Unwrap() error { return e.Err }

// FencedError says which token came too late. It matches ErrFenced; the
// server's own error is found by errors.As.
type FencedError struct {
	Resource string
	Token    Token // presented
	Highest  Token // accepted before
	Err      error // the server's
}

func (e *FencedError) Error() string {
	return fmt.Sprintf("pglock: resource %q is fenced: presented token %d, accepted %d", e.Resource, e.Token, e.Highest)
}

// Is makes errors.Is(err, ErrFenced) true.
func (e *FencedError) Is(target error) bool { return target == ErrFenced }

// Unwrap returns the server's error.
func (e *FencedError) Unwrap() error { return e.Err }

// BlockedError says which backends were in the way when a wait ended without
// the lock. It matches ErrLocked. Where it matches a context's error too, the
// wait was given up, and whether anybody was in the way isn't known.
type BlockedError struct {
	What  string    // what was to be locked or freed, for the message
	Pids  []int32   // the blocking backends, as far as the server tells; 0 is a prepared transaction
	Since time.Time // when the oldest of their transactions began; zero where unknown
	Err   error     // the server's, or the context's; may be nil
}

func (e *BlockedError) Error() string {
	s := "pglock: " + e.What + " is blocked"
	if errors.Is(e.Err, context.Canceled) || errors.Is(e.Err, context.DeadlineExceeded) {
		s = "pglock: gave up on " + e.What + ", locked or slow to come"
	}
	if len(e.Pids) > 0 {
		s += fmt.Sprintf(" by backend %v", e.Pids)
	}
	if !e.Since.IsZero() {
		s += " since " + e.Since.Format(time.RFC3339Nano)
	}
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Is makes errors.Is(err, ErrLocked) true.
func (e *BlockedError) Is(target error) bool { return target == ErrLocked }

// Unwrap returns the server's error.
func (e *BlockedError) Unwrap() error { return e.Err }

// FullError says that the server's table of locks, which all its clients share, is
// full, or that one client has taken half of it. It matches ErrFull.
type FullError struct {
	Held int   // advisory locks of this Client; 0 where the server itself refused
	Most int   // that it may hold
	Err  error // the server's: SQLSTATE 53200; nil where the Client refused
}

func (e *FullError) Error() string {
	const remedy = "hold fewer, lock something larger, or raise max_locks_per_transaction"
	if e.Err != nil {
		return fmt.Sprintf("pglock: the server's table of locks is full: %s: %v", remedy, e.Err)
	}
	return fmt.Sprintf("pglock: this client has %d advisory locks, half of what the server's table has room for: %s", e.Held, remedy)
}

// Is makes errors.Is(err, ErrFull) true.
func (e *FullError) Is(target error) bool { return target == ErrFull }

// Unwrap returns the server's error.
func (e *FullError) Unwrap() error { return e.Err }

// full names the error of a server that has no room for a lock; any other it
// returns as it is.
func full(err error) error {
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok && pg.Code == "53200" { // out_of_memory
		return &FullError{Err: err}
	}
	return err
}
