package pglock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// LockTx waits for the advisory locks of keys and holds them until tx ends; no
// other function frees them. It works through a pooler in transaction mode. A
// key that tx holds already is held on.
//
// Several keys are locked in the order of their values, whatever the order of
// the call, so that two callers never wait for each other. Keys locked by an
// earlier call in the same tx are outside that order: lock all in one call.
//
// No keys, or an invalid one, is an error before any SQL and leaves tx usable.
// Any other error aborts tx: a wait longer than lock_timeout (SetLockTimeout)
// is a *BlockedError (ErrLocked), and so is one that ctx ended, which matches
// ctx.Err() too and closes the connection; a deadlock is named as one; a server
// that has no room for more locks is a *FullError (ErrFull). Whatever of the keys
// was locked by then is freed when tx is rolled back.
//
// One SELECT for each key, in one round trip (PostgreSQL manual, 13.3.5
// Advisory Locks); see KeyOf for the number of a name:
//
//	SELECT pg_advisory_xact_lock($1)
func LockTx(ctx context.Context, tx pgx.Tx, keys ...Key) error {
	keys, err := forCall(ctx, keys)
	if err != nil {
		return err
	}
	batch := &pgx.Batch{}
	for _, k := range keys {
		sql, args := k.call("pg_advisory_xact_lock")
		batch.Queue(sql, args...)
	}
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return full(waited(ctx, fmt.Sprintf("advisory lock %q", keys), err))
	}
	return nil
}

// TryLockTx is LockTx that never waits and locks all keys or none. Where
// somebody else holds one it returns a *BlockedError (ErrLocked) with the
// backends that do, and tx stays usable, without any of the keys that it did
// not hold before. Any other error is as with LockTx.
//
// One SELECT for each key, in one round trip, between SAVEPOINT and RELEASE or
// ROLLBACK TO where there are several; see KeyOf for the number of a name:
//
//	SELECT pg_try_advisory_xact_lock($1)
func TryLockTx(ctx context.Context, tx pgx.Tx, keys ...Key) error {
	keys, err := forCall(ctx, keys)
	if err != nil {
		return err
	}
	var refused []Key
	batch := &pgx.Batch{}
	if len(keys) > 1 {
		batch.Queue("SAVEPOINT pglock")
	}
	for _, k := range keys {
		sql, args := k.call("pg_try_advisory_xact_lock")
		batch.Queue(sql, args...).QueryRow(func(row pgx.Row) error {
			var locked bool
			err := row.Scan(&locked)
			if !locked {
				refused = append(refused, k)
			}
			return err
		})
	}
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return full(fmt.Errorf("pglock: advisory lock %q: %w", keys, err))
	}

	blocked := &BlockedError{}
	batch = &pgx.Batch{}
	if len(keys) > 1 && len(refused) > 0 {
		batch.Queue("ROLLBACK TO SAVEPOINT pglock")
	}
	if len(keys) > 1 {
		batch.Queue("RELEASE SAVEPOINT pglock")
	}
	if len(refused) > 0 {
		blocked.What = refused[0].what()
		refused[0].queueHolders(batch, blocked)
	}
	if batch.Len() == 0 {
		return nil
	}
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return fmt.Errorf("pglock: advisory lock %q: %w", keys, err)
	}
	if len(refused) > 0 {
		return blocked
	}
	return nil
}

// forCall checks what LockTx and TryLockTx were given and puts it in order.
func forCall(ctx context.Context, keys []Key) ([]Key, error) {
	if len(keys) == 0 {
		return nil, errors.New("pglock: no key to lock")
	}
	keys, err := inOrder(keys)
	if err != nil {
		return nil, err
	}
	return keys, ctx.Err()
}

// A shared lock stands beside shared ones: only an exclusive holder is in its
// way. A prepared transaction has no backend. pg_stat_activity hides from a role what others do, so that since may be
// unknown.
const holdersSQL = `SELECT array_agg(coalesce(l.pid, 0)), min(a.xact_start)
FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid = $1::bigint::oid AND l.objid = $2::bigint::oid AND l.objsubid = $3::int
  AND (l.mode = 'ExclusiveLock' OR NOT $4::bool)`

// queueHolders asks who is in the way of k.
func (k Key) queueHolders(batch *pgx.Batch, into *BlockedError) {
	batch.Queue(holdersSQL, append(k.place(), k.shared)...).QueryRow(func(row pgx.Row) error {
		var since *time.Time
		err := row.Scan(&into.Pids, &since)
		if since != nil {
			into.Since = *since
		}
		return err
	})
}
