package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/mattn/go-isatty"
)

// colour is a parameter of the escape sequence that turns it on.
type colour string

const (
	plain  colour = ""
	bold   colour = "1"
	faint  colour = "2"
	red    colour = "31"
	green  colour = "32"
	yellow colour = "33"
)

// table is for people: columns as wide as their widest cell, two spaces between.
type table struct {
	head  []string // of a column whose name begins with > the cells stand at the right
	lines [][]cell
}

type cell struct {
	text   string
	colour colour
}

// text makes a plain cell of anything; what a terminal would take for a command
// is made harmless.
func text(v any) cell {
	return cell{strings.NewReplacer("\n", `\n`, "\t", `\t`).Replace(printable(fmt.Sprint(v))), plain}
}

func (c cell) in(colour colour) cell { return cell{c.text, colour} }

func newTable(head ...string) *table { return &table{head: head} }

func (t *table) add(cells ...cell) { t.lines = append(t.lines, cells) }

// print writes the table, in colours where w shows them.
func (t *table) print(w io.Writer) error { return t.write(w, colours(w)) }

func (t *table) write(w io.Writer, coloured bool) error {
	right := make([]bool, len(t.head))
	heading := make([]cell, len(t.head))
	for i, name := range t.head {
		heading[i].text, right[i] = strings.CutPrefix(name, ">")
		heading[i].colour = bold
	}
	lines := append([][]cell{heading}, t.lines...)
	width := make([]int, len(t.head))
	for _, line := range lines {
		for i, c := range line {
			width[i] = max(width[i], utf8.RuneCountInString(c.text))
		}
	}
	for _, line := range lines {
		var out strings.Builder
		for i, c := range line {
			if i > 0 {
				out.WriteString("  ")
			}
			room := strings.Repeat(" ", width[i]-utf8.RuneCountInString(c.text))
			shown := c.text
			if coloured {
				shown = paint(c.colour, shown)
			}
			switch {
			case right[i]:
				out.WriteString(room + shown)
			case i == len(line)-1: // no spaces at the end of a line
				out.WriteString(shown)
			default:
				out.WriteString(shown + room)
			}
		}
		if _, err := fmt.Fprintln(w, strings.TrimRight(out.String(), " ")); err != nil {
			return err
		}
	}
	return nil
}

func paint(c colour, text string) string {
	if c == plain || text == "" {
		return text
	}
	return "\x1b[" + string(c) + "m" + text + "\x1b[0m"
}

// colours says whether w shows them. The console of older Windows has to be told
// to, and is left alone.
func colours(w io.Writer) bool { return os.Getenv("NO_COLOR") == "" && terminal(w) }

func terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && isatty.IsTerminal(f.Fd()) && os.Getenv("TERM") != "dumb" && runtime.GOOS != "windows"
}

// printable escapes what would move the cursor or change a terminal's state:
// names and owners are whatever a client has sent. Lines and tabs stay.
func printable(s string) string {
	harmless := func(r rune) bool { return r != utf8.RuneError && (unicode.IsPrint(r) || r == '\n' || r == '\t') }
	if strings.IndexFunc(s, func(r rune) bool { return !harmless(r) }) < 0 {
		return s
	}
	var out strings.Builder
	for _, r := range s {
		if harmless(r) {
			out.WriteRune(r)
		} else {
			out.WriteString(strings.Trim(strconv.QuoteRuneToASCII(r), "'"))
		}
	}
	return out.String()
}

// print writes what a verb found: as JSON, or as the table that rows makes of it.
func (a *app) print(v any, rows func() *table) error {
	if a.output == "json" {
		lines := json.NewEncoder(a.stdout)
		lines.SetIndent("", "  ")
		lines.SetEscapeHTML(false)
		return lines.Encode(v)
	}
	return rows().print(a.stdout)
}

// brief is a duration as people read it: three figures, and no more.
func brief(d time.Duration) string {
	switch {
	case d < 0:
		return "-" + brief(-d)
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	}
	d = d.Round(time.Second)
	if d >= 24*time.Hour {
		return fmt.Sprintf("%dd%dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
	}
	if d >= time.Hour {
		return fmt.Sprintf("%dh%dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return d.String()
}
