package main

import (
	"context"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/pawl-go/pawl/pglock"
)

// advisoryKey is a name as PostgreSQL's functions and views show it.
type advisoryKey struct {
	Name   string `json:"name"`
	Bigint int64  `json:"bigint"`  // what pg_advisory_lock takes
	Class  uint32 `json:"classid"` // and what pg_locks shows
	Object uint32 `json:"objid"`
	Sub    int    `json:"objsubid"`
}

func keyOf(name string) advisoryKey {
	n := pglock.KeyOf(name).Int64()
	return advisoryKey{Name: name, Bigint: n, Class: uint32(uint64(n) >> 32), Object: uint32(uint64(n)), Sub: 1}
}

func (a *app) key() *cobra.Command {
	return &cobra.Command{
		Use:   "key NAME",
		Short: "Show the number of an advisory lock's name",
		Long: `key shows the number under which pglock.KeyOf(NAME) is locked: as
pg_advisory_lock(bigint) takes it, and as pg_locks shows it. It needs no server.`,
		Example: `  pglock key accounts/42
  psql -c "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND (classid, objid, objsubid) = (1, 2, 1)"`,
		Args: cobra.ExactArgs(1),
		RunE: a.verb(func(_ context.Context, args []string) error {
			if name := args[0]; name == "" || len(name) > 1024 || !utf8.ValidString(name) {
				return usagef("NAME %q: give UTF-8 of 1 to 1,024 bytes", name)
			}
			k := keyOf(args[0])
			return a.print(k, func() *table {
				t := newTable("NAME", ">BIGINT", ">CLASSID", ">OBJID", ">OBJSUBID")
				t.add(text(k.Name), text(k.Bigint), text(k.Class), text(k.Object), text(k.Sub))
				return t
			})
		}),
	}
}
