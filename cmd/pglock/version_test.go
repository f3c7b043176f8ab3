package main

import (
	"regexp"
	"testing"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// The version names the newest migration, without a server to ask.
func TestVersion(t *testing.T) {
	t.Parallel()
	got := do(t, "host=/nowhere", "--version")
	wanted := regexp.MustCompile(`^pglock version \S+, schema (\d+), go\S+\n$`)
	parts := wanted.FindStringSubmatch(got.stdout)
	if got.code != 0 || got.stderr != "" || parts == nil {
		t.Fatalf("exit %d, %q, %q", got.code, got.stdout, got.stderr)
	}
	if applied := one[string](t, pgtest.Pool(t), `SELECT pglock.schema_version()::text`); parts[1] != applied {
		t.Errorf("schema %s, and the migrations end at %s", parts[1], applied)
	}
}
