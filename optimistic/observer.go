package optimistic

import (
	"context"
	"errors"
)

// Observer is told of conflicts, for metrics: of those that are returned, and of
// those that Update meets and retries, which nobody else sees. It is called on the
// goroutine of the call and must return quickly, above all where the transaction
// is the caller's and holds locks. A panic of its own is swallowed.
type Observer interface {
	Conflict(ctx context.Context, conflict Conflict)
}

// Conflict is a write that came too late for its row: an ErrConflict, or 40001,
// which at REPEATABLE READ and above means the same. There may be more fields
// later.
type Conflict struct {
	Table   string // as given to NewTable
	Key     any    // as given to the call
	Attempt int    // of Update, from 1; 1 for all else
}

// WithObserver sets who is told of conflicts. Exec and RunInTx belong to no table,
// and tell nobody. Default: nobody.
func WithObserver(observer Observer) Option { return func(o *options) { o.watch = observer } }

// tell tells the observer if err is a conflict.
func (t *Table[T]) tell(ctx context.Context, key any, attempt int, err error) {
	if t.watch == nil || !errors.Is(err, ErrConflict) && sqlState(err) != serializationFailure {
		return
	}
	defer func() { _ = recover() }()
	t.watch.Conflict(ctx, Conflict{Table: t.name, Key: key, Attempt: attempt})
}
