package main

import (
	"encoding/json"
	"errors"
	"os"
	"slices"
)

// results is what a run has found, as it is written to JSON.
type results struct {
	Date       string    `json:"date"`
	Quick      bool      `json:"quick"` // measured too briefly to be quoted
	Machine    machine   `json:"machine"`
	Contenders []about   `json:"contenders"`
	Missing    []missing `json:"missing,omitempty"`
	Failures   []failure `json:"failures,omitempty"`
	Cells      []cell    `json:"cells"`
}

type about struct {
	Name       string `json:"name"`
	About      string `json:"about"`
	Version    string `json:"version"`
	Violations int64  `json:"violations"` // grants of a name that somebody held
}

// missing is a contender whose server could not be started.
type missing struct {
	Contender string `json:"contender"`
	Why       string `json:"why"`
	Absent    bool   `json:"absent"` // this machine doesn't have it
}

type failure struct {
	Scenario  string `json:"scenario"`
	Contender string `json:"contender"`
	Why       string `json:"why"`
}

// A cell is what one trial measured.
type cell struct {
	Scenario  string            `json:"scenario"`
	Setting   string            `json:"setting"`
	Contender string            `json:"contender"`
	Metrics   map[string]figure `json:"metrics"`
}

// A figure is the median of the rounds, and each of them.
type figure struct {
	Median float64   `json:"median"`
	Rounds []float64 `json:"rounds"`
}

func newCell(scenario string, t trial, samples []sample) cell {
	c := cell{scenario, t.setting, t.contender, map[string]figure{}}
	for _, s := range samples {
		for metric, value := range s {
			f := c.Metrics[metric]
			f.Rounds = append(f.Rounds, value)
			c.Metrics[metric] = f
		}
	}
	for metric, f := range c.Metrics {
		f.Median = median(f.Rounds)
		c.Metrics[metric] = f
	}
	return c
}

// median is the middle one, or the mean of the two in the middle.
func median(of []float64) float64 {
	sorted := slices.Sorted(slices.Values(of))
	n := len(sorted)
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// failed reports whether something that was started could not be measured, or
// excluded nobody.
func (r results) failed() bool {
	violated := func(a about) bool { return a.Violations > 0 }
	return len(r.Failures) > 0 || slices.ContainsFunc(r.Contenders, violated)
}

// find returns a figure, if that trial was measured.
func (r results) find(scenario, setting, contender, metric string) (figure, bool) {
	for _, c := range r.Cells {
		if c.Scenario == scenario && c.Setting == setting && c.Contender == contender {
			f, ok := c.Metrics[metric]
			return f, ok
		}
	}
	return figure{}, false
}

// write puts the results into base.json, the tables into base.md and the chart
// into base.svg, if there is something to draw.
func write(r results, base string) error {
	text, err := json.MarshalIndent(r, "", "\t")
	if err != nil {
		return err
	}
	return errors.Join(
		os.WriteFile(base+".json", append(text, '\n'), 0o644),
		os.WriteFile(base+".md", []byte(r.markdown(chartName(base))), 0o644),
		r.chart(base+".svg"),
	)
}
