package pglock

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// heartbeat bounds how long a holder may go on without having heard from the
// server: within it, the end of the session is noticed.
const heartbeat = 5 * time.Second

// session is a connection that holds advisory locks, in no pool and in no
// transaction. A goroutine of its own has the connection: it sends what it is
// asked to, and reads otherwise, so that the end of the session is seen at once.
type session struct {
	bank *bank
	conn *pgx.Conn
	pid  int32
	born time.Time

	// The bank's mutex guards these.
	claims  int       // locks, tries and a wait
	waits   *Key      // what it stands in line for
	emptied time.Time // since when without a claim
	expiry  *time.Timer

	mu       sync.Mutex // guards these
	releases []*job     // they go first
	tries    []*job
	alone    []func(lost error) // for a session without a lock
	wake     context.CancelFunc // ends the reading
	stopped  bool
	lost     error // set at its end

	// The goroutine's own.
	heard time.Time // from the server
	broke error     // what closed the connection
	held  map[lockID]*holding
	locks map[*Lock]struct{}
}

// goneError says that a session has ended, and with it whatever an unanswered
// call may have locked there.
type goneError struct{ err error }

func (e *goneError) Error() string { return "pglock: the session has ended: " + e.err.Error() }
func (e *goneError) Unwrap() error { return e.err }

func newSession(b *bank, conn *pgx.Conn) *session {
	now := time.Now()
	return &session{bank: b, conn: conn, pid: int32(conn.PgConn().PID()), born: now, heard: now,
		held: map[lockID]*holding{}, locks: map[*Lock]struct{}{}}
}

// run has the connection until that is lost or the session is stopped. Twice a
// heartbeat at least it wants an answer, so that a network that has gone silent
// is noticed within one.
func (s *session) run() {
	for !s.conn.IsClosed() {
		if time.Since(s.heard) >= heartbeat/2 && s.ping() != nil {
			continue
		}
		round, alone, look, cancel := s.next()
		switch {
		case alone != nil:
			alone(nil)
		case round != nil:
			s.do(round)
		case look != nil:
			_, err := s.conn.WaitForNotification(look)
			cancel()
			_ = s.note(err)
		default:
			s.end(ErrClosed)
			return
		}
	}
	if s.broke == nil {
		s.broke = errors.New("its connection was closed")
	}
	s.end(s.broke)
}

// stop has the connection closed once what was asked is done.
func (s *session) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
	s.wakeUp()
}

func (s *session) wakeUp() {
	if s.wake != nil {
		s.wake()
	}
}

// end tells everybody before it sees to the connection, which can take a second.
func (s *session) end(err error) {
	s.bank.forget(s)
	s.mu.Lock()
	s.lost = err
	left, alone := append(s.releases, s.tries...), s.alone
	s.mu.Unlock()
	for l := range s.locks {
		l.end(l.lost(err))
		s.bank.client.drop(l)
	}
	endSession(s.conn)
	for _, j := range left {
		j.end(false, &goneError{err})
	}
	for _, run := range alone {
		run(err)
	}
}

// alive asks the server whether a spare is still good.
func (s *session) alive() bool {
	answer := make(chan bool, 1)
	s.askAlone(func(lost error) {
		good := lost == nil && s.ping() == nil
		if !good {
			s.bank.give(s)
		}
		answer <- good
	})
	return <-answer
}

func (s *session) ping() error {
	ctx, cancel := context.WithTimeout(context.Background(), heartbeat/2)
	defer cancel()
	err := s.conn.Ping(ctx)
	if _, answered := errors.AsType[*pgconn.PgError](err); err != nil && !answered {
		closeConn(s.conn)
	}
	return s.note(err)
}

// scan sends a statement that waits for nothing, whoever gives up on it: a
// connection that breaks takes all its locks along.
func (s *session) scan(sql string, args []any, into ...any) error {
	ctx, cancel := context.WithTimeout(context.Background(), heartbeat/2)
	defer cancel()
	return s.note(s.conn.QueryRow(ctx, sql, args...).Scan(into...))
}

// note keeps in mind when the server was last heard, or why it is heard no more.
func (s *session) note(err error) error {
	if err != nil && s.conn.IsClosed() {
		if s.broke == nil {
			s.broke = err
			s.bank.forget(s)
		}
		return &goneError{err}
	}
	if _, answered := errors.AsType[*pgconn.PgError](err); err == nil || answered {
		s.heard = time.Now()
	}
	return err
}
