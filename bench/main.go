// Command bench measures Pawl's leases beside what people leave PostgreSQL for:
// etcd, ZooKeeper, Redis, and the bare server. It starts every server itself,
// on the loopback and in a temporary folder, and stops them at its end. It
// needs Linux: what a server costs it reads from /proc.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// run is the program. It returns 0 when all that was asked for was measured, 1
// when something of it failed or two held one lock at once, 2 for bad arguments.
func run(args []string, stdout, stderr io.Writer) int {
	if len(args) > 0 {
		if child, ok := children[args[0]]; ok {
			if err := child(args[1:]); err != nil {
				fmt.Fprintln(stderr, err)
				return 1
			}
			return 0
		}
	}
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	all := flags.Bool("all", false, "measure at full length, and write results.json, .md and .svg")
	quick := flags.Bool("quick", false, "measure in under 2 minutes, for a look: figures vary; writes quick.json, .md and .svg")
	only := flags.String("only", "", "contenders, comma-separated: "+strings.Join(names(contenders), ", "))
	which := flags.String("scenario", "", "scenarios, comma-separated: "+strings.Join(scenarioNames(), ", "))
	out := flags.String("out", ".", "folder for what is written")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	p, base := full, "results"
	if *quick {
		p, base = brief, "quick"
	}
	if *all == *quick || flags.NArg() > 0 {
		fmt.Fprintln(stderr, "bench: say either -all or -quick, and no more than flags")
		flags.Usage()
		return 2
	}
	chosen, err := choose(contenders, *only)
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return 2
	}
	todo, err := chooseScenarios(*which)
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return 2
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	b, err := newBench(p, chosen, stderr)
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return 1
	}
	measured := b.measure(ctx, todo)
	measured.Quick = *quick
	measured.Date = time.Now().UTC().Format(time.DateOnly)
	err = b.close()
	if ctx.Err() != nil {
		fmt.Fprintln(stderr, "bench: interrupted; nothing was written")
		return 1
	}
	err = errors.Join(err, write(measured, filepath.Join(*out, base)))
	fmt.Fprint(stdout, measured.markdown(base+".svg"))
	if err != nil {
		fmt.Fprintln(stderr, "bench:", err)
		return 1
	}
	missed := func(m missing) bool { return *only != "" || !m.Absent }
	if slices.ContainsFunc(measured.Missing, missed) || measured.failed() {
		return 1
	}
	return 0
}

// choose returns the contenders of a comma-separated list, all for an empty one.
func choose(from []contender, list string) ([]contender, error) {
	if list == "" {
		return from, nil
	}
	var chosen []contender
	for name := range strings.SplitSeq(list, ",") {
		i := slices.Index(names(from), name)
		if i < 0 {
			return nil, fmt.Errorf("no contender %q: there are %s", name, strings.Join(names(from), ", "))
		}
		chosen = append(chosen, from[i])
	}
	return chosen, nil
}

func chooseScenarios(list string) ([]scenario, error) {
	if list == "" {
		return scenarios, nil
	}
	var chosen []scenario
	for name := range strings.SplitSeq(list, ",") {
		i := slices.Index(scenarioNames(), name)
		if i < 0 {
			return nil, fmt.Errorf("no scenario %q: there are %s", name, strings.Join(scenarioNames(), ", "))
		}
		chosen = append(chosen, scenarios[i])
	}
	return chosen, nil
}

func names(of []contender) []string {
	var all []string
	for _, c := range of {
		all = append(all, c.name)
	}
	return all
}

func scenarioNames() []string {
	var all []string
	for _, s := range scenarios {
		all = append(all, s.name)
	}
	return all
}
