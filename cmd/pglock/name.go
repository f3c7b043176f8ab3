package main

import (
	"fmt"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// oneName is for verbs whose only argument is the name of a lease or a lock.
func oneName(_ *cobra.Command, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("give one NAME, not %d", len(args))
	}
	return checkName(args[0])
}

// checkName refuses what no lease and no lock can be called. A name that is too
// long is not repeated.
func checkName(name string) error {
	switch {
	case name == "":
		return usagef("NAME is empty: give UTF-8 of 1 to 1,024 bytes")
	case len(name) > 1024:
		return usagef("NAME has %d bytes: give UTF-8 of 1 to 1,024 bytes", len(name))
	case !utf8.ValidString(name):
		return usagef("NAME %q is not UTF-8: give UTF-8 of 1 to 1,024 bytes", name)
	}
	return nil
}
