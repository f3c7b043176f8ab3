package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pawl-go/pawl/pglock"
)

// held is a lease that is about to be released, as it is printed.
type held struct {
	Name       string        `json:"name"`
	Token      pglock.Token  `json:"token"`
	Owner      string        `json:"owner"`
	Role       string        `json:"role"`
	AcquiredAt time.Time     `json:"acquired_at"`
	Remaining  time.Duration `json:"-"`
	ExpiresAt  time.Time     `json:"expires_at"`
	Waiters    int           `json:"waiters"`
	Released   bool          `json:"released"`
}

func (a *app) release() *cobra.Command {
	var token int64
	var force bool
	cmd := &cobra.Command{
		Use:   "release NAME {--token N | --force}",
		Short: "End a lease whosever it is, and hand it on",
		Long: `release shows who holds the lease NAME, ends that tenure and hands the lease on
to the next in line. It refuses without the token of that tenure, so that what
is ended is what was looked at; --force ends whichever there is.

The holder goes on until it notices, with the next renewal; the database refuses
what it writes under its token. Where the holder is writing just now, release
waits up to 5 s for that transaction, and then says which backend has it.

An advisory lock is not a lease, and ends with its backend or its transaction:
for one of that name release says which backend that is.

It exits with 76 where nobody holds the lease, or not under that token. The role
needs EXECUTE on pglock.force_release.`,
		Example: `  pglock release accounts/42 --token 17
  pglock release accounts/42 --force`,
		Args: cobra.ExactArgs(1),
		RunE: a.verb(func(ctx context.Context, args []string) error {
			if token < 0 || token > 0 && force {
				return usagef("give --token N, which is above zero, or --force")
			}
			return a.releaseName(ctx, args[0], pglock.Token(token), force)
		}),
	}
	cmd.Flags().Int64Var(&token, "token", 0, "the `number` of the tenure to end")
	cmd.Flags().BoolVar(&force, "force", false, "end the tenure, whichever it is")
	return cmd
}

func (a *app) releaseName(ctx context.Context, name string, token pglock.Token, force bool) error {
	pool, err := a.connect(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	client := pglock.New(pool)
	defer func() { _ = client.Close(context.WithoutCancel(ctx)) }() // it holds nothing
	h, err := find(ctx, client, name)
	if err != nil {
		return err
	}
	if h == nil {
		return a.advisory(ctx, pool, name)
	}
	switch {
	case token == 0 && !force:
		err = usagef("refused: say --token %d if that tenure is to end, or --force", h.Token)
	case token != 0 && token != h.Token:
		err = &pglock.LostError{Name: name, Token: token, Cause: pglock.Taken}
	default:
		err = a.forceRelease(ctx, client, h)
		h.Released = err == nil
	}
	return errors.Join(a.print(h, h.table), err)
}

// find returns who holds the lease, or nil.
func find(ctx context.Context, client *pglock.Client, name string) (*held, error) {
	var leases []pglock.LeaseInfo
	err := ask(ctx, func(ctx context.Context) (err error) {
		leases, err = client.Leases(ctx)
		return err
	})
	i := slices.IndexFunc(leases, func(l pglock.LeaseInfo) bool { return l.Name == name })
	if err != nil || i < 0 {
		return nil, err
	}
	l := leases[i]
	return &held{Name: l.Name, Token: l.Token, Owner: l.Owner, Role: l.Role, AcquiredAt: l.AcquiredAt,
		Remaining: l.Remaining, ExpiresAt: l.ExpiresAt, Waiters: l.Waiters}, nil
}

// forceRelease says what it waits for once that has taken a second.
func (a *app) forceRelease(ctx context.Context, client *pglock.Client, h *held) error {
	timer := time.AfterFunc(time.Second, func() {
		a.complain(fmt.Errorf("lease %q: waiting up to 5s for an open transaction that writes under it", h.Name))
	})
	defer timer.Stop()
	return client.ForceRelease(ctx, h.Name, h.Token)
}

func (h *held) table() *table {
	t := newTable("NAME", ">TOKEN", "OWNER", "ROLE", "SINCE", ">LEFT", ">WAITING", "")
	left := text(brief(h.Remaining))
	if h.Remaining <= 0 {
		left = cell{"expired", yellow}
	}
	what := cell{"held", yellow}
	if h.Released {
		what = cell{"released", green}
	}
	t.add(text(h.Name), text(h.Token), text(h.Owner), text(h.Role), text(h.AcquiredAt.Local().Format(time.DateTime)),
		left, text(h.Waiters), what)
	return t
}

const advisorySQL = `SELECT a.pid, coalesce(nullif(a.application_name, ''), 'no application_name'), coalesce(a.usename, ''), coalesce(a.client_addr::text, 'local'), a.state_change
	FROM pg_locks l JOIN pg_stat_activity a USING (pid)
	WHERE l.locktype = 'advisory' AND l.granted AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
	  AND l.classid = $1::oid AND l.objid = $2::oid AND l.objsubid = 1
	ORDER BY a.pid`

// advisory says that there is no such lease, and which backends hold an advisory
// lock of that name.
func (a *app) advisory(ctx context.Context, pool *pgxpool.Pool, name string) error {
	var holders int
	key := keyOf(name)
	err := ask(ctx, func(ctx context.Context) error {
		rows, err := pool.Query(ctx, advisorySQL, key.Class, key.Object)
		if err != nil {
			return err
		}
		var pid int32
		var program, role, address string
		var since time.Time
		_, err = pgx.ForEachRow(rows, []any{&pid, &program, &role, &address, &since}, func() error {
			holders++
			a.complain(fmt.Errorf("an advisory lock of that name is held by backend %d (%s, %s from %s, as it is since %s): SELECT pg_terminate_backend(%d) ends it",
				pid, program, role, address, since.Local().Format(time.DateTime), pid))
			return nil
		})
		return err
	})
	switch {
	case err != nil:
		return err
	case holders > 0:
		return status(exitBusy)
	}
	a.complain(fmt.Errorf("nobody holds lease %q", name))
	return status(exitLost)
}
