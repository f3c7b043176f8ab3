package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// options are the flags.
type options struct {
	workers, ops int
	think, ttl   time.Duration
	only         []string // nil: everything
	json, keep   bool
	dsn          string // "": a server of the program's own
	html, svg    string // files, "": none
}

const (
	// A server has a hundred connections unless somebody changed it.
	maxWorkers = 64
	maxOps     = 100_000

	// The server ends a fenced transaction that was idle for 30 s.
	maxThink = 10 * time.Second

	// What pglock grants is between 100 ms and a day; a story waits for one TTL.
	minTTL = 100 * time.Millisecond
	maxTTL = time.Minute
)

func (o options) wants(name string) bool {
	return o.only == nil || slices.Contains(o.only, name)
}

func flags(o *options, only *string) *flag.FlagSet {
	f := flag.NewFlagSet("lostupdate", flag.ContinueOnError)
	f.SetOutput(io.Discard) // run prints the error, and what to do about it
	f.IntVar(&o.workers, "workers", 8, "`number` of workers that withdraw at the same time")
	f.IntVar(&o.ops, "ops", 50, "`number` of withdrawals by each worker")
	f.DurationVar(&o.think, "think", 2*time.Millisecond, "`time` between reading the balance and writing it")
	f.DurationVar(&o.ttl, "ttl", 500*time.Millisecond, "`time` that a lease is granted for")
	f.StringVar(only, "only", "", "`list` of what to run, with commas: "+strings.Join(names(), ", "))
	f.BoolVar(&o.json, "json", false, "print one JSON object a line and nothing else")
	f.StringVar(&o.dsn, "dsn", "", "work in a schema of its own in the database of this `URL` (default: start a PostgreSQL)")
	f.StringVar(&o.html, "html", "", "also write a page that plays the stories and charts the strategies to this `file`")
	f.StringVar(&o.svg, "svg", "", "also write a picture of the stories to this `file`")
	f.BoolVar(&o.keep, "keep", false, "leave the data to be looked at; a server of its own runs on until Ctrl-C")
	return f
}

func usage(w io.Writer) {
	f := flags(new(options), new(string))
	f.SetOutput(w)
	fmt.Fprintln(w, "lostupdate shows updates that are lost without a lock, and kept with one.")
	f.PrintDefaults()
}

// names are what -only knows, in the order in which it is run.
func names() []string {
	var all []string
	for _, s := range strategies {
		all = append(all, s.name)
	}
	return append(all, stories...)
}

// parse checks the flags; its errors name the value and what to give instead.
func parse(args []string) (options, error) {
	var o options
	var only string
	f := flags(&o, &only)
	if err := f.Parse(args); err != nil {
		return o, err
	}
	if f.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q: there are flags only", f.Arg(0))
	}
	given := map[string]bool{}
	f.Visit(func(f *flag.Flag) { given[f.Name] = true })
	switch {
	case o.workers < 1 || o.workers > maxWorkers:
		return o, fmt.Errorf("-workers=%d: give 1 to %d, each needs a connection", o.workers, maxWorkers)
	case o.ops < 1 || o.ops > maxOps:
		return o, fmt.Errorf("-ops=%d: give 1 to %d", o.ops, maxOps)
	case o.think < 0 || o.think > maxThink:
		return o, fmt.Errorf("-think=%v: give 0s to %v", o.think, maxThink)
	case o.ttl < minTTL || o.ttl > maxTTL:
		return o, fmt.Errorf("-ttl=%v: give %v to %v", o.ttl, minTTL, maxTTL)
	case given["dsn"] && o.dsn == "":
		return o, errors.New(`-dsn="": give a URL, or leave the flag out to start a PostgreSQL`)
	}
	for name, path := range map[string]string{"html": o.html, "svg": o.svg} {
		if given[name] && (path == "" || path == "-") {
			return o, fmt.Errorf("-%s=%s: give the name of a file, standard output is for the text", name, path)
		}
	}
	if given["svg"] && o.html == o.svg {
		return o, fmt.Errorf("-svg=%s: the page is to be written there: give each a file of its own", o.svg)
	}
	if o.dsn != "" {
		if _, err := pgxpool.ParseConfig(o.dsn); err != nil {
			return o, fmt.Errorf("-dsn: give postgres://user:password@host:5432/database: %w", err)
		}
	}
	if given["only"] {
		o.only = strings.Split(only, ",")
	}
	for _, name := range o.only {
		if !slices.Contains(names(), name) {
			return o, fmt.Errorf("-only=%s: there is no %q: choose from %s", only, name, strings.Join(names(), ", "))
		}
		if !canPause && slices.Contains(stories, name) {
			return o, fmt.Errorf("-only=%s: %s needs SIGSTOP, which this system doesn't have: choose strategies", only, name)
		}
	}
	if o.svg != "" && !canPause {
		return o, fmt.Errorf("-svg=%s: the stories need SIGSTOP, which this system doesn't have", o.svg)
	}
	if o.svg != "" && !slices.ContainsFunc(stories, o.wants) {
		return o, fmt.Errorf("-svg=%s: it draws the stories: have -only run %s", o.svg, strings.Join(stories, " or "))
	}
	return o, nil
}
