package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
)

// app is what the verbs share.
type app struct {
	stdin          io.Reader
	stdout, stderr io.Writer
	dsn            string
	output         string // text or json
	begun          bool   // the arguments were in order
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "pglock",
		Short: "Leases and locks on PostgreSQL, for shells and for people",
		Long: `pglock runs commands under leases that are kept in PostgreSQL, shows who holds
and who waits, and brings the schema into a database and out of it.

It connects by --dsn, else by DATABASE_URL, else by PGHOST, PGUSER and so on, as
psql does.

` + exitHelp,
		SilenceUsage:      true,
		SilenceErrors:     true,
		DisableAutoGenTag: true,
	}
	flags := root.PersistentFlags()
	flags.StringVar(&a.dsn, "dsn", "", "the database, as a `URL` or keywords (default: DATABASE_URL, else PGHOST and so on)")
	flags.StringVarP(&a.output, "output", "o", "text", "`format` of what is printed: text or json")
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"text", "json"}, cobra.ShellCompDirectiveNoFileComp)) // there is such a flag
	root.AddCommand(a.migrate(), a.run(), a.release(), a.key(), a.list(), a.blocked(), a.doctor())
	return root
}

// verb makes what cobra calls: the function gets a context that ends with the
// first signal to end, and its error decides the exit code.
func (a *app) verb(do func(ctx context.Context, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		if err := a.begin(); err != nil {
			return err
		}
		ctx, stop := untilSignal(cmd.Context())
		defer stop()
		return do(ctx, args)
	}
}

// begin checks the flags that all verbs have.
func (a *app) begin() error {
	if a.output != "text" && a.output != "json" {
		return usagef("-o %s: give text or json", a.output)
	}
	a.begun = true
	return nil
}

// verbs makes a verb that is nothing without one of its own verbs.
func verbs(cmd *cobra.Command, below ...*cobra.Command) *cobra.Command {
	cmd.AddCommand(below...)
	var names []string
	for _, v := range below {
		names = append(names, v.Name())
	}
	cmd.Args = cobra.ArbitraryArgs
	cmd.RunE = func(_ *cobra.Command, args []string) error {
		if len(args) > 0 {
			return fmt.Errorf("unknown command %q for %q: give one of %s", args[0], cmd.CommandPath(), strings.Join(names, ", "))
		}
		return fmt.Errorf("%s: give one of %s", cmd.CommandPath(), strings.Join(names, ", "))
	}
	return cmd
}
