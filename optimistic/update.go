package optimistic

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// Attempts without a lock. A first conflict says little, a second one says
	// that the row is hot, and there waiting in line is both faster at the tail
	// and fairer than any backoff.
	unlockedAttempts = 2

	// Attempts in all. With the row locked one is enough, unless the lock isn't
	// to be had.
	updateAttempts = 8
)

// Update reads the row with the key, lets fn say what it should become, and
// writes that if the row is still at the version that was read; if not, it
// starts again. It returns the row as stored. The key and version columns are
// not taken from what fn returns.
//
// fn may run several times, each time on a freshly decoded value, which it may
// change in place. It must be free of side effects and must not use db: from
// the third attempt on the row is locked while fn runs. When it returns
// ErrNoChange nothing is written, and Update returns the row that fn saw and
// nil. Any other error of fn ends Update and is returned as it is.
//
// A second attempt follows the first at once. After two conflicts Update takes a
// row lock (FOR NO KEY UPDATE, which lets foreign key checks pass), reads, calls
// fn and writes under it: on a pool or a connection in a transaction of its own
// at READ COMMITTED, in a transaction of the caller's in a savepoint. The wait
// for the lock ends before ctx does, by a quarter of what it has left or by a
// second, whichever is less, or earlier if lock_timeout says so. Where that was
// too short, and on 40001 and 40P01 in a transaction of its own, further
// attempts follow, eight in all, each after a random pause, unless ctx ends too
// soon for them. Then it is ErrExhausted, which holds the last conflict.
//
// In a transaction of the caller's all that happens inside it. At READ COMMITTED
// a conflict, a veto, a missing row, ErrExhausted and an error of fn leave the
// transaction usable. At REPEATABLE READ and above the first conflict is a
// serialization failure, which aborts it, and the error is ErrRetryOutside.
//
// Two statements without a conflict: the SELECT of Get and the UPDATE of
// CompareAndSet.
func (t *Table[T]) Update(ctx context.Context, db DB, key any, fn func(T) (T, error)) (Versioned[T], error) {
	const verb = "update"
	if err := t.check(ctx, db, key); err != nil {
		return Versioned[T]{}, err
	}
	if fn == nil {
		return Versioned[T]{}, fmt.Errorf("optimistic: update %s: fn is nil", t.name)
	}
	u := &updater[T]{Table: t, key: key, fn: fn, joined: joined(db)}
	var last error
	n := 0
	for n < updateAttempts {
		if n > unlockedAttempts && !pause(ctx, n-unlockedAttempts) {
			break
		}
		n++
		locked, began := n > unlockedAttempts, time.Now()
		r, err := u.attempt(ctx, db, locked)
		if err == nil {
			return r.Versioned, nil
		}
		if stop, ok := err.(*fnError); ok {
			return Versioned[T]{}, stop.err
		}
		t.tell(ctx, key, n, err)
		if !again(err, locked, u.joined) {
			return Versioned[T]{}, t.fail(verb, db, key, err)
		}
		last = err
		if locked && errors.Is(err, ErrConflict) {
			break // fn does that, and would do it again
		}
		if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < time.Since(began) {
			break // the next wait would be shorter than the one that wasn't enough
		}
	}
	now, err := u.giveUp(ctx, db, n, last)
	return now, t.fail(verb, db, key, err)
}

// again says whether another attempt may succeed where this one met err. In the
// caller's transaction only what left it usable counts: a conflict, and a lock
// timeout that a savepoint has caught.
func again(err error, locked, joined bool) bool {
	if errors.Is(err, ErrUnknownCommit) || errors.Is(err, ErrVetoed) {
		return false
	}
	switch sqlState(err) {
	case lockNotAvailable:
		return locked || !joined
	case serializationFailure, deadlockDetected:
		return !joined
	}
	return errors.Is(err, ErrConflict)
}

// An fnError carries an error of fn past everything that looks at errors of the
// database: it may itself wrap a 40001 from somewhere else.
type fnError struct{ err error }

func (e *fnError) Error() string { return e.err.Error() }

// An updater is one call of Update.
type updater[T any] struct {
	*Table[T]
	key    any
	fn     func(T) (T, error)
	joined bool           // the transaction is the caller's
	lost   *ConflictError // of an earlier attempt
}

// giveUp words the end of the attempts. Whatever the last of them met, what the
// caller wants to know is the conflict: it is read here if no attempt came to.
func (u *updater[T]) giveUp(ctx context.Context, db DB, n int, last error) (now Versioned[T], err error) {
	if u.lost != nil && u.lost.Current == nil {
		now, err = u.why(ctx, db, u.key, u.lost.Expected, nil)
		if errors.Is(err, ErrVetoed) || errors.Is(err, ErrNotFound) {
			return now, err
		}
		if conflict, ok := err.(*ConflictError); ok {
			*u.lost = *conflict
		}
	} else if u.lost != nil {
		now = Versioned[T]{Value: u.lost.Current.(T), Version: u.lost.Actual}
	}
	reason := ErrExhausted
	if ctx.Err() != nil {
		reason = ctx.Err()
	}
	err = fmt.Errorf("%w after %d attempts: %w", reason, n, last)
	if u.lost != nil && last != error(u.lost) {
		err = fmt.Errorf("%w, and before that: %w", err, u.lost)
	}
	return now, err
}

func (u *updater[T]) attempt(ctx context.Context, db DB, locked bool) (r *row[T], err error) {
	if !locked {
		if r, err = u.look(ctx, db, u.selectSQL, u.args(u.key)...); err == nil {
			r, _, err = u.decide(ctx, db, r, locked)
		}
		return r, err
	}
	err = within(ctx, db, func(db DB) (wrote bool, err error) {
		if r, err = u.lookLocked(ctx, db); err == nil {
			r, wrote, err = u.decide(ctx, db, r, locked)
		}
		return wrote, err
	})
	return r, err
}

// decide takes the row as read through fn and the comparison.
func (u *updater[T]) decide(ctx context.Context, db DB, now *row[T], locked bool) (r *row[T], wrote bool, err error) {
	if u.lost != nil {
		if u.lost.Expected == now.Version {
			return nil, false, ErrVetoed
		}
		*u.lost = *u.conflict(u.key, u.lost.Expected, now)
	}
	next, err := u.fn(now.draft)
	if errors.Is(err, ErrNoChange) {
		return now, false, nil
	}
	if err != nil {
		return nil, false, &fnError{err}
	}
	r, err = u.swap(ctx, db, u.key, now.Version, &next)
	if err != nil || r != nil {
		return r, err == nil, err
	}
	if locked {
		// Nobody else can have changed the row, and what fn itself did to it is
		// about to be rolled back: this is the last look at it.
		_, err = u.why(ctx, db, u.key, now.Version, nil)
		return nil, false, err
	}
	u.lost = &ConflictError{Table: u.name, Key: u.key, Expected: now.Version}
	return nil, false, u.lost
}

// lookLocked reads the row under a lock that it waits for no longer than ctx
// would: a context that ends while a statement runs costs the connection, and
// the caller's transaction with it.
func (u *updater[T]) lookLocked(ctx context.Context, db DB) (*row[T], error) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return u.look(ctx, db, u.lockSQL, u.args(u.key)...)
	}
	left := time.Until(deadline)
	wait := max(1, (left - min(left/4, time.Second)).Milliseconds())
	was, err := lockTimeout(ctx, db, `
		WITH was AS MATERIALIZED (SELECT current_setting('lock_timeout') AS t)
		SELECT t, set_config('lock_timeout',
			least(nullif((extract(epoch FROM t::interval) * 1000)::bigint, 0), $1::bigint)::text, true)
		FROM was`, wait)
	if err != nil {
		return nil, err
	}
	r, err := u.look(ctx, db, u.lockSQL, u.args(u.key)...)
	if err == nil && u.joined {
		// A savepoint that is released keeps its settings.
		_, err = lockTimeout(ctx, db, `SELECT '', set_config('lock_timeout', $1, true)`, was)
	}
	return r, err
}

// lockTimeout sets lock_timeout for the transaction and returns what it was.
func lockTimeout(ctx context.Context, db DB, sql string, arg any) (was string, err error) {
	err = each(ctx, db, sql, []any{arg}, func(rows pgx.Rows) error { return rows.Scan(&was, nil) })
	return was, err
}
