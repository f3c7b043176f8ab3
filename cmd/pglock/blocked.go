package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/pawl-go/pawl/pglock"
)

// blockedBackend is a pglock.BlockInfo, as it is printed.
type blockedBackend struct {
	Pid       int32      `json:"pid"` // 0: a transaction that was prepared
	BlockedBy []int32    `json:"blocked_by"`
	Waits     string     `json:"waits_for,omitempty"`
	Mode      string     `json:"mode,omitempty"`
	Relation  string     `json:"relation,omitempty"`
	Lease     string     `json:"lease,omitempty"`
	Since     *time.Time `json:"since,omitempty"`
	Role      string     `json:"role"`
	Program   string     `json:"program"`
	Host      string     `json:"host"`
	State     string     `json:"state"`
	Query     string     `json:"query"`
	TxSince   *time.Time `json:"transaction_since,omitempty"`
}

func (a *app) blocked() *cobra.Command {
	return &cobra.Command{
		Use:   "blocked",
		Short: "Show who waits for which lock behind whom",
		Long: `blocked shows the backends of this database that wait for a lock, of a row, a
table, a lease's row or an advisory one, each below the one that is in its way.
On top stand those that wait for nothing: theirs is the transaction to end, with
SELECT pg_cancel_backend(PID) or, where they are idle, pg_terminate_backend(PID).

The query of a backend is its last one; what holds the lock may have been an
earlier one. Queries and ages of other roles are for members of pg_monitor. It
takes no row locks, and needs neither the schema nor a grant.`,
		Example: `  pglock blocked
  pglock blocked -o json`,
		Args: cobra.NoArgs,
		RunE: a.verb(func(ctx context.Context, _ []string) error {
			client, done, err := a.client(ctx)
			if err != nil {
				return err
			}
			defer done()
			var infos []pglock.BlockInfo
			err = ask(ctx, func(ctx context.Context) (err error) {
				infos, err = client.Blocked(ctx)
				return err
			})
			if err != nil {
				return err
			}
			backends := make([]blockedBackend, len(infos))
			for i, info := range infos {
				backends[i] = blockedBackend{info.Pid, info.BlockedBy, info.Waits, info.Mode, info.Relation, info.Lease, moment(info.Since),
					info.Role, info.Program, info.Host, info.State, info.Query, moment(info.TxSince)}
			}
			if len(backends) == 0 && a.output == "text" {
				_, err := fmt.Fprintln(a.stdout, "nobody waits for a lock")
				return err
			}
			columns, _ := screen(a.stdout)
			return a.print(backends, func() *table { return tree(backends).fit(columns) })
		}),
	}
}

// moment is a time that may be unknown.
func moment(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

// tree puts each backend below the first of those in its way.
func tree(backends []blockedBackend) *table {
	t := newTable("PID", "WAITS FOR", ">FOR", ">TX", "STATE", "PROGRAM", "QUERY")
	shown := map[int32]bool{}
	var show func(b blockedBackend, depth int)
	show = func(b blockedBackend, depth int) {
		if shown[b.Pid] {
			return
		}
		shown[b.Pid] = true
		t.add(b.cells(depth)...)
		for _, behind := range backends {
			if slices.Contains(behind.BlockedBy, b.Pid) {
				show(behind, depth+1)
			}
		}
	}
	for _, b := range backends {
		if len(b.BlockedBy) == 0 {
			show(b, 0)
		}
	}
	for _, b := range backends { // a deadlock that the server has yet to find has no top
		show(b, 0)
	}
	return t
}

func (b blockedBackend) cells(depth int) []cell {
	pid := fmt.Sprint(b.Pid)
	if b.Pid == 0 {
		pid = "prepared"
	}
	if depth > 0 {
		pid = strings.Repeat("  ", depth-1) + "└ " + pid
	}
	waits := b.Waits
	if b.Lease != "" {
		waits = "lease " + b.Lease
	}
	if len(b.BlockedBy) > 1 {
		waits += fmt.Sprintf(" (behind %d)", len(b.BlockedBy))
	}
	colour := plain
	if len(b.BlockedBy) == 0 {
		colour = red
	}
	return []cell{text(pid).in(colour), text(waits), text(since(b.Since)), text(since(b.TxSince)), text(b.State), text(b.Program), text(oneLine(b.Query))}
}

// since is an age by this machine's clock: good enough to read.
func since(t *time.Time) string {
	if t == nil {
		return ""
	}
	return brief(max(0, time.Since(*t)))
}
