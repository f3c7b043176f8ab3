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
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if got := do(t, "", "completion", shell); got.code != 0 || !strings.Contains(got.stdout, "pglock") {
			t.Errorf("%s: %d, %s", shell, got.code, got.stderr)
		}
	}
}
