package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
)

var sampleResults = results{
	Date:       "2026-01-02",
	Machine:    machine{Processor: "A Processor", Cores: 2, MemoryMiB: 1024, System: "Debian", Kernel: "6.1", Go: "go1.26.0", Load: "0 0 0"},
	Contenders: []about{{"pawl", "leases", "PostgreSQL 15", 0}, {"floor", "statements", "PostgreSQL 15", 3}},
	Missing:    []missing{{"etcd", "not installed: etcd\nmore", true}},
	Failures:   []failure{{"losing", "floor", "down"}},
	Cells: []cell{
		newCell("pairs", trial{setting: "1", contender: "pawl"}, []sample{{"pairs/s": 30, "server CPU, µs": 7}, {"pairs/s": 10}, {"pairs/s": 20}}),
		newCell("pairs", trial{setting: "1", contender: "floor"}, []sample{{"pairs/s": 30}, {"pairs/s": 50}}),
		newCell("pairs", trial{setting: "8", contender: "pawl"}, []sample{{"pairs/s": 100}}),
		newCell("takeover", trial{setting: "TTL 2s", contender: "pawl"}, []sample{{"took, ms": 1900, "beyond, ms": 12.34}}),
		newCell("takeover", trial{setting: "TTL 2s", contender: "floor"}, nil),
	},
}

// What is written for the same measurements is the same, to the byte: a
// difference between two files is one between two runs.
func TestResults_AreStable(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := write(sampleResults, filepath.Join(dir, "results")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"results.json", "results.md"} {
		got, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		golden := filepath.Join("testdata", name)
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != string(want) {
			t.Errorf("%s is not %s:\n%s", name, golden, got)
		}
	}
	var again results
	text, err := os.ReadFile(filepath.Join(dir, "results.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &again); err != nil {
		t.Fatal(err)
	}
	if got, want := again.markdown("results.svg"), sampleResults.markdown("results.svg"); got != want {
		t.Errorf("the report of what was read back differs:\n%s", got)
	}
}

func TestMedian(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		of   []float64
		want float64
	}{{[]float64{5}, 5}, {[]float64{9, 1, 5}, 5}, {[]float64{4, 1, 9, 2}, 3}} {
		if got := median(test.of); got != test.want {
			t.Errorf("median(%v) = %v; want %v", test.of, got, test.want)
		}
	}
}
