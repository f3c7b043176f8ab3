package pgtest

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// Require skips the test if the rig it needs is missing: docker, pgbouncer and
// so on, with what was found instead of it. Where PGLOCK_REQUIRE, a list with
// commas, names the rig, the test fails instead.
func Require(t testing.TB, rig string, err error) {
	t.Helper()
	if err != nil {
		missing(t, rig, err.Error())
	}
}

func missing(t testing.TB, rig, why string) {
	t.Helper()
	if slices.Contains(strings.Split(os.Getenv("PGLOCK_REQUIRE"), ","), rig) {
		t.Fatalf("PGLOCK_REQUIRE names %s, which is missing: %s", rig, why)
	}
	t.Skipf("no %s: %s", rig, why)
}
