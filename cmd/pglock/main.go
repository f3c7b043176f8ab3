// Command pglock is what operators and shell scripts use of Pawl: it brings the
// schema into a database, runs a command under a lease as flock does under a
// file, and shows and frees what is held.
//
//	pglock migrate up
//	pglock run backup --ttl 1m -- ./backup.sh
//	pglock release backup --token 17
//
// It connects as psql does: by --dsn, a URL or keywords, else by DATABASE_URL,
// else by libpq's PGHOST, PGUSER and so on. Where the server is not found within
// 2 s it says so; connect_timeout in the DSN gives it longer.
//
// Each verb prints text for people, or JSON with -o json. Colours are only for
// a terminal, and for none where NO_COLOR is set. pglock help lists the verbs,
// and exit.go the codes it exits with.
package main

import (
	"context"
	"io"
	"os"
)

func main() { os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)) }

// run does what the arguments say and returns the code to exit with.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	a := &app{stdin: stdin, stdout: stdout, stderr: stderr}
	root := a.root()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err != nil && !a.begun {
		err = &usageError{err} // cobra has refused the arguments
	}
	return a.exit(err)
}
