package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

func (a *app) list() *cobra.Command {
	var watch bool
	cmd := &cobra.Command{
		Use:     "ls [NAME...]",
		Aliases: []string{"list"},
		Short:   "Show leases, who waits for them, advisory locks and protected tables",
		Long: `ls shows the leases with their holders, tokens and the time left, and behind each
who waits for it; the advisory locks; and the tables that pglock.protect has
protected. With names, only what has one of them.

The server knows the numbers of advisory locks only: a lock is shown under a name
if that is the name of a lease or among the arguments. FOR is how long it has been
held or waited for; of an advisory lock, how long its transaction has been open or
its session has sent nothing.

It takes no row locks and works on a standby. What the role may not see, or what
somebody has locked, is said and left out. With --watch it looks once a second
until it is interrupted, and marks what has come (+), gone (-) and changed (*);
with -o json it then prints a line whenever something has changed.

The role needs EXECUTE on pglock.list_leases and pglock.list_waiters, and SELECT
on pglock.protected_tables.`,
		Example: `  pglock ls
  pglock ls accounts/42 -o json
  pglock ls --watch`,
		RunE: a.verb(func(ctx context.Context, names []string) error {
			if watch {
				return a.watch(ctx, names)
			}
			pool, err := a.connect(ctx)
			if err != nil {
				return err
			}
			defer pool.Close()
			found, err := list(ctx, pool, names, nil)
			if found == nil {
				return err
			}
			if a.output == "json" {
				return errors.Join(a.print(found, nil), err)
			}
			columns, _ := screen(a.stdout)
			if failed := write(a.stdout, found.parts(columns, nil), colours(a.stdout)); failed != nil {
				return failed
			}
			return err
		}),
	}
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "go on looking, and mark what has changed")
	return cmd
}

// part is a table with a title above and notes below.
type part struct {
	title string
	table *table
	notes []string
}

// write writes parts with an empty line around each that is more than a title.
func write(w io.Writer, parts []part, coloured bool) error {
	var out strings.Builder
	full := false
	for i, p := range parts {
		before := full
		full = p.table != nil && len(p.table.lines) > 0 || len(p.notes) > 0
		if i > 0 && (before || full) {
			out.WriteString("\n")
		}
		out.WriteString(p.title + "\n")
		if p.table != nil && len(p.table.lines) > 0 {
			_ = p.table.write(&out, coloured) // a Builder takes everything
		}
		for _, note := range p.notes {
			out.WriteString(note + "\n")
		}
	}
	_, err := io.WriteString(w, out.String())
	return err
}

// parts is the listing for people; marks, if there are any, stand before the
// lines.
func (found *listing) parts(columns int, marks *marks) []part {
	leases := newTable("NAME", ">TOKEN", "HOLDER", "ROLE", ">FOR", ">LEFT")
	for _, l := range found.Leases {
		left := text(brief(time.Duration(l.Remaining)))
		switch {
		case l.Remaining <= 0:
			left = cell{"expired", yellow}
		case l.Remaining > 2*l.TTL:
			left = left.in(red) // the server's clock has gone back: doctor says so
		}
		leases.add(text(l.Name).in(marks.colour(l.key())), text(l.Token), text(l.Owner), text(l.Role), text(found.age(l.AcquiredAt)), left)
		for i, w := range l.Waiters {
			leases.add(text(fmt.Sprintf("  waiter %d", i+1)).in(cmp.Or(marks.colour(w.key(l.Name)), faint)), text(""),
				text(w.Owner).in(faint), text(w.Role).in(faint), text(found.age(w.QueuedAt)), text(""))
		}
	}
	locks := newTable("KEY", "NAME", "MODE", ">PID", "PROGRAM", "HOST", ">FOR")
	for _, l := range found.Locks {
		mode := text("exclusive")
		if l.Shared {
			mode = text("shared")
		}
		if !l.Granted {
			mode = cell{"waits", yellow}
		}
		pid, program := text(l.Pid), text(l.Program)
		if l.Pid == 0 {
			pid, program = text("-"), text("prepared")
		}
		host := text(l.Host)
		if l.Host == "" && l.State != "" { // else it is hidden from the role
			host = text("local")
		}
		locks.add(text(l.Key).in(marks.colour(l.key())), text(l.Name), mode, pid, program, host, text(found.age(l.Since)))
	}
	protected := newTable("TABLE", "LEASES LIKE", "STATE")
	for _, p := range found.Protected {
		state := cell{"protected", plain}
		switch {
		case !p.Enabled:
			state = cell{"disabled", red}
		case len(p.Gaps) > 0:
			state = text("open: " + strings.Join(p.Gaps, ", ")).in(red)
		}
		protected.add(text(p.Table).in(marks.colour(p.key())), text(p.Pattern), state)
	}
	parts := []part{
		{title: "leases", table: leases},
		{title: "advisory locks", table: locks},
		{title: "protected tables", table: protected},
	}
	for i, kind := range []string{leaseKind, lockKind, tableKind} {
		parts[i].table = marks.mark(parts[i].table, kind, found.keys(kind)).fit(columns)
		switch {
		case !found.seen(kind):
			parts[i].title += ": not seen"
		case len(parts[i].table.lines) == 0:
			parts[i].title = "no " + parts[i].title
		default:
			parts[i].title = strings.ToUpper(parts[i].title)
		}
	}
	if slices.ContainsFunc(found.Locks, func(l listedLock) bool { return l.Granted && l.Pid != 0 }) {
		parts[1].notes = []string{"An advisory lock ends with its session: SELECT pg_terminate_backend(PID)"}
	}
	if found.named {
		parts = parts[:2] // protected tables have patterns, and no names
	}
	if len(found.Unseen) > 0 {
		hidden := part{title: "NOT SEEN"}
		for _, reason := range found.Unseen {
			var lines strings.Builder
			fold(&lines, oneLine(printable(reason)), 0, cmp.Or(columns, math.MaxInt))
			hidden.notes = append(hidden.notes, strings.TrimSuffix(lines.String(), "\n"))
		}
		parts = append(parts, hidden)
	}
	return parts
}

// age is how long ago something was by the server's clock; nothing if unknown.
func (found *listing) age(since time.Time) string {
	if since.IsZero() {
		return ""
	}
	return brief(max(0, found.At.Sub(since)))
}
