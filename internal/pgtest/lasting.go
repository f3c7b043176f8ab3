package pgtest

import (
	"os"
	"testing"
)

// Lasting chooses what decides how long a test runs: full with PGLOCK_LONG=1,
// as long as the guarantee is stated for, else some seconds, or less.
func Lasting[T any](full, some, short T) T {
	switch {
	case os.Getenv("PGLOCK_LONG") == "1":
		return full
	case testing.Short():
		return short
	}
	return some
}
