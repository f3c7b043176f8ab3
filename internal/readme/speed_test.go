package readme

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// unmeasured returns the figures of the README's section on speed that are not
// in the report of a full run of bench.
func unmeasured(readme, report string) (rows []string, section string) {
	_, section, _ = strings.Cut(readme, "\n## Speed\n")
	section, _, _ = strings.Cut(section, "\n## ")
	measured := strings.Split(report, "\n")
	for line := range strings.Lines(section) {
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "|") && !slices.Contains(measured, line) {
			rows = append(rows, line)
		}
	}
	return rows, section
}

func TestSpeed(t *testing.T) {
	report, err := os.ReadFile(filepath.Join(root, "bench", "results.md"))
	if err != nil {
		t.Fatal(err)
	}
	rows, section := unmeasured(text(t), string(report))
	for _, row := range rows {
		t.Errorf("bench/results.md has no %s", row)
	}
	encoded, err := os.ReadFile(filepath.Join(root, "bench", "results.json"))
	if err != nil {
		t.Fatal(err)
	}
	var results struct {
		Date    string
		Quick   bool
		Machine struct {
			Processor string
			Cores     int
		}
	}
	if err := json.Unmarshal(encoded, &results); err != nil {
		t.Fatal(err)
	}
	for _, said := range []string{results.Date, results.Machine.Processor, "bench/results.svg"} {
		if !strings.Contains(section, said) {
			t.Errorf("the section on speed doesn't say %q", said)
		}
	}
	if results.Quick {
		t.Error("the results are those of a quick run")
	}

	// The control.
	if rows, _ := unmeasured(strings.Replace(text(t), "\n| pawl ", "\n| pawl 1", 1), string(report)); len(rows) != 1 {
		t.Errorf("a figure that nobody measured is not seen: %q", rows)
	}
}
