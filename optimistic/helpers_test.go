package optimistic_test

import (
	"context"
	"errors"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/optimistic"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// An account is the row of most tests.
type account struct {
	ID      int64
	Balance int64
}

var accounts = optimistic.NewTable[account]("accounts")

const createAccounts = `
	CREATE TABLE accounts (
		id      bigint PRIMARY KEY,
		balance bigint NOT NULL,
		version bigint NOT NULL DEFAULT 1
	);
	INSERT INTO accounts (id, balance) VALUES (1, 100), (2, 100)`

// newPool is a pool on a database of the test's own in which the SQL has been
// run. At the end of the test none of its connections may still be in use.
func newPool(t testing.TB, sql string, configure ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(pgtest.EmptyDSN(t))
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 20
	config.ConnConfig.RuntimeParams["statement_timeout"] = strconv.FormatInt(patience.Milliseconds(), 10)
	for _, c := range configure {
		c(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	closeAfter(t, pool)
	exec(t, pool, sql)
	return pool
}

// closeAfter closes a pool at the end of the test.
func closeAfter(t testing.TB, pool *pgxpool.Pool) {
	t.Cleanup(func() {
		closed := make(chan struct{})
		go func() { pool.Close(); close(closed) }() // waits for every connection
		select {
		case <-closed:
		case <-time.After(30 * time.Second):
			t.Errorf("%d connections were not given back", pool.Stat().AcquiredConns())
		}
	})
}

// runtimeParam sets a parameter of every session of a pool.
func runtimeParam(name, value string) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams[name] = value }
}

func exec(t testing.TB, db optimistic.DB, sql string, args ...any) {
	t.Helper()
	if _, err := db.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// query returns the single value of a query.
func query[V any](t testing.TB, db optimistic.DB, sql string, args ...any) V {
	t.Helper()
	rows, err := db.Query(t.Context(), sql, args...)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[V])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// stored reads an account without the package under test.
func stored(t testing.TB, db optimistic.DB, id int64) optimistic.Versioned[account] {
	t.Helper()
	return optimistic.Versioned[account]{
		Value:   account{ID: id, Balance: query[int64](t, db, `SELECT balance FROM accounts WHERE id = $1`, id)},
		Version: query[int64](t, db, `SELECT version FROM accounts WHERE id = $1`, id),
	}
}

// bump is another writer, who is always faster.
func bump(t testing.TB, db optimistic.DB, id int64) {
	t.Helper()
	exec(t, db, `UPDATE accounts SET balance = balance + 1000, version = version + 1 WHERE id = $1`, id)
}

func deposit(n int64) func(account) (account, error) {
	return func(a account) (account, error) {
		a.Balance += n
		return a, nil
	}
}

// acquire takes a connection out of a pool for the rest of the test.
func acquire(t testing.TB, pool *pgxpool.Pool) *pgx.Conn {
	t.Helper()
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Release)
	return conn.Conn()
}

func begin(t testing.TB, pool *pgxpool.Pool, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

func commit(t testing.TB, tx pgx.Tx) {
	t.Helper()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// patience bounds what a test waits for: a server on a busy machine, and not a
// thing that never comes.
const patience = time.Minute

// waitBlocked returns when some session waits for a lock that tx holds. Who ends
// instead of waiting says so through done.
func waitBlocked(t testing.TB, pool *pgxpool.Pool, tx pgx.Tx, done <-chan error) {
	t.Helper()
	pid := tx.Conn().PgConn().PID()
	began := time.Now()
	for query[int64](t, pool, `
		SELECT count(*) FROM pg_stat_activity
		WHERE datname = current_database() AND $1 = ANY (pg_blocking_pids(pid))`, pid) == 0 {
		select {
		case err := <-done:
			t.Fatalf("ended and did not wait: %v", err)
		default:
		}
		if time.Since(began) > patience {
			t.Fatalf("nobody waits for process %d after %v", pid, patience)
		}
	}
}

// receive takes what comes through a channel.
func receive[V any](t testing.TB, c <-chan V) (v V) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(patience):
		t.Errorf("nothing came in %v", patience)
	}
	return v
}

// want fails unless err is want. A nil want is success.
func want(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("got error %v, want %v", err, want)
	}
}

// wantState fails unless err holds the server's SQLSTATE.
func wantState(t testing.TB, err error, state string) {
	t.Helper()
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != state {
		t.Fatalf("got error %v, want SQLSTATE %s", err, state)
	}
}

// usable fails unless tx still takes statements.
func usable(t testing.TB, tx optimistic.DB) {
	t.Helper()
	if query[int](t, tx, `SELECT 1`) != 1 {
		t.Fatal("not usable")
	}
}

// A noSQL is a DB that no statement may reach.
type noSQL struct{ t testing.TB }

func (n noSQL) Begin(context.Context) (pgx.Tx, error) {
	n.t.Error("BEGIN was sent")
	return nil, errors.ErrUnsupported
}

func (n noSQL) Exec(_ context.Context, sql string, _ ...any) (pgconn.CommandTag, error) {
	n.t.Error("sent: " + sql)
	return pgconn.CommandTag{}, errors.ErrUnsupported
}

func (n noSQL) Query(_ context.Context, sql string, _ ...any) (pgx.Rows, error) {
	n.t.Error("sent: " + sql)
	return nil, errors.ErrUnsupported
}

// A wire counts the round trips of a pool's connections, and breaks them just
// after the server has answered: what was sent is done, and nobody hears of it.
type wire struct {
	cut   atomic.Bool
	turns atomic.Int64
}

func (w *wire) configure(c *pgxpool.Config) {
	dial := c.ConnConfig.DialFunc
	c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return &wireConn{Conn: conn, wire: w}, nil
	}
}

type wireConn struct {
	net.Conn
	wire *wire
	sent atomic.Bool // and not answered yet
}

func (c *wireConn) Write(p []byte) (int, error) {
	c.sent.Store(true)
	return c.Conn.Write(p)
}

func (c *wireConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err == nil && c.sent.Swap(false) {
		c.wire.turns.Add(1)
	}
	if err == nil && c.wire.cut.Load() {
		c.Conn.Close()
		return 0, net.ErrClosed
	}
	return n, err
}

// parallel runs fn n times at once and waits for all.
func parallel(n int, fn func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { fn(i) })
	}
	wg.Wait()
}

// newSamePool is another pool on the database of one, with none of its wires.
func newSamePool(t testing.TB, pool *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	return pgtest.PoolOn(t, pool.Config().ConnString())
}

// newPoolOn is as newSamePool, configured.
func newPoolOn(t testing.TB, pool *pgxpool.Pool, configure func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config := pool.Config()
	configure(config)
	other, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	closeAfter(t, other)
	return other
}

// wantedState says whether err holds the server's SQLSTATE.
func wantedState(err error, state string) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == state
}
