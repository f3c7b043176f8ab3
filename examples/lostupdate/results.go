package main

import (
	"fmt"
	"time"

	"github.com/pawl-go/pawl/pglock"
)

// results are all that a run has seen.
type results struct {
	options
	version string // of PostgreSQL
	began   time.Time
	tallies []tally
	tales   []tale
}

// tally is what one strategy did to the balance.
type tally struct {
	Strategy  string `json:"strategy"`
	Expected  int64  `json:"expected"`
	Actual    int64  `json:"actual"`
	Lost      int64  `json:"lost"` // withdrawals that are not in the balance
	Retries   int64  `json:"retries"`
	ElapsedMS int64  `json:"elapsed_ms"`

	waits bool
	wait  time.Duration // for the lock, mean of a withdrawal
}

// tale is how a story went.
type tale struct {
	Story    string          `json:"story"`
	Tokens   [2]pglock.Token `json:"tokens"` // A's and B's
	Accepted bool            `json:"stale_write_accepted"`
	Balance  int64           `json:"balance"`
	Expected int64           `json:"expected"` // less every withdrawal that was accepted

	TTL    time.Duration `json:"-"`
	Began  time.Time     `json:"began"`
	Events []event       `json:"events"`
}

// unshown lists what the run was to show and didn't: a lock that lost
// something, a fence that let something pass, and a control that did not go
// wrong without them, so that the rest proves nothing.
func (r results) unshown() []string {
	var list []string
	add := func(format string, args ...any) { list = append(list, fmt.Sprintf(format, args...)) }
	for _, t := range r.tallies {
		switch {
		case t.Strategy == none && t.Lost == 0 && r.workers > 1:
			add("%s: no withdrawal was lost without a lock: give more -workers, -ops or -think", t.Strategy)
		case t.Strategy != none && t.Lost != 0:
			add("%s: %d of %d withdrawals were lost in spite of the lock", t.Strategy, t.Lost, r.workers*r.ops)
		}
	}
	for _, t := range r.tales {
		if t.Tokens[1] <= t.Tokens[0] {
			add("%s: token %d was granted after %d", t.Story, t.Tokens[1], t.Tokens[0])
		}
		switch {
		case t.Story == unfenced && !t.Accepted:
			add("%s: the stale write was not accepted", t.Story)
		case t.Story == fenced && t.Accepted:
			add("%s: the stale write was accepted in spite of the fence", t.Story)
		case t.Story == fenced && t.Balance != t.Expected:
			add("%s: the balance is %d, expected %d", t.Story, t.Balance, t.Expected)
		}
	}
	return list
}
