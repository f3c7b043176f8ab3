package pglock_test

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
)

// gate is a tracer that stands before everything that a client sends, on
// whichever connection. It can be locked for a while, and it can be shut for
// good: then the client reaches nobody any more.
type gate struct {
	sync.RWMutex
	shut atomic.Bool
}

func (g *gate) pass(ctx context.Context) context.Context {
	g.RLock()
	defer g.RUnlock()
	if g.shut.Load() {
		over, cancel := context.WithCancel(ctx)
		cancel()
		return over
	}
	return ctx
}

func (g *gate) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return g.pass(ctx)
}

func (g *gate) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return g.pass(ctx)
}

func (*gate) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData)     {}
func (*gate) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (*gate) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}
