package main

import (
	"strings"
	"testing"
	"time"
)

func TestTable(t *testing.T) {
	t.Parallel()
	tab := newTable("NAME", ">NUMBER", "")
	tab.add(text("ä"), text(7), text(""))
	tab.add(text("longer\n"), text(-100), cell{"red", red})
	const want = "" +
		"NAME      NUMBER\n" +
		"ä              7\n" +
		"longer\\n    -100  red\n"
	var out strings.Builder
	if err := tab.print(&out); err != nil || out.String() != want {
		t.Errorf("%v\n%s, want\n%s", err, out.String(), want)
	}
}

func TestPrintable(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"plain ünï\n\t":    "plain ünï\n\t",
		"\x1b[31m\a\r":     `\x1b[31m\a\r`,
		"\xff\u202e\u200b": `\ufffd\u202e\u200b`,
	} {
		if got := printable(in); got != want {
			t.Errorf("%q is printed as %q, want %q", in, got, want)
		}
	}
}

func TestBrief(t *testing.T) {
	t.Parallel()
	for in, want := range map[time.Duration]string{
		0:                                     "0s",
		1234567 * time.Nanosecond:             "1ms",
		59*time.Second + 940*time.Millisecond: "59.9s",
		-90 * time.Second:                     "-1m30s",
		25*time.Hour + 61*time.Minute:         "1d2h",
		3*time.Hour + 59*time.Minute:          "3h59m",
	} {
		if got := brief(in); got != want {
			t.Errorf("%v is printed as %s, want %s", in, got, want)
		}
	}
}
