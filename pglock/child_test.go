package pglock_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/pglock"
)

// childEnv makes the test binary a client in a process of its own, to be
// stopped and killed by the test that started it.
const childEnv = "PAWL_TEST_CHILD"

// order is one line on a child's standard input: steps to be taken one after
// the other, whatever becomes of each.
type order struct {
	DSN   string // in the first order only
	Name  string // of the lease, of the resource and of the account
	TTL   time.Duration
	Steps []string
}

// report is one line on its standard output, the answer to an order.
type report struct {
	Token pglock.Token
	Pid   uint32   // the backend of its transaction
	Fates []string // what became of each step: "ok", or how it was refused
	Sent  bool     // a write or its COMMIT went out on a connection that was taken for open
	Built bool     // no answer yet: an acquire is about to be sent, and goes out with the next line
	Close []string // the answer to SIGTERM: the statements that Close sent
}

// childName is what a child's sessions go by.
func childName(pid int) string { return fmt.Sprint("child ", pid) }

// child obeys orders until its standard input ends, as it does with the parent.
func child(in io.Reader, out io.Writer) int {
	lines, reports := json.NewDecoder(in), json.NewEncoder(out)
	orders := make(chan order)
	go func() {
		for {
			var o order
			if err := lines.Decode(&o); err != nil {
				os.Exit(0) // whatever is under way
			}
			orders <- o
		}
	}()
	c := &childClient{orders: orders, reports: reports}
	if err := c.connect((<-orders).DSN); err != nil {
		fmt.Fprintln(os.Stderr, "child:", err)
		return 1
	}
	for o := range orders {
		c.order, c.report = o, report{}
		for _, step := range o.Steps {
			c.report.Fates = append(c.report.Fates, c.fate(c.do(step)))
		}
		if c.lease != nil {
			c.report.Token = c.lease.Token()
		}
		if c.tx != nil {
			c.report.Pid = c.tx.Conn().PgConn().PID()
		}
		if err := reports.Encode(c.report); err != nil {
			return 1
		}
	}
	return 0
}

// childClient is what a child does its steps with.
type childClient struct {
	orders  <-chan order
	reports *json.Encoder
	order   order
	report  report
	halt    bool // before the next acquire is sent
	mu      sync.Mutex
	sent    []string // of late

	pool    *pgxpool.Pool
	locks   *pglock.Client
	lease   *pglock.Lease
	tx      pgx.Tx
	balance int
}

func (c *childClient) connect(dsn string) error {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return err
	}
	config.MaxConns = 2
	config.ConnConfig.RuntimeParams["application_name"] = childName(os.Getpid())
	config.ConnConfig.Tracer = beforeSending(func(sql string) {
		c.mu.Lock()
		c.sent = append(c.sent, sql)
		c.mu.Unlock()
		if c.halt && strings.Contains(sql, "acquire") {
			c.halt = false
			_ = c.reports.Encode(report{Built: true}) // the parent would miss it
			<-c.orders
		}
	})
	if c.pool, err = pgxpool.NewWithConfig(context.Background(), config); err != nil {
		return err
	}
	c.locks = pglock.New(c.pool)
	return c.pool.Ping(context.Background())
}

// beforeSending is called when a statement has been built.
type beforeSending func(sql string)

func (f beforeSending) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	f(data.SQL)
	return ctx
}

func (beforeSending) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// do takes one step. None asks first whether the lease is still held.
func (c *childClient) do(step string) (err error) {
	ctx := context.Background()
	if c.lease == nil && slices.Contains([]string{"ask", "guard", "fence", "update", "write in InTx"}, step) {
		return errors.New("no lease")
	}
	if c.tx == nil && slices.Contains([]string{"bound the hold", "unbound the hold", "guard", "fence", "lock the row", "write the row", "read", "update", "commit"}, step) {
		return errors.New("no transaction")
	}
	switch step {
	case "acquire":
		c.lease, err = c.locks.TryAcquire(ctx, c.order.Name, c.order.TTL)
	case "acquire a hundred":
		for i := range 100 {
			if _, err := c.locks.TryAcquire(ctx, fmt.Sprintf("%s/%d", c.order.Name, i), c.order.TTL); err != nil {
				return err
			}
		}
	case "close on SIGTERM":
		c.closeOnSIGTERM(ctx)
	case "halting acquire":
		c.halt = true
		c.lease, err = c.locks.TryAcquire(ctx, c.order.Name, c.order.TTL)
	case "ask":
		err = c.lease.Err()
	case "begin":
		c.tx, err = c.pool.Begin(ctx)
	case "begin at REPEATABLE READ":
		c.tx, err = c.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	case "bound the hold":
		err = pglock.SetHoldTimeout(ctx, c.tx, c.order.TTL)
	case "unbound the hold":
		err = pglock.SetHoldTimeout(ctx, c.tx, time.Hour)
	case "guard":
		err = c.lease.Guard(ctx, c.tx)
	case "fence":
		err = pglock.Fence(ctx, c.tx, c.order.Name, c.lease.Token())
	case "lock the row":
		c.balance, err = pglock.LockRow(ctx, c.tx, pglock.ForNoKeyUpdate, pgx.RowTo[int], `SELECT balance FROM accounts WHERE name = $1`, c.order.Name)
	case "write the row":
		c.report.Sent = c.report.Sent || !c.tx.Conn().IsClosed()
		_, err = c.tx.Exec(ctx, `UPDATE accounts SET balance = $2 WHERE name = $1`, c.order.Name, c.balance-1)
	case "read":
		err = c.tx.QueryRow(ctx, `SELECT balance FROM accounts WHERE name = $1`, c.order.Name).Scan(&c.balance)
	case "update":
		c.report.Sent = c.report.Sent || !c.tx.Conn().IsClosed()
		err = c.update(ctx, c.tx)
	case "commit":
		c.report.Sent = c.report.Sent || !c.tx.Conn().IsClosed()
		err = c.tx.Commit(ctx)
	case "write in InTx":
		ran := false
		err = c.lease.InTx(ctx, c.pool, func(ctx context.Context, tx pgx.Tx) error {
			ran, c.report.Sent = true, true
			return c.update(ctx, tx)
		})
		if err != nil && ran {
			err = fmt.Errorf("fn ran: %w", err)
		}
	case "end":
		if c.tx != nil {
			_ = c.tx.Rollback(ctx) // it may have ended
			c.tx = nil
		}
		if c.lease != nil {
			_ = c.lease.Release(ctx) // it may be lost
		}
	default:
		err = errors.New("no such step")
	}
	return err
}

// closeOnSIGTERM is what a program does that Kubernetes stops.
func (c *childClient) closeOnSIGTERM(ctx context.Context) {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM)
	go func() {
		<-stop
		c.mu.Lock()
		c.sent = nil
		c.mu.Unlock()
		err := c.locks.Close(ctx)
		c.mu.Lock()
		_ = c.reports.Encode(report{Fates: []string{c.fate(err)}, Close: c.sent}) // the parent would miss it
		os.Exit(0)
	}()
}

// update writes what follows from the balance that was read, however long ago.
func (c *childClient) update(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, `UPDATE accounts SET balance = $2, token = $3 WHERE name = $1`, c.order.Name, c.balance-1, c.lease.Token())
	return err
}

// fate says what became of a step, in few words.
func (c *childClient) fate(err error) string {
	if err == nil {
		return "ok"
	}
	if c.tx != nil && c.tx.Conn().IsClosed() {
		return "cut off"
	}
	if lost, ok := errors.AsType[*pglock.LostError](err); ok && errors.Is(err, pglock.ErrLost) {
		return fmt.Sprintf("lost: %s %s", lost.Cause, sqlState(err))
	}
	if fenced, ok := errors.AsType[*pglock.FencedError](err); ok && errors.Is(err, pglock.ErrFenced) {
		return fmt.Sprintf("fenced: accepted %d %s", fenced.Highest, sqlState(err))
	}
	if errors.Is(err, pglock.ErrLocked) {
		return "locked"
	}
	if errors.Is(err, pgx.ErrTxCommitRollback) {
		return "rolled back"
	}
	if state := sqlState(err); state != "" {
		return state
	}
	return err.Error()
}
