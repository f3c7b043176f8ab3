package pglock

import (
	"context"
	"errors"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// listener hears for a client that its tickets were granted, on one connection
// whatever their number. It begins with the first that waits.
type listener struct {
	client  *Client
	channel string

	mu      sync.Mutex
	tickets map[string]*ticket // by claim
	names   map[string]int     // theirs, and how many each
	begun   bool
	quit    context.Context
	stopRun context.CancelFunc
	runs    sync.WaitGroup
	first   chan struct{} // closed once it is known whether it hears
}

const (
	// listenBound is how long the listener's connection may be silent before it
	// is tried, and how long such a try may take.
	listenBound = 5 * time.Second

	// echoBound is how long a notification to oneself may take. Through a
	// transaction pooler it never comes.
	echoBound = time.Second
)

func newListener(c *Client) *listener {
	l := &listener{client: c, channel: "pglock_" + strings.ReplaceAll(newClaim(), "-", ""),
		tickets: map[string]*ticket{}, names: map[string]int{}, first: make(chan struct{})}
	l.quit, l.stopRun = context.WithCancel(context.Background())
	return l
}

// begin starts the listener, and waits until it is known whether it hears.
func (l *listener) begin(ctx context.Context) {
	l.mu.Lock()
	if !l.begun {
		l.begun = true
		l.runs.Go(l.run)
	}
	l.mu.Unlock()
	select {
	case <-l.first:
	case <-ctx.Done():
	}
}

// ready says whether begin has been called and has its answer.
func (l *listener) ready() bool {
	select {
	case <-l.first:
		return true
	default:
		return false
	}
}

func (l *listener) expect(t *ticket) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tickets[t.request.claim] = t
	l.names[t.request.name]++
}

func (l *listener) forget(t *ticket) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.tickets, t.request.claim)
	if l.names[t.request.name]--; l.names[t.request.name] == 0 {
		delete(l.names, t.request.name)
	}
}

// expects says whether one of the tickets is for a name.
func (l *listener) expects(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.names[name] > 0
}

func (l *listener) stop() {
	l.stopRun()
	l.runs.Wait()
}

func (l *listener) run() {
	keeper := l.client.keeper
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, listenBound) {
		conn, err := l.subscribe()
		hears := err == nil
		if hears {
			pause = 10 * time.Millisecond
		} else if !keeper.deaf.Load() && l.quit.Err() == nil {
			tell(l.quit, l.client, Fallback{Err: err})
		}
		keeper.deaf.Store(!hears)
		select {
		case <-l.first:
		default:
			close(l.first)
		}
		if errors.Is(err, errDeaf) {
			return // tickets are looked after more often instead
		}
		if hears {
			keeper.lookAgain()
			err = l.hear(conn)
			closeConn(conn)
			if l.quit.Err() == nil {
				tell(l.quit, l.client, Fallback{Err: err})
			}
			keeper.deaf.Store(true)
			keeper.lookAgain()
		}
		select {
		case <-l.quit.Done():
			return
		case <-time.After(pause):
		}
	}
}

// errDeaf says that notifications don't come through.
var errDeaf = errors.New("pglock: notifications don't come through: a transaction pooler stands between")

// subscribe opens a connection that listens, and proves by a notification to
// itself that it hears.
func (l *listener) subscribe() (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(l.quit, listenBound)
	defer cancel()
	conn, err := l.client.dial(ctx)
	if err != nil {
		return nil, err
	}
	var pid uint32
	if _, err = conn.Exec(ctx, "LISTEN "+l.channel); err == nil {
		err = conn.QueryRow(ctx, "SELECT pg_backend_pid() FROM pg_notify($1::text, '')", l.channel).Scan(&pid)
	}
	if err == nil {
		heard, cancel := context.WithTimeout(ctx, echoBound)
		_, err = conn.WaitForNotification(heard)
		cancel()
		// A server that is merely slow answers for itself.
		if err != nil && l.quit.Err() == nil && pid != conn.PgConn().PID() {
			err = errDeaf
		}
	}
	if err != nil {
		closeConn(conn)
		return nil, err
	}
	return conn, nil
}

// hear passes on what comes until the connection is lost. A notification is a
// hint that anybody may send: only one that names a claim counts, which no
// other client knows.
func (l *listener) hear(conn *pgx.Conn) error {
	for {
		ctx, cancel := context.WithTimeout(l.quit, listenBound)
		n, err := conn.WaitForNotification(ctx)
		cancel()
		switch {
		case err == nil:
			l.pass(n.Payload)
		case conn.IsClosed() || l.quit.Err() != nil:
			return err
		default: // silent for a while: is it alive?
			ctx, cancel := context.WithTimeout(l.quit, listenBound)
			err := conn.Ping(ctx)
			cancel()
			if err != nil {
				return err
			}
		}
	}
}

// pass tells a ticket of its grant, which lasts as long as the ticket would
// have: its winner needs no statement.
func (l *listener) pass(payload string) {
	claim, token, ok := parseGrant(payload)
	if !ok {
		return
	}
	l.mu.Lock()
	t := l.tickets[claim]
	l.mu.Unlock()
	if t != nil {
		t.deliver(grant{token: token})
	}
}

// parseGrant reads "claim token".
func parseGrant(payload string) (claim string, token Token, ok bool) {
	claim, digits, _ := strings.Cut(payload, " ")
	n, err := strconv.ParseInt(digits, 10, 64)
	return claim, Token(n), err == nil
}
