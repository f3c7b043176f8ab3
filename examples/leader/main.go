// Command leader has three processes stand for election, kills the one that
// leads, and watches the next take over.
//
// Whoever leads makes decisions, each in a transaction under its lease
// (Lease.InTx). The killed leader can't release: its lease runs out, and the next
// in line leads within a TTL, with a higher token. Then that one is asked to
// leave. It releases, and the third leads at once. In the end the decisions are
// looked at: none of an earlier leader stands behind one of a later.
//
//	go run ./examples/leader
//
// It starts a PostgreSQL of its own, which is gone afterwards. It exits with 0
// when all that was seen, else with 1.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/scratch"
)

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) }

const (
	ttl = time.Second
	// bound is how much longer than its TTL a takeover may last, on a busy machine.
	bound = 10 * time.Second
)

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	switch {
	case len(args) == 0:
		err = scratch.Server(ctx, func(dsn string) error { return watch(ctx, dsn, stdout, (*node).kill, ttl+bound) })
	case len(args) == 1 && args[0] == nodeCommand:
		err = stand(ctx, os.Stdin, stdout)
	default:
		fmt.Fprintln(stderr, "leader: it takes no arguments")
		return 2
	}
	if err != nil {
		fmt.Fprintln(stderr, "leader:", err)
		return 1
	}
	return 0
}

// watch has one leader end by kill and the next one leave, and returns an error
// unless another takes over each time, with a higher token and within patience.
func watch(ctx context.Context, dsn string, out io.Writer, kill func(*node) error, patience time.Duration) (err error) {
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		return err
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, createDecisions); err != nil {
		return err
	}

	nodes := map[string]*node{}
	terms := make(chan term, 10) // more than there are in a run
	defer func() {
		for _, n := range nodes {
			err = errors.Join(err, n.leave())
		}
	}()
	for _, name := range []string{"A", "B", "C"} {
		n, err := start(name, dsn, terms)
		if err != nil {
			return err
		}
		nodes[name] = n
	}
	leads, err := next(ctx, terms, ttl+bound)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s leads with token %d\n", leads.Node, leads.Token)

	for _, how := range []struct {
		verb string
		end  func(*node) error
	}{{"killed", kill}, {"asked to leave", (*node).leave}} {
		if err := how.end(nodes[leads.Node]); err != nil {
			return err
		}
		ended := time.Now()
		after, err := next(ctx, terms, patience)
		if err != nil {
			return fmt.Errorf("%s was %s: %w", leads.Node, how.verb, err)
		}
		fmt.Fprintf(out, "%s was %s; %d ms later %s leads with token %d\n",
			leads.Node, how.verb, time.Since(ended).Milliseconds(), after.Node, after.Token)
		if after.Node == leads.Node || after.Token <= leads.Token {
			return fmt.Errorf("%s leads with token %d after %s with %d", after.Node, after.Token, leads.Node, leads.Token)
		}
		leads = after
	}
	return judge(ctx, pool, out)
}

// next is the next term to begin.
func next(ctx context.Context, terms <-chan term, patience time.Duration) (term, error) {
	select {
	case t := <-terms:
		return t, nil
	case <-time.After(patience):
		return term{}, fmt.Errorf("nobody took over within %v", patience)
	case <-ctx.Done():
		return term{}, context.Cause(ctx)
	}
}

// judge counts the decisions, and those that came after a later leader's.
func judge(ctx context.Context, pool *pgxpool.Pool, out io.Writer) error {
	var made, late int
	err := pool.QueryRow(ctx, `SELECT count(*), count(*) FILTER (WHERE token < highest) FROM
		(SELECT token, max(token) OVER (ORDER BY id) AS highest FROM decisions) d`).Scan(&made, &late)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%d decisions, %d of them by a leader who was none any more\n", made, late)
	if made == 0 || late > 0 {
		return fmt.Errorf("of %d decisions %d came too late", made, late)
	}
	return nil
}
