package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	unfenced = "unfenced"
	fenced   = "fenced"
)

// stories are the ways in which the paused client can end.
var stories = []string{unfenced, fenced}

// The balance at the beginning of a story and what each client withdraws.
const (
	deposit = 1000
	amountA = 100
	amountB = 200
)

// tell lets the story happen in two processes and returns what was seen.
//
// Nothing is ordered by sleeping: each step follows the event of the one
// before. That A's pause was longer than its TTL is known by B's being granted
// the lease.
func tell(ctx context.Context, db *database, name string, ttl time.Duration, out report) (t tale, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, 3*ttl+time.Minute, errors.New("it took too long"))
	defer cancel()
	if err := db.account.write(ctx, db.pool, deposit); err != nil {
		return t, err
	}
	b := brief{DSN: db.dsn, Schema: db.schema, TTL: ttl, Fenced: name == fenced}
	b.Name, b.Amount = "A", amountA
	a, err := spawn(ctx, b)
	if err != nil {
		return t, err
	}
	defer a.kill()
	b.Name, b.Amount = "B", amountB
	other, err := spawn(ctx, b)
	if err != nil {
		return t, err
	}
	defer other.kill()

	t = tale{Story: name, TTL: ttl, Began: now()}
	out.beginTale(t)
	s := &stage{tale: &t, show: out.event}
	if err := s.play(ctx, a, other); err != nil {
		return t, err
	}
	a.leave()
	other.leave()
	t.Balance, err = db.account.read(ctx, db.pool)
	return t, err
}

// stage collects the events of a tale as they come.
type stage struct {
	*tale
	show func(tale, event)
}

func (s *stage) add(e event) {
	s.Events = append(s.Events, e)
	s.show(*s.tale, e)
}

func (s *stage) do(ctx context.Context, p *process, c command) (event, error) {
	e, err := p.do(ctx, c)
	if err == nil {
		s.add(e)
	}
	return e, err
}

func (s *stage) play(ctx context.Context, a, b *process) error {
	e, err := s.do(ctx, a, acquire)
	if err != nil {
		return err
	}
	s.Tokens[0] = e.Token
	if _, err := s.do(ctx, a, look); err != nil {
		return err
	}
	if e, err = s.do(ctx, a, ask); err != nil {
		return err
	}
	if e.Kind != believed {
		return fmt.Errorf("client A lost its lease before it was stopped (%s): this machine is slow, give a longer -ttl than %v", e.Error, s.TTL)
	}
	if err := a.pause(); err != nil {
		return err
	}
	s.add(event{At: now(), Actor: "A", Kind: stopped, Token: e.Token})

	if err := s.takeOver(ctx, b); err != nil {
		return err
	}
	wrote, err := s.do(ctx, b, withdraw)
	if err != nil {
		return err
	}
	s.Expected = wrote.Written
	if _, err := s.do(ctx, b, release); err != nil {
		return err
	}

	if err := a.resume(); err != nil {
		return err
	}
	s.add(event{At: now(), Actor: "A", Kind: continued, Token: e.Token})
	if e, err = s.do(ctx, a, write); err != nil {
		return err
	}
	if e.Kind == accepted {
		s.Accepted = true
		s.Expected -= amountA // A was told that it has withdrawn
	}
	_, err = s.do(ctx, a, ask)
	return err
}

// takeOver lets B have the lease when A's has expired. When that was, the
// database told B when it tried, so that it can be shown as an event of its
// own.
func (s *stage) takeOver(ctx context.Context, b *process) error {
	e, err := s.do(ctx, b, try)
	if err != nil {
		return err
	}
	if e.Kind == held {
		over := event{At: e.At.Add(e.Left), Actor: "lease", Kind: expired, Token: e.Token}
		if e, err = b.do(ctx, acquire); err != nil {
			return err
		}
		if over.At.After(e.At) {
			over.At = e.At // by the time that the answers took
		}
		s.add(over)
		s.add(e)
	}
	s.Tokens[1] = e.Token
	return nil
}
