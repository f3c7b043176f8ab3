package pglock

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// job is a try or a release. The session's goroutine does it; after the session's
// end whoever asks is told so, and so are those that were left.
type job struct {
	id lockID

	// begin returns a statement that answers yes or no, or "" where nothing has to
	// be asked. end has the answer, no without one. Where the session has ended it
	// is a goneError, perhaps without a begin.
	begin func() (sql string, args []any)
	end   func(yes bool, err error)

	sql  string
	args []any
}

// roundMost bounds how many jobs are sent together.
const roundMost = 256

// next returns what to do; or a context to read under until there is something;
// or nothing once the session was stopped.
func (s *session) next() (round []*job, alone func(error), look context.Context, cancel context.CancelFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.alone) > 0 {
		alone, s.alone = s.alone[0], s.alone[1:]
		return nil, alone, nil, nil
	}
	seen := map[lockID]bool{}
	for _, queue := range []*[]*job{&s.releases, &s.tries} {
		var left []*job
		for _, j := range *queue {
			// What becomes of one decides what the next of the same key is told.
			if seen[j.id] || len(round) == roundMost {
				left = append(left, j)
				continue
			}
			seen[j.id] = true
			round = append(round, j)
		}
		*queue = left
	}
	if round == nil && !s.stopped {
		look, cancel = context.WithDeadline(context.Background(), s.heard.Add(heartbeat/2))
		s.wake = cancel
	}
	return round, nil, look, cancel
}

// do sends what the jobs of a round have to ask, in one round trip. An error ends
// only its own job: what the server has passed over because of it is sent again.
// Session locks and unlocks before it stand, though the batch is one transaction.
func (s *session) do(round []*job) {
	batch := &pgx.Batch{}
	var sent []*job
	for _, j := range round {
		if j.sql, j.args = j.begin(); j.sql == "" {
			j.end(false, nil)
			continue
		}
		batch.Queue(j.sql, j.args...)
		sent = append(sent, j)
	}
	answers := make([]bool, len(sent))
	n := 0
	var failed error
	if len(sent) > 1 {
		ctx, cancel := context.WithTimeout(context.Background(), heartbeat/2)
		results := s.conn.SendBatch(ctx, batch)
		for ; n < len(sent) && failed == nil; n++ {
			failed = s.note(results.QueryRow().Scan(&answers[n]))
		}
		_ = results.Close() // an error is failed's again
		cancel()
	}
	for i, j := range sent {
		var err error
		if i >= n {
			err = s.scan(j.sql, j.args, &answers[i])
		} else if i == n-1 {
			err = failed
		}
		j.end(answers[i], err)
	}
}

// ask has a job done, a release before the tries.
func (s *session) ask(j *job, release bool) {
	s.mu.Lock()
	lost := s.lost
	switch {
	case lost != nil:
	case release:
		s.releases = append(s.releases, j)
	default:
		s.tries = append(s.tries, j)
	}
	s.wakeUp()
	s.mu.Unlock()
	if lost != nil {
		j.end(false, &goneError{lost})
	}
}

// askAlone has the goroutine of a session that holds nothing run something.
func (s *session) askAlone(run func(lost error)) {
	s.mu.Lock()
	lost := s.lost
	if lost == nil {
		s.alone = append(s.alone, run)
	}
	s.wakeUp()
	s.mu.Unlock()
	if lost != nil {
		run(lost)
	}
}
