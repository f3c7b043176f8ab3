// Command httpetag shows that two people who edit one page over HTTP lose no
// edit.
//
// A server keeps a page in PostgreSQL and sends its version as an ETag. Editors
// fetch the page, add a line and put it back under If-Match. Whoever comes too
// late is told so with 412, fetches again and adds the line to what is there
// now. In the end every line is on the page. The control puts without looking:
// If-Match: *, whatever is there. Lines vanish.
//
//	go run ./examples/httpetag
//
// It starts a PostgreSQL of its own, or works in a schema of its own in the
// database that -dsn names, and removes what it made. It exits with 0 when no
// edit was lost under If-Match and some were without, else with 1, and with 2 on
// a wrong flag.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"os/signal"
	"syscall"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/scratch"
)

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)) }

type options struct {
	dsn            string
	editors, edits int
}

func parse(args []string, stderr io.Writer) (o options, err error) {
	flags := flag.NewFlagSet("httpetag", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&o.dsn, "dsn", "", "work in this `database` instead of starting one")
	flags.IntVar(&o.editors, "editors", 4, "how many edit at once")
	flags.IntVar(&o.edits, "edits", 10, "how many lines each adds")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 || o.editors < 2 || o.edits < 1 {
		err = errors.New("want two -editors and one -edits at the least, and nothing else")
		fmt.Fprintln(stderr, "httpetag:", err)
	}
	return o, err
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	o, err := parse(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if err != nil {
		return 2
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	err = scratch.In(ctx, o.dsn, "httpetag", createPages, func(_ scratch.Schema, pool *pgxpool.Pool) error { return show(ctx, pool, o, stdout) })
	if err != nil {
		fmt.Fprintln(stderr, "httpetag:", err)
		return 1
	}
	return 0
}

// show has the editors edit twice, looking and not looking.
func show(ctx context.Context, pool *pgxpool.Pool, o options, stdout io.Writer) error {
	server := httptest.NewServer(handler(pool))
	defer server.Close()
	for _, c := range []struct {
		page    string
		looking bool
	}{{"with-if-match", true}, {"without-looking", false}} {
		url := server.URL + "/pages/" + c.page
		told, err := edit(ctx, url, o, c.looking)
		if err != nil {
			return err
		}
		kept, err := lines(ctx, url)
		if err != nil {
			return err
		}
		wrote := o.editors * o.edits
		fmt.Fprintf(stdout, "%-16s %d edits, %d kept, %d lost, told to look again %d times\n", c.page, wrote, kept, wrote-kept, told)
		switch lost := wrote - kept; {
		case c.looking && lost != 0:
			return fmt.Errorf("%d edits were lost under If-Match", lost)
		case !c.looking && lost == 0:
			return errors.New("no edit was lost without If-Match: the control shows nothing")
		}
	}
	return nil
}
