package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
)

// A plan says how long to measure.
type plan struct {
	rounds     int
	duration   time.Duration // of each rate, and of each hand-off
	held       []int         // how many leases to hold
	ttl        time.Duration // of those
	heartbeats int           // for which they are watched
	takeovers  int
	churn      int // pairs
}

var (
	full  = plan{rounds: 5, duration: 3 * time.Second, held: []int{1, 100, 1000, 10000}, ttl: 9 * time.Second, heartbeats: 3, takeovers: 20, churn: 500_000}
	brief = plan{rounds: 2, duration: 300 * time.Millisecond, held: []int{1, 100, 1000}, ttl: 3 * time.Second, heartbeats: 1, takeovers: 2, churn: 10_000}
)

// slack is what a trial may take beyond the time that it measures for: to
// connect, and to finish what is under way.
const slack = time.Minute

// A scenario is a table of the report.
type scenario struct {
	name    string
	title   string
	says    string // how it was measured
	wide    bool   // a table for each metric and in it a column for each setting; else one table
	metrics []metric
	rounds  func(plan) int
	trials  func(context.Context, *bench) []trial
}

// A metric is what stands in a column, or in a wide table.
type metric struct {
	name      string
	decimals  int
	reference string // the contender whose ratio to stands beside it
}

var scenarios = []scenario{pairs, losing, handoff, holding, takeover, churn, optimisticUpdates}

// bench is a run: the contenders whose servers are up, and what they share.
type bench struct {
	plan
	host     *host
	wanted   []contender
	running  []running
	stderr   io.Writer
	stopping []func() error
}

type running struct {
	contender
	server    *server
	exclusion *exclusion
}

// connect is dial with the grants counted.
func (r running) connect(ctx context.Context, goroutines int, ttl time.Duration) (client, error) {
	c, err := r.dial(ctx, r.server.address, goroutines, ttl)
	if err != nil {
		return nil, err
	}
	return r.exclusion.watch(c), nil
}

func newBench(p plan, wanted []contender, stderr io.Writer) (*bench, error) {
	h, err := newHost()
	return &bench{plan: p, host: h, wanted: wanted, stderr: stderr}, err
}

// close stops the servers and removes what they left.
func (b *bench) close() error {
	var err error
	for _, stop := range slices.Backward(b.stopping) {
		err = errors.Join(err, stop())
	}
	return errors.Join(err, b.host.close())
}

// startAll starts the servers of all that are wanted, and says which can't.
func (b *bench) startAll(ctx context.Context) []missing {
	var without []missing
	for _, c := range b.wanted {
		fmt.Fprintf(b.stderr, "start %s\n", c.name)
		bounded, cancel := context.WithTimeout(ctx, 2*time.Minute)
		s, err := c.start(bounded, b.host)
		cancel()
		if s != nil {
			b.stopping = append(b.stopping, s.stop)
		}
		if err != nil {
			fmt.Fprintf(b.stderr, "%s is left out: %v\n", c.name, err)
			without = append(without, missing{Contender: c.name, Why: err.Error(), Absent: errors.Is(err, errAbsent)})
			continue
		}
		b.running = append(b.running, running{c, s, &exclusion{}})
	}
	return without
}

// measure runs the scenarios.
func (b *bench) measure(ctx context.Context, todo []scenario) results {
	r := results{Machine: describe(ctx), Missing: b.startAll(ctx)}
	for _, x := range b.running {
		r.Contenders = append(r.Contenders, about{Name: x.name, About: x.about, Version: x.server.version})
	}
	for _, s := range todo {
		trials := s.trials(ctx, b)
		rounds := s.rounds(b.plan)
		samples, failed := interleave(ctx, rounds, trials, func(round int, t trial) {
			fmt.Fprintf(b.stderr, "%s, round %d of %d: %s, %s\n", s.name, round+1, rounds, t.setting, t.contender)
		})
		for i, t := range trials {
			r.Cells = append(r.Cells, newCell(s.name, t, samples[i]))
		}
		for _, t := range trials {
			if err := failed[t.contender]; err != nil {
				fmt.Fprintf(b.stderr, "%s, %s failed: %v\n", s.name, t.contender, err)
				r.Failures = append(r.Failures, failure{Scenario: s.name, Contender: t.contender, Why: err.Error()})
				delete(failed, t.contender)
			}
		}
	}
	for i, x := range b.running {
		r.Contenders[i].Violations = x.exclusion.violations.Load()
	}
	return r
}

// each makes a trial of every contender in the scenario.
func (b *bench) each(scenario, setting string, limit time.Duration, run func(context.Context, running) (sample, error)) []trial {
	var trials []trial
	for _, r := range b.running {
		if slices.Contains(r.in, scenario) {
			trials = append(trials, trial{setting, r.name, limit, func(ctx context.Context) (sample, error) { return run(ctx, r) }})
		}
	}
	return trials
}
