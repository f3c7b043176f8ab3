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
		Use:     "pglock",
		Short:   "Leases and locks on PostgreSQL, for shells and for people",
		Version: version(),
		Long: `pglock runs commands under leases that are kept in PostgreSQL, shows who holds
and who waits, and brings the schema into a database and out of it.

It connects by --dsn, else by DATABASE_URL, each a URL or keywords as psql takes
them, else by PGHOST, PGUSER and so on.

` + exitHelp,
		SilenceUsage:      true,
		SilenceErrors:     true,
		DisableAutoGenTag: true,
	}
	flags := root.PersistentFlags()
	flags.StringVar(&a.dsn, "dsn", "", "`URL` of the database (default: DATABASE_URL, or PGHOST)")
	flags.StringVarP(&a.output, "output", "o", "text", "`format` of what is printed, text or json")
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"text", "json"}, cobra.ShellCompDirectiveNoFileComp)) // there is such a flag
	root.AddCommand(a.migrate(), a.run(), a.release(), a.key(), a.list(), a.blocked(), a.doctor())
	root.InitDefaultCompletionCmd() // which prints its help, and exits with 0, for a shell that it doesn't know
	if completion, _, err := root.Find([]string{"completion"}); err == nil {
		needVerb(completion, completion.Commands())
	}
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
	needVerb(cmd, below)
	return cmd
}

// needVerb has the command refuse to be called without one of its verbs.
func needVerb(cmd *cobra.Command, below []*cobra.Command) {
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
}
