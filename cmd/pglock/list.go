package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pawl-go/pawl/pglock"
)

// listing is what there is in a database at a moment of its clock. What can't be
// seen is nil.
type listing struct {
	At        time.Time        `json:"at"`
	Leases    []listedLease    `json:"leases"`
	Locks     []listedLock     `json:"advisory_locks"`
	Protected []protectedTable `json:"protected_tables"`
	Unseen    []string         `json:"unseen,omitempty"` // what the role may not see, or what was locked

	known []string // names that a key may be of
}

type listedLease struct {
	Name       string         `json:"name"`
	Token      pglock.Token   `json:"token"`
	Owner      string         `json:"owner"`
	Role       string         `json:"role"`
	AcquiredAt time.Time      `json:"acquired_at"`
	ExpiresAt  time.Time      `json:"expires_at"`
	Remaining  seconds        `json:"remaining_seconds"` // zero or less: expired
	TTL        seconds        `json:"ttl_seconds"`
	Waiters    []listedWaiter `json:"waiters"`
}

type listedWaiter struct {
	Ticket    int64     `json:"ticket"`
	Owner     string    `json:"owner"`
	Role      string    `json:"role"`
	QueuedAt  time.Time `json:"queued_at"`
	ExpiresAt time.Time `json:"expires_at"`
}

// listedLock is an advisory lock that a backend holds or waits for.
type listedLock struct {
	Name    string    `json:"name,omitempty"` // if a lease or an argument has the name of its key
	Key     string    `json:"key"`            // the bigint, or the two numbers
	Class   uint32    `json:"classid"`
	Object  uint32    `json:"objid"`
	Sub     int       `json:"objsubid"`
	Shared  bool      `json:"shared"`
	Granted bool      `json:"granted"`
	Pid     int32     `json:"pid"` // 0: a transaction that was prepared
	Program string    `json:"program"`
	Role    string    `json:"role"`
	Host    string    `json:"host"` // empty: a unix socket
	State   string    `json:"state"`
	Since   time.Time `json:"since"` // of the wait or the transaction, else of the session's last statement
}

type protectedTable struct {
	Table   string   `json:"table"`
	Pattern string   `json:"pattern"`
	Enabled bool     `json:"enabled"`
	Gaps    []string `json:"gaps,omitempty"`
}

// seconds is a duration as JSON shows it.
type seconds time.Duration

func (s seconds) MarshalJSON() ([]byte, error) {
	return fmt.Appendf(nil, "%.3f", time.Duration(s).Seconds()), nil
}

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

const (
	listLeasesSQL = `SELECT name, token, coalesce(holder, ''), role::text, acquired_at, expires_at,
	extract(epoch FROM remaining)::float8, extract(epoch FROM ttl)::float8 FROM pglock.list_leases()`

	listWaitersSQL = `SELECT name, ticket, coalesce(holder, ''), role::text, queued_at, expires_at FROM pglock.list_waiters()`

	// A transaction that was prepared has no backend. What pg_stat_activity hides
	// from the role is unknown.
	listLocksSQL = `SELECT l.classid::bigint, l.objid::bigint, l.objsubid::int, l.mode = 'ShareLock', l.granted, coalesce(l.pid, 0),
	coalesce(a.application_name, ''), coalesce(a.usename::text, ''), coalesce(host(a.client_addr), ''), coalesce(a.state, ''),
	coalesce(l.waitstart, a.xact_start, a.state_change, '0001-01-01 00:00Z')
FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY l.objsubid, l.classid, l.objid, l.granted DESC, l.waitstart, l.pid`

	listProtectedSQL = `SELECT target::text, pattern, enabled, gaps::text[] FROM pglock.protected_tables ORDER BY 1`
)

// list looks at everything. What can't be seen stands in Unseen, and unless it is
// for want of a grant the error is the status to exit with. Without a listing
// there was no answer at all, and the error says why. known are more names for the
// keys of advisory locks.
func list(ctx context.Context, pool *pgxpool.Pool, names, known []string) (*listing, error) {
	within, cancel := context.WithTimeout(ctx, lookBound)
	defer cancel()
	found := &listing{Leases: []listedLease{}, Locks: []listedLock{}, Protected: []protectedTable{}, known: slices.Concat(names, known)}
	var failed error
	for _, part := range []struct {
		what   string
		read   func(context.Context, pgx.Tx) error
		forget func()
	}{
		{"leases", func(ctx context.Context, tx pgx.Tx) error { return found.readLeases(ctx, tx, names) }, func() { found.Leases = nil }},
		{"advisory locks", func(ctx context.Context, tx pgx.Tx) error { return found.readLocks(ctx, tx, len(names) > 0) }, func() { found.Locks = nil }},
		{"protected tables", func(ctx context.Context, tx pgx.Tx) error { return found.readProtected(ctx, tx, names) }, func() { found.Protected = nil }},
	} {
		err := look(within, pool, part.read)
		if err == nil {
			continue
		}
		found.Unseen = append(found.Unseen, part.what+": "+reason(err))
		part.forget()
		if _, hidden := errors.AsType[*unseenError](err); !hidden {
			failed = cmp.Or(failed, err)
		}
	}
	switch {
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	case found.At.IsZero():
		return nil, failed
	case failed != nil:
		return found, status(code(failed))
	}
	return found, nil
}

// reason is why something can't be seen.
func reason(err error) string {
	if errors.Is(err, pglock.ErrNoSchema) {
		err = pglock.ErrNoSchema
	}
	return strings.TrimPrefix(err.Error(), "pglock: ")
}

func (found *listing) readLeases(ctx context.Context, tx pgx.Tx, names []string) error {
	if err := found.readClock(ctx, tx); err != nil {
		return err
	}
	rows, _ := tx.Query(ctx, listLeasesSQL, pgx.QueryExecModeExec)
	var l listedLease
	var remaining, ttl float64
	at := map[string]int{}
	_, err := pgx.ForEachRow(rows, []any{&l.Name, &l.Token, &l.Owner, &l.Role, &l.AcquiredAt, &l.ExpiresAt, &remaining, &ttl}, func() error {
		found.known = append(found.known, l.Name)
		if len(names) == 0 || slices.Contains(names, l.Name) {
			l.Remaining, l.TTL, l.Waiters = seconds(remaining*1e9), seconds(ttl*1e9), []listedWaiter{}
			at[l.Name] = len(found.Leases)
			found.Leases = append(found.Leases, l)
		}
		return nil
	})
	if err != nil {
		return err
	}
	var name string
	var w listedWaiter
	rows, _ = tx.Query(ctx, listWaitersSQL, pgx.QueryExecModeExec)
	_, err = pgx.ForEachRow(rows, []any{&name, &w.Ticket, &w.Owner, &w.Role, &w.QueuedAt, &w.ExpiresAt}, func() error {
		if i, held := at[name]; held { // else it came between the two statements
			found.Leases[i].Waiters = append(found.Leases[i].Waiters, w)
		}
		return nil
	})
	return err
}

func (found *listing) readClock(ctx context.Context, tx pgx.Tx) error {
	return tx.QueryRow(ctx, "SELECT clock_timestamp()", pgx.QueryExecModeExec).Scan(&found.At)
}

func (found *listing) readLocks(ctx context.Context, tx pgx.Tx, only bool) error {
	if err := found.readClock(ctx, tx); err != nil {
		return err
	}
	names := map[advisoryKey]string{}
	for _, name := range found.known {
		key := keyOf(name)
		key.Name = ""
		names[key] = name
	}
	rows, _ := tx.Query(ctx, listLocksSQL, pgx.QueryExecModeExec)
	var l listedLock
	var class, object int64
	_, err := pgx.ForEachRow(rows, []any{&class, &object, &l.Sub, &l.Shared, &l.Granted, &l.Pid, &l.Program, &l.Role, &l.Host, &l.State, &l.Since}, func() error {
		l.Class, l.Object = uint32(class), uint32(object)
		number := class<<32 | object
		l.Key = fmt.Sprint(number)
		if l.Sub == 2 {
			l.Key = fmt.Sprintf("(%d, %d)", int32(class), int32(object))
		}
		name, named := names[advisoryKey{Bigint: number, Class: l.Class, Object: l.Object, Sub: l.Sub}]
		if l.Name = name; named || !only {
			found.Locks = append(found.Locks, l)
		}
		return nil
	})
	return err
}

// readProtected has nothing to say of names: protected tables have patterns.
func (found *listing) readProtected(ctx context.Context, tx pgx.Tx, names []string) error {
	if len(names) > 0 {
		return nil
	}
	rows, _ := tx.Query(ctx, listProtectedSQL, pgx.QueryExecModeExec)
	tables, err := pgx.CollectRows(rows, pgx.RowToStructByPos[protectedTable])
	if len(tables) > 0 {
		found.Protected = tables
	}
	return err
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
			out.WriteString(printable(note) + "\n")
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
	if len(found.Unseen) > 0 {
		parts = append(parts, part{title: "NOT SEEN", notes: found.Unseen})
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
