package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

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
	named bool     // only of those that were asked for
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
	found := &listing{Leases: []listedLease{}, Locks: []listedLock{}, Protected: []protectedTable{}, known: slices.Concat(names, known), named: len(names) > 0}
	var failed error
	for _, part := range []struct {
		what   string
		read   func(context.Context, pgx.Tx) error
		forget func()
	}{
		{"leases", func(ctx context.Context, tx pgx.Tx) error { return found.readLeases(ctx, tx, names) }, func() { found.Leases = nil }},
		{"advisory locks", func(ctx context.Context, tx pgx.Tx) error { return found.readLocks(ctx, tx) }, func() { found.Locks = nil }},
		{"protected tables", func(ctx context.Context, tx pgx.Tx) error { return found.readProtected(ctx, tx) }, func() { found.Protected = nil }},
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
		if !found.named {
			found.known = append(found.known, l.Name)
		} else if !slices.Contains(names, l.Name) {
			return nil
		}
		l.Remaining, l.TTL, l.Waiters = seconds(remaining*1e9), seconds(ttl*1e9), []listedWaiter{}
		at[l.Name] = len(found.Leases)
		found.Leases = append(found.Leases, l)
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

func (found *listing) readLocks(ctx context.Context, tx pgx.Tx) error {
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
		if l.Name = name; named || !found.named {
			found.Locks = append(found.Locks, l)
		}
		return nil
	})
	return err
}

func (found *listing) readProtected(ctx context.Context, tx pgx.Tx) error {
	if found.named {
		return nil
	}
	rows, _ := tx.Query(ctx, listProtectedSQL, pgx.QueryExecModeExec)
	tables, err := pgx.CollectRows(rows, pgx.RowToStructByPos[protectedTable])
	if len(tables) > 0 {
		found.Protected = tables
	}
	return err
}
