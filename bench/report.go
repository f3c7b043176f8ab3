package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"unicode/utf8"
)

// chartName is how the report, which stands beside it, names the chart.
func chartName(base string) string { return filepath.Base(base) + ".svg" }

// markdown is the report: Markdown whose tables are aligned, to be read in a
// terminal too.
func (r results) markdown(chart string) string {
	var text strings.Builder
	fmt.Fprintf(&text, "# Measured on %s\n\n", r.Date)
	if r.Quick {
		text.WriteString("**A quick run: too short to be quoted.**\n\n")
	}
	m := r.Machine
	fmt.Fprintf(&text, "%s, %d cores, %d MiB, %s, Linux %s, %s. Load at the start: %s.\n\n",
		m.Processor, m.Cores, m.MemoryMiB, m.System, m.Kernel, m.Go, m.Load)
	contenders := [][]string{{"contender", "server", "what it is", "violations"}}
	for _, c := range r.Contenders {
		contenders = append(contenders, []string{c.Name, c.Version, c.About, fmt.Sprint(c.Violations)})
	}
	text.WriteString(table(contenders))
	for _, x := range r.Missing {
		fmt.Fprintf(&text, "\n%s was left out: %s\n", x.Contender, firstLine(x.Why))
	}
	for _, x := range r.Failures {
		fmt.Fprintf(&text, "\n%s failed in %s: %s\n", x.Contender, x.Scenario, firstLine(x.Why))
	}
	if len(r.settings(pairs.name)) > 0 {
		fmt.Fprintf(&text, "\n![%s](%s)\n", pairs.title, chart)
	}
	for _, s := range scenarios {
		if len(r.settings(s.name)) == 0 {
			continue
		}
		fmt.Fprintf(&text, "\n## %s\n\n%s Medians of the rounds.", s.title, s.says)
		if reference := s.metrics[0].reference; reference != "" {
			fmt.Fprintf(&text, " In brackets: times %s.", reference)
		}
		text.WriteString("\n\n")
		if !s.wide {
			text.WriteString(table(r.long(s)))
			continue
		}
		for i, m := range s.metrics {
			if i > 0 {
				text.WriteString("\n")
			}
			text.WriteString(table(r.wide(s, m)))
		}
	}
	return text.String()
}

// settings are those of a scenario that were measured, in order.
func (r results) settings(scenario string) []string {
	return r.distinct(scenario, func(c cell) string { return c.Setting })
}

func (r results) distinct(scenario string, of func(cell) string) []string {
	var all []string
	for _, c := range r.Cells {
		if c.Scenario == scenario && !slices.Contains(all, of(c)) {
			all = append(all, of(c))
		}
	}
	return all
}

// wide has a column for each setting.
func (r results) wide(s scenario, m metric) [][]string {
	settings := r.settings(s.name)
	rows := [][]string{append([]string{m.name}, settings...)}
	for _, contender := range r.distinct(s.name, func(c cell) string { return c.Contender }) {
		row := []string{contender}
		for _, setting := range settings {
			row = append(row, r.text(s.name, setting, contender, m))
		}
		rows = append(rows, row)
	}
	return rows
}

// long has a column for each metric.
func (r results) long(s scenario) [][]string {
	header := []string{"setting", "contender"}
	for _, m := range s.metrics {
		header = append(header, m.name)
	}
	rows := [][]string{header}
	for _, c := range r.Cells {
		if c.Scenario == s.name {
			row := []string{c.Setting, c.Contender}
			for _, m := range s.metrics {
				row = append(row, r.text(s.name, c.Setting, c.Contender, m))
			}
			rows = append(rows, row)
		}
	}
	return rows
}

func (r results) text(scenario, setting, contender string, m metric) string {
	f, ok := r.find(scenario, setting, contender, m.name)
	if !ok {
		return "–"
	}
	text := fmt.Sprintf("%.*f", m.decimals, f.Median)
	if reference, ok := r.find(scenario, setting, m.reference, m.name); ok && reference.Median > 0 {
		text += fmt.Sprintf(" (%.2f)", f.Median/reference.Median)
	}
	return text
}

// table is Markdown with its columns aligned, numbers to the right.
func table(rows [][]string) string {
	width := make([]int, len(rows[0]))
	numeric := make([]bool, len(rows[0]))
	for i := range width {
		numeric[i] = len(rows) > 1
		for n, row := range rows {
			width[i] = max(width[i], utf8.RuneCountInString(row[i]))
			numeric[i] = numeric[i] && (n == 0 || strings.ContainsAny(row[i][:min(1, len(row[i]))], "-0123456789") || row[i] == "–")
		}
	}
	var text strings.Builder
	for n, row := range rows {
		for i, cell := range row {
			space := strings.Repeat(" ", width[i]-utf8.RuneCountInString(cell))
			if numeric[i] {
				fmt.Fprintf(&text, "| %s%s ", space, cell)
			} else {
				fmt.Fprintf(&text, "| %s%s ", cell, space)
			}
		}
		text.WriteString("|\n")
		if n == 0 {
			for i := range row {
				if numeric[i] {
					fmt.Fprintf(&text, "|%s:", strings.Repeat("-", width[i]+1))
				} else {
					fmt.Fprintf(&text, "|%s", strings.Repeat("-", width[i]+2))
				}
			}
			text.WriteString("|\n")
		}
	}
	return text.String()
}

func firstLine(text string) string {
	first, _, _ := strings.Cut(text, "\n")
	return first
}
