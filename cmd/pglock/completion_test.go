package main

import (
	"strings"
	"testing"
)

// Shells complete verbs, flags and what they take.
func TestCompletion(t *testing.T) {
	t.Parallel()
	for line, want := range map[string][]string{
		"":           {"migrate\t", "run\t", "release\t", "key\t"},
		"migrate ":   {"up\t", "down\t", "status\t", "sql\t"},
		"key -o ":    {"text\n", "json\n"},
		"release --": {"--token\t", "--force\t", "--dsn\t"},
	} {
		args := strings.Split(line, " ")
		got := do(t, "", append([]string{"__complete"}, args...)...)
		for _, w := range want {
			if got.code != 0 || !strings.Contains("\n"+got.stdout, "\n"+w) {
				t.Errorf("%q is completed by %q, want %q among it", line, got.stdout, w)
			}
		}
	}
	// A name is not a file's.
	for _, verb := range []string{"key", "release", "ls", "run", "migrate up"} {
		args := append(append([]string{"__complete"}, strings.Fields(verb)...), "")
		if got := do(t, "", args...); got.stdout != ":4\n" {
			t.Errorf("%s is completed by %q, want nothing and no files", verb, got.stdout)
		}
	}
	if got := do(t, "", "__complete", "run", "backup", "--", ""); got.stdout != ":0\n" {
		t.Errorf("the command of run is completed by %q, want files", got.stdout)
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if got := do(t, "", "completion", shell); got.code != 0 || !strings.Contains(got.stdout, "pglock") {
			t.Errorf("%s: %d, %s", shell, got.code, got.stderr)
		}
	}
}

// Help fits on a terminal of 80 columns.
func TestHelp_Width(t *testing.T) {
	t.Parallel()
	for _, verb := range []string{"", "run", "ls", "blocked", "doctor", "release", "key", "migrate", "migrate up", "migrate down", "migrate status", "migrate sql"} {
		got := do(t, "", append(strings.Fields(verb), "--help")...)
		if got.code != 0 || got.stdout == "" {
			t.Errorf("%s: %+v", verb, got)
		}
		for line := range strings.Lines(got.stdout) {
			if n := len(strings.TrimRight(line, "\n")); n > 80 {
				t.Errorf("%s: %d columns: %s", verb, n, line)
			}
		}
	}
}
