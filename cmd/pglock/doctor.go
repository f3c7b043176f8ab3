package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pawl-go/pawl/pglock"
)

// finding is what doctor says of one thing that it looked at.
type finding struct {
	Check string `json:"check"`
	Level level  `json:"level"`
	Says  string `json:"says"`
	Do    string `json:"do,omitempty"` // what mends it
}

type level string

const (
	healthy level = "ok"
	unseen  level = "unseen"  // the role may not see it, or somebody has it locked
	warning level = "warning" // it is slow, or fails one day
	danger  level = "danger"  // locks don't hold, or can't be had
)

func (l level) colour() colour {
	return map[level]colour{healthy: green, unseen: faint, warning: yellow, danger: red}[l]
}

// check looks at one thing. Of what is in order it says what it saw, too.
type check struct {
	name string
	look func(context.Context, pgx.Tx) ([]finding, error)
}

func ok(format string, args ...any) finding {
	return finding{Level: healthy, Says: fmt.Sprintf(format, args...)}
}

// checks are in the order in which one would mend what they find.
var checks = []check{
	{"server", checkServer},
	{"role", checkRole},
	{"pooler", checkPooler},
	{"advisory locks", checkAdvisory},
	{"schema", checkSchema},
	{"grants", checkGrants},
	{"tokens", checkTokens},
	{"lease table", checkLeaseTable},
	{"bloat", checkBloat},
	{"old snapshots", checkSnapshots},
	{"prepared", checkPrepared},
	{"notify", checkNotify},
	{"timeouts", checkTimeouts},
	{"keepalives", checkKeepalives},
	{"durability", checkDurability},
	{"replication", checkReplication},
	{"clock", checkClock},
	{"expiry", checkExpiry},
	{"protection", checkProtection},
}

func (a *app) doctor() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "Look for what would break or slow down locks, and say what to do",
		Long: `doctor looks at the server, the schema and the settings that this role gets, and
says of each finding what to do. A danger is what lets two hold one lock or nobody
get it: doctor then exits with 1. A warning is what is slow or fails one day.

It takes no row locks, changes nothing and waits for nobody for long. A role with
few grants gets fewer answers, and is told which grant shows the rest.`,
		Example: `  pglock doctor
  pglock doctor -o json | jq '.[] | select(.level == "danger")'`,
		Args: cobra.NoArgs,
		RunE: a.verb(func(ctx context.Context, _ []string) error {
			pool, err := a.connect(ctx)
			if err != nil {
				return err
			}
			defer pool.Close()
			findings, err := examine(ctx, pool)
			if err != nil {
				return err
			}
			if a.output == "json" {
				err = a.print(findings, nil)
			} else {
				columns, _ := screen(a.stdout)
				err = prescribe(a.stdout, findings, cmp.Or(columns, 80), colours(a.stdout))
			}
			if err != nil {
				return err
			}
			for _, f := range findings {
				if f.Level == danger {
					return status(exitDanger)
				}
			}
			return nil
		}),
	}
}

// examine makes all checks, side by side. One that fails is one that could not be
// made, unless the server answers none.
func examine(ctx context.Context, pool *pgxpool.Pool) ([]finding, error) {
	within, cancel := context.WithTimeout(ctx, lookBound)
	defer cancel()
	found := make([][]finding, len(checks))
	errs := make([]error, len(checks))
	var wg sync.WaitGroup
	for i, c := range checks {
		wg.Go(func() {
			errs[i] = look(within, pool, func(ctx context.Context, tx pgx.Tx) (err error) {
				found[i], err = c.look(ctx, tx)
				return err
			})
		})
	}
	wg.Wait()
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case within.Err() != nil && !slices.Contains(errs, nil):
		return nil, &unreachableError{fmt.Errorf("no answer within %v: %w", lookBound, errs[0])}
	}
	var all []finding
	locked := false
	for i, c := range checks {
		if errs[i] != nil {
			found[i] = failed(c.name, errs[i])
		}
		for _, f := range found[i] {
			if _, wait := errors.AsType[*waitError](errs[i]); wait && locked {
				f = finding{"", unseen, "the table is locked, as said above", ""}
			} else if wait {
				locked = true
			}
			f.Check = c.name
			all = append(all, f)
		}
	}
	return all, nil
}

// failed is what is found where a check could not be made.
func failed(check string, err error) []finding {
	if errors.Is(err, pglock.ErrNoSchema) {
		if check != "schema" {
			return nil // it is said once
		}
		return []finding{{"", danger, "there is none in this database", "pglock migrate up"}}
	}
	if wait, ok := errors.AsType[*waitError](err); ok {
		return []finding{{"", danger, wait.Error(), "end that transaction: nobody gets a lease meanwhile"}}
	}
	if _, ok := errors.AsType[*unseenError](err); ok {
		return []finding{{"", unseen, reason(err), "GRANT it to this role, or ask as the owner of the schema"}}
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return []finding{{"", unseen, fmt.Sprintf("no time was left of %v", lookBound), "ask again when the server is less busy"}}
	}
	return []finding{{"", unseen, reason(err), ""}}
}

// prescribe writes findings for people, at most columns wide where words allow it.
func prescribe(w io.Writer, findings []finding, columns int, coloured bool) error {
	var out strings.Builder
	wide := 0
	of := map[level]int{}
	for _, f := range findings {
		wide = max(wide, len(f.Check))
		of[f.Level]++
	}
	const levels = 7 // the longest of them
	indent := levels + 2 + wide + 2
	for _, f := range findings {
		shown := string(f.Level) + strings.Repeat(" ", levels-len(f.Level))
		if coloured {
			shown = paint(f.Level.colour(), shown)
		}
		fmt.Fprintf(&out, "%s  %-*s  ", shown, wide, f.Check)
		fold(&out, oneLine(printable(f.Says)), indent, columns)
		if f.Do != "" {
			out.WriteString(strings.Repeat(" ", indent))
			fold(&out, "→ "+oneLine(printable(f.Do)), indent, columns)
		}
	}
	fmt.Fprintf(&out, "\n%s, %s, %d not seen, %d in order\n", count(of[danger], "danger"), count(of[warning], "warning"), of[unseen], of[healthy])
	_, err := io.WriteString(w, out.String())
	return err
}

// fold writes words on a line that is indented already, and on more such lines.
func fold(out *strings.Builder, words string, indent, columns int) {
	at := indent
	for i, word := range strings.Fields(words) {
		length := len([]rune(word))
		switch {
		case i == 0:
		case at+1+length > columns:
			out.WriteString("\n" + strings.Repeat(" ", indent))
			at = indent
		default:
			out.WriteString(" ")
			at++
		}
		out.WriteString(word)
		at += length
	}
	out.WriteString("\n")
}
