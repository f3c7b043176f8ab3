package pglock_test

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// spy records what the connections of a pool's configuration send.
type spy struct {
	mu       sync.Mutex
	connects int
	sent     []*statement
}

type statement struct {
	sql      string
	args     []any
	answered bool
}

// poolBy returns a pool on the DSN whose configuration edit has changed.
func poolBy(t testing.TB, dsn string, edit func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	edit(config)
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// spied returns a pool and what hears everything that it, or a client made
// from it, sends.
func spied(t testing.TB, dsn string) (*pgxpool.Pool, *spy) {
	t.Helper()
	s := &spy{}
	return poolBy(t, dsn, func(config *pgxpool.Config) { config.ConnConfig.Tracer = s }), s
}

// heard returns the statements sent so far that contain part.
func (s *spy) heard(part string) (found []*statement) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, st := range s.sent {
		if strings.Contains(st.sql, part) {
			found = append(found, st)
		}
	}
	return found
}

// used reports the connections opened and the statements sent.
func (s *spy) used() (connects, statements int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.connects, len(s.sent)
}

func (s *spy) note(sql string, args []any) *statement {
	s.mu.Lock()
	defer s.mu.Unlock()
	st := &statement{sql: sql, args: args}
	s.sent = append(s.sent, st)
	return st
}

// answers counts the statements with part that were answered without an error.
func (s *spy) answers(part string) (n int) {
	for _, st := range s.heard(part) {
		s.mu.Lock()
		if st.answered {
			n++
		}
		s.mu.Unlock()
	}
	return n
}

func (s *spy) TraceConnectStart(ctx context.Context, _ pgx.TraceConnectStartData) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.connects++
	return ctx
}

func (s *spy) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	return context.WithValue(ctx, s, s.note(data.SQL, data.Args))
}

func (s *spy) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ctx.Value(s).(*statement).answered = data.Err == nil
}

func (s *spy) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	s.note(data.SQL, data.Args)
}

func (s *spy) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

func (s *spy) TraceConnectEnd(context.Context, pgx.TraceConnectEndData)        {}
func (s *spy) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}
