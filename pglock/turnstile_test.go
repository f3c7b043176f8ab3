package pglock_test

import (
	"context"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/pglock"
)

// turnstile is a spy before which acquires, releases and exchanges stand while
// it is shut, each on a connection of its own.
type turnstile struct {
	spy
	arrived chan *statement
	plug    sync.WaitGroup // the call that the others come after

	mu   sync.Mutex
	open chan struct{} // closed: it is open
}

var turned = regexp.MustCompile(`FROM pglock\.(acquire_one|release_one|exchange)\(`)

// turnstiled returns a client whose statements go through a turnstile that is
// open.
func turnstiled(t testing.TB, dsn string) (*pglock.Client, *turnstile) {
	t.Helper()
	g := &turnstile{arrived: make(chan *statement, 100), open: make(chan struct{})}
	close(g.open)
	return newClient(t, poolBy(t, dsn, func(config *pgxpool.Config) {
		config.ConnConfig.Tracer = g
		config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	})), g
}

func (g *turnstile) TraceQueryStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	ctx = g.spy.TraceQueryStart(ctx, conn, data)
	if !turned.MatchString(data.SQL) {
		return ctx
	}
	g.mu.Lock()
	open := g.open
	g.mu.Unlock()
	select {
	case <-open:
	default:
		g.arrived <- ctx.Value(&g.spy).(*statement)
		<-open
	}
	return ctx
}

func (g *turnstile) shut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = make(chan struct{})
	for len(g.arrived) > 0 { // of a time before
		<-g.arrived
	}
}

func (g *turnstile) let() {
	g.mu.Lock()
	defer g.mu.Unlock()
	close(g.open)
}

// together makes calls while one of the client's statements stands at the
// turnstile, and returns the statements that then stand there with all of them.
// It returns none where there are more than the client has connections: the
// machine was slow. The turnstile is shut when it returns.
func (g *turnstile) together(t testing.TB, c *pglock.Client, calls ...func()) (statements []*statement) {
	t.Helper()
	g.shut()
	g.plug.Go(func() {
		ctx := context.Background() // it may outlast the test's own
		if l, err := c.TryAcquire(ctx, t.Name()+"/plug", time.Hour); err != nil {
			t.Error(err)
		} else if err := l.Release(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(g.plug.Wait)
	<-g.arrived
	for _, call := range calls {
		go call()
	}
	for n := 0; n < len(calls); {
		select {
		case st := <-g.arrived:
			n += len(st.released()) + len(st.wanted())
			statements = append(statements, st)
		case <-time.After(limit / 10):
			return nil
		}
	}
	return statements
}

// accompanied says whether a statement carried a name together with others.
func accompanied(statements []*statement, name string) bool {
	return slices.ContainsFunc(statements, func(st *statement) bool {
		all := slices.Concat(st.released(), st.wanted())
		return len(all) > 1 && slices.Contains(all, name)
	})
}

// shown runs a test until it has shown something: until the calls that it makes at
// the same time have met.
func shown(t *testing.T, once func(try int) bool) {
	t.Helper()
	for try := range 20 {
		if once(try) || t.Failed() {
			return
		}
	}
	t.Error("the calls never met: this test shows nothing")
}

// released returns the names that a release or an exchange releases.
func (st *statement) released() []string {
	switch names := st.args[0].(type) {
	case []string:
		return names
	case string:
		if strings.Contains(st.sql, "pglock.release_one(") {
			return []string{names}
		}
	}
	return nil
}

// wanted returns the names that an acquire or an exchange tries.
func (st *statement) wanted() []string {
	switch {
	case strings.Contains(st.sql, "pglock.exchange("):
		return st.args[2].([]string)
	case strings.Contains(st.sql, "pglock.acquire_one("):
		return []string{st.args[0].(string)}
	}
	return nil
}
