package main

import (
	"bytes"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// Without a terminal there is text and nothing else, in 80 columns.
func TestPlainText(t *testing.T) {
	t.Parallel()
	code, stdout, stderr := demo(t, "-dsn="+pgtest.EmptyDSN(t))
	if code != 0 || stderr != "" {
		t.Fatalf("exit %d, %s", code, stderr)
	}
	for _, line := range strings.Split(stdout, "\n")[1:] { // the first names the database
		if width := utf8.RuneCountInString(line); width > 80 || strings.ContainsAny(line, "\x1b\r\t") || strings.TrimRight(line, " ") != line {
			t.Errorf("%q is %d columns wide", line, width)
		}
	}
	for _, want := range []string{
		`^4 workers × 10 withdrawals of 1 from 1000, with 5ms between`,
		`^strategy    expected  actual  lost  retries or waits        time$`,
		`^none             960     9\d\d  [ \d]{3}\d  – +\d+\.\d\d s$`,
		`^row              960     960     0  waits of [\d.]+ ms +\d+\.\d\d s$`,
		`^lease            960     960     0  waits of [\d.]+ ms +\d+\.\d\d s$`,
		`^optimistic       960     960     0  \d+ retries +\d+\.\d\d s$`,
		`^ +\d+\.\d{3} s  A  is granted the lease with token \d+$`,
		`^ +\d+\.\d{3} s  B  is granted the lease with token \d+$`,
		`^ +\d+\.\d{3} s  A  writes 900 with token \d+: accepted$`,
		`^ +balance 900, expected 700: a withdrawal of 200 is lost$`,
		`^ +\d+\.\d{3} s  A  presents token \d+, writes 900: refused, \d+ was accepted before$`,
		`^ +balance 800, expected 800: nothing is lost$`,
		`^None was lost with: row, advisory, lease, optimistic\.$`,
	} {
		if !regexp.MustCompile(`(?m)` + want).MatchString(stdout) {
			t.Errorf("no line is as %q\n%s", want, stdout)
		}
	}
}

// Colour changes nothing but the colour: columns stay where they are.
func TestColour(t *testing.T) {
	t.Parallel()
	width := 0
	print := func(colour bool) string {
		var out bytes.Buffer
		r := &textReport{stdout: &out, colour: colour, options: options{workers: 1500, ops: 10}}
		r.tally(tally{Strategy: none, Expected: 0, Actual: 14_999, Lost: 14_999})
		r.tally(tally{Strategy: "lease", waits: true, wait: 999900 * time.Microsecond, Retries: 64})
		r.tally(tally{Strategy: "row", waits: true, wait: 99 * time.Second, ElapsedMS: 999_990})
		table := strings.Split(strings.TrimSpace(out.String()), "\n")[2:]
		for i, row := range table {
			if n := utf8.RuneCountInString(row); !colour && i > 0 && n != width {
				t.Errorf("%q is %d columns wide, the one above it %d", row, n, width)
			}
			width = utf8.RuneCountInString(row)
		}
		tale := tale{Story: fenced, Balance: 900, Expected: 700}
		r.beginTale(tale)
		for _, k := range []kind{granted, accepted, refused, expired} {
			r.event(tale, event{Kind: k, Actor: "A", At: tale.Began})
		}
		r.tale(tale)
		return out.String()
	}
	plain, coloured := print(false), print(true)
	if coloured == plain {
		t.Error("there is no colour")
	}
	if stripped := regexp.MustCompile("\x1b\\[[0-9]+m").ReplaceAllString(coloured, ""); stripped != plain {
		t.Errorf("%q\nis without its colour not\n%q", coloured, plain)
	}
}
