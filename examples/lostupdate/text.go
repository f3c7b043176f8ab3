package main

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"time"
)

// textReport is for people to read. Progress goes to standard error and only
// where that is a terminal; it is one line, wiped before anything else is
// printed.
type textReport struct {
	stdout, stderr io.Writer
	colour, live   bool
	options        options
	headed         bool // the table has its heading

	mu sync.Mutex
}

const (
	wipe = "\r\x1b[K"

	bold  = "1"
	faint = "2"
	red   = "31"
	green = "32"
)

// paint colours text that is already padded: the sequences have no width.
func (r *textReport) paint(how, text string) string {
	if !r.colour || strings.TrimSpace(text) == "" {
		return text
	}
	return "\x1b[" + how + "m" + text + "\x1b[0m"
}

func (r *textReport) progress(format string, args ...any) {
	if !r.live {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintf(r.stderr, wipe+format, args...)
}

func (r *textReport) print(w io.Writer, format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.live {
		fmt.Fprint(r.stderr, wipe) // progress, or the ^C of somebody who has seen enough
	}
	fmt.Fprintf(w, format+"\n", args...)
}

func (r *textReport) begin(db *database, o options) {
	r.options = o
	r.print(r.stdout, "%s", r.paint(faint, db.place()))
}

func (r *textReport) note(text string) { r.print(r.stdout, "\n%s", text) }
func (r *textReport) fail(err error)   { r.print(r.stderr, "lostupdate: %v", err) }

// tally prints a row of the table. The rows come one by one, so the columns are
// as wide as the largest number that can come.
func (r *textReport) tally(t tally) {
	o := r.options
	width := len(fmt.Sprint(opening(int64(o.workers) * int64(o.ops))))
	expected, actual, missing := max(width, len("expected")), max(width, len("actual")), max(width, len("lost"))
	if !r.headed {
		r.headed = true
		r.print(r.stdout, "%d workers × %d withdrawals of 1 from %d, with %v between reading and writing\n",
			o.workers, o.ops, opening(int64(o.workers)*int64(o.ops)), o.think)
		r.print(r.stdout, "%s", r.paint(bold, fmt.Sprintf("%-10s  %*s  %*s  %*s  %-18s  %8s",
			"strategy", expected, "expected", actual, "actual", missing, "lost", "retries or waits", "time")))
	}
	colour := green
	if t.Lost != 0 {
		colour = red
	}
	r.print(r.stdout, "%-10s  %*d  %*d  %s  %-18s  %6.2f s", t.Strategy, expected, t.Expected, actual, t.Actual,
		r.paint(colour, fmt.Sprintf("%*d", missing, t.Lost)), effort(t),
		float64(t.ElapsedMS)/1000)
}

// effort is what a strategy spent on getting its turn.
func effort(t tally) string {
	switch {
	case t.waits && t.Retries > 0:
		return fmt.Sprintf("%s, %d again", mean(t.wait), t.Retries)
	case t.waits:
		return "waits of " + mean(t.wait)
	case t.Strategy == none:
		return "–"
	}
	return fmt.Sprintf("%d retries", t.Retries)
}

func mean(d time.Duration) string {
	if d < time.Second {
		return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

func (r *textReport) beginTale(t tale) {
	with := "with a fence"
	if t.Story == unfenced {
		with = "without a fence"
	}
	r.print(r.stdout, "\n%s", r.paint(bold, fmt.Sprintf("The paused client, %s (%s)", with, t.Story)))
	r.print(r.stdout, "TTL %v; the balance is %d; A is to withdraw %d, and B %d", t.TTL, deposit, amountA, amountB)
}

func (r *textReport) event(t tale, e event) {
	actor := e.Actor
	if len(actor) > 1 {
		actor = " "
	}
	for i, line := range describe(e) {
		at, who := fmt.Sprintf("%8.3f s", e.At.Sub(t.Began).Seconds()), actor
		if i > 0 {
			at, who = strings.Repeat(" ", len(at)), " "
		}
		switch {
		case e.Kind == refused:
			line = r.paint(green, line)
		case e.Kind == accepted && e.Read == 0: // on what it had read before the pause
			line = r.paint(red, line)
		}
		r.print(r.stdout, "%s  %s  %s", r.paint(faint, at), r.paint(bold, who), line)
	}
}

// describe says in words what happened.
func describe(e event) []string {
	say := func(format string, args ...any) []string { return []string{fmt.Sprintf(format, args...)} }
	presents := ""
	if e.Fenced {
		presents = fmt.Sprintf("presents token %d, ", e.Token)
	}
	switch e.Kind {
	case granted:
		return say("is granted the lease with token %d", e.Token)
	case held:
		return say("wants the lease: %s has it with token %d for another %d ms", e.Holder, e.Token, e.Left.Milliseconds())
	case read:
		return say("%sreads %d", presents, e.Read)
	case believed:
		return say("asks its lease, which is held, and goes on to write")
	case stopped:
		return say("is stopped by SIGSTOP before it writes")
	case expired:
		return say("token %d expires: its holder can't renew it", e.Token)
	case continued:
		return say("is continued by SIGCONT and knows nothing of it")
	case accepted:
		if e.Read != 0 {
			return say("%sreads %d, writes %d: accepted", presents, e.Read, e.Written)
		}
		return say("%swrites %d with token %d: accepted", presents, e.Written, e.Token)
	case refused:
		return []string{
			fmt.Sprintf("%swrites %d: refused, %d was accepted before", presents, e.Written, e.Accepted),
			fmt.Sprintf("(its UPDATE, sent all the same: SQLSTATE %s, rolled back)", e.State),
		}
	case released:
		return say("releases the lease")
	case lost:
		return say("asks its lease again: it is lost")
	}
	return say("%s", e.Kind)
}

func (r *textReport) tale(t tale) {
	colour := green
	if t.Balance != t.Expected {
		colour = red
	}
	r.print(r.stdout, "%15s%s", "", r.paint(colour, outcome(t)))
}

func outcome(t tale) string {
	text := fmt.Sprintf("balance %d, expected %d", t.Balance, t.Expected)
	if gone := t.Balance - t.Expected; gone != 0 {
		return fmt.Sprintf("%s: a withdrawal of %d is lost", text, gone)
	}
	return text + ": nothing is lost"
}

func (r *textReport) verdict(res results) error {
	if err := verdict(r, res); err != nil {
		return err
	}
	r.print(r.stdout, "\n%s", r.paint(bold, conclusion(res)))
	return nil
}

// conclusion says what a run that showed everything has shown.
func conclusion(res results) string {
	var said []string
	var kept []string
	for _, t := range res.tallies {
		if t.Strategy == none {
			said = append(said, fmt.Sprintf("Without a lock %d of %d withdrawals were lost.", t.Lost, res.workers*res.ops))
		} else {
			kept = append(kept, t.Strategy)
		}
	}
	if len(kept) > 0 {
		said = append(said, "None was lost with: "+strings.Join(kept, ", ")+".")
	}
	for _, t := range res.tales {
		if t.Story == unfenced {
			said = append(said, "Without a fence the stale write won.")
		} else {
			said = append(said, "With a fence the stale write was refused.")
		}
	}
	return strings.Join(said, "\n")
}
