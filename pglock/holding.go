package pglock

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// holding is what the server has granted to a session once, for one Lock or for
// several that share it. A session is granted what it holds already as often as
// it likes: a key that is held here is never tried here again.
type holding struct {
	shared bool
	locks  int
}

// taken is what became of a try or a wait.
type taken struct {
	lock *Lock
	err  error
}

// try takes key where nobody is in the way; else the error is a *BlockedError,
// with who is if look is set. The session has a claim, which goes with the lock.
// The statement is short and is waited for, for up to a second after ctx has
// ended; what is granted after that is freed.
func (s *session) try(ctx context.Context, key Key, look bool) (*Lock, error) {
	answer := make(chan taken, 1)
	s.ask(&job{
		id:    key.id(),
		begin: func() (string, []any) { return s.question(key) },
		end: func(yes bool, err error) {
			if err = s.take(key, yes, look, err); err != nil {
				s.bank.give(s)
				answer <- taken{err: err}
				return
			}
			answer <- taken{lock: s.hold(ctx, key)}
		},
	}, false)
	longer, cancel := linger(ctx, time.Second)
	defer cancel(nil)
	select {
	case t := <-answer:
		return t.lock, t.err
	case <-longer.Done():
		s.bank.running.Go(func() {
			if t := <-answer; t.lock != nil {
				_ = t.lock.Release(context.Background())
			}
		})
		return nil, fmt.Errorf("pglock: advisory lock %q: %w", key, ctx.Err())
	}
}

// Somebody who waits for an exclusive lock comes before whoever wants to share
// what is held.
const noLineSQL = `SELECT NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
	AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
	AND classid = $1::bigint::oid AND objid = $2::bigint::oid AND objsubid = $3::int)`

// question is what the server has to say about a try; nothing where it is known
// here that it is refused.
func (s *session) question(key Key) (sql string, args []any) {
	switch h := s.held[key.id()]; {
	case h == nil:
		return key.call("pg_try_advisory_lock")
	case h.shared && key.shared:
		return noLineSQL, key.place()
	}
	return "", nil
}

// take notes what was granted.
func (s *session) take(key Key, yes, look bool, err error) error {
	if _, gone := errors.AsType[*goneError](err); gone {
		return err
	}
	h := s.held[key.id()]
	switch {
	case err != nil && h == nil:
		_ = s.settle(key) // what it says concerns the session
		fallthrough
	case err != nil:
		return full(fmt.Errorf("pglock: advisory lock %q: %w", key, err))
	case yes && h == nil:
		s.held[key.id()] = &holding{shared: key.shared, locks: 1}
		return nil
	case yes:
		h.locks++
		return nil
	}
	blocked := &BlockedError{What: key.what()}
	if h != nil && !(h.shared && key.shared) {
		blocked.Pids = []int32{s.pid}
	}
	if look {
		s.lookWho(key, blocked)
	}
	return blocked
}

// lookWho adds the other backends that are in the way.
func (s *session) lookWho(key Key, blocked *BlockedError) {
	ctx, cancel := context.WithTimeout(context.Background(), heartbeat/2)
	defer cancel()
	others := &BlockedError{}
	batch := &pgx.Batch{}
	key.queueHolders(batch, others)
	blocked.Err = s.note(s.conn.SendBatch(ctx, batch).Close()) // locked it is all the same
	blocked.Pids, blocked.Since = append(blocked.Pids, others.Pids...), others.Since
}

// wait takes key when it is its turn in the server's line. The session holds
// nothing else, so that it may break when ctx ends.
func (s *session) wait(ctx context.Context, key Key) (*Lock, error) {
	answer := make(chan taken, 1)
	s.askAlone(func(lost error) {
		err := lost
		if err == nil {
			sql, args := key.call("pg_advisory_lock")
			if _, err = s.conn.Exec(ctx, sql, args...); err == nil {
				s.heard = time.Now()
				s.held[key.id()] = &holding{shared: key.shared, locks: 1}
				s.bank.granted(s)
				answer <- taken{lock: s.hold(ctx, key)}
				return
			}
			_ = s.note(err)
			s.empty()
			err = full(waited(ctx, key.what(), err))
		}
		s.bank.give(s)
		answer <- taken{err: err}
	})
	t := <-answer
	return t.lock, t.err
}

// hold makes the handle of what was granted.
func (s *session) hold(ctx context.Context, key Key) *Lock {
	l := &Lock{client: s.bank.client, key: key, session: s, since: time.Now()}
	l.ctx, l.end = context.WithCancelCause(context.WithoutCancel(ctx))
	s.locks[l] = struct{}{}
	s.bank.client.keep(l)
	return l
}

// free gives back what a Lock stands for, in the server with the last that
// shares it, and its claim. The answer is nil, or why the lock was lost.
func (s *session) free(l *Lock) <-chan error {
	answer := make(chan error, 1)
	last := false
	s.ask(&job{
		id: l.key.id(),
		begin: func() (sql string, args []any) {
			delete(s.locks, l)
			h := s.held[l.key.id()]
			if last = h.locks == 1; last {
				return l.key.call("pg_advisory_unlock")
			}
			h.locks--
			return "", nil
		},
		end: func(yes bool, err error) {
			_, gone := errors.AsType[*goneError](err)
			if last {
				delete(s.held, l.key.id())
				switch {
				case err == nil && !yes:
					err = errors.New("its session did not hold it any more")
				case err != nil && !gone:
					err = s.settle(l.key)
				}
			}
			s.bank.give(s)
			answer <- err
		},
	}, true)
	return answer
}

const heldSQL = `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid()
	AND classid = $1::bigint::oid AND objid = $2::bigint::oid AND objsubid = $3::int)`

// settle sees to it that after an error key is not held, which the error alone
// doesn't prove: it can cross the grant. A session that can't be brought to that
// is closed, with all its locks: one that nobody knows of would never be freed.
func (s *session) settle(key Key) error {
	unlock, args := key.call("pg_advisory_unlock")
	var err error
	for end := time.Now().Add(heartbeat / 2); time.Now().Before(end) && !s.conn.IsClosed(); {
		held := true
		if err = s.scan(heldSQL, key.place(), &held); err == nil && !held {
			return nil
		}
		// A server that has no room to look unlocks all the same, with a warning
		// where there is nothing to unlock.
		if err = s.scan(unlock, args, &held); err == nil {
			return nil
		}
	}
	closeConn(s.conn)
	return s.note(fmt.Errorf("pglock: unlock %q: %w", key, err))
}

// empty sees to it that after an error nothing is held, or closes the
// connection.
func (s *session) empty() {
	if s.conn.IsClosed() {
		endSession(s.conn)
		return
	}
	var nothing bool
	if err := s.scan("SELECT pg_advisory_unlock_all() IS NOT NULL", nil, &nothing); err == nil {
		err = s.scan("SELECT NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())", nil, &nothing)
		if err == nil && nothing {
			return
		}
	}
	endSession(s.conn)
}
