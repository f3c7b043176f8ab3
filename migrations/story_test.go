package migrations_test

import (
	"os"
	"os/exec"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// psql plays the whole story, with no Go in sight, and says what story.txt has.
func TestStory(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	psql := pgtest.Client(t, "psql", dsn)
	script, err := os.Open("testdata/story.sql")
	if err != nil {
		t.Fatal(err)
	}
	defer script.Close()
	cmd := exec.CommandContext(t.Context(), psql, "-X", "-q", "-A", "-t", "-d", dsn)
	cmd.Stdin = script
	cmd.Env = append(os.Environ(), "PSQL="+psql, "DSN="+dsn, "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v", err)
	}
	want, err := os.ReadFile("testdata/story.txt")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(out)); diff != "" {
		t.Errorf("psql tells another story:\n%s", diff)
	}
}
