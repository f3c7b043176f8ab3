package main

import (
	"io"
	"os"
	"strings"
	"unicode/utf8"

	"golang.org/x/term"
)

// screen is the size of the terminal that w is; zero where it is none, and text
// need not fit.
func screen(w io.Writer) (columns, lines int) {
	if f, ok := w.(*os.File); ok && terminal(w) {
		if columns, lines, err := term.GetSize(int(f.Fd())); err == nil {
			return columns, lines
		}
		return 80, 24
	}
	return 0, 0
}

// narrowest is how narrow a column gets so that the table fits.
const narrowest = 8

// fit shortens cells of the widest columns until the table is no wider than
// columns, if that can be done: numbers stay whole. Zero is as wide as it is.
func (t *table) fit(columns int) *table {
	if columns == 0 {
		return t
	}
	width, whole, total := make([]int, len(t.head)), make([]bool, len(t.head)), 2*(len(t.head)-1)
	for i, name := range t.head {
		name, number := strings.CutPrefix(name, ">")
		width[i], whole[i] = utf8.RuneCountInString(name), number || name == "KEY" || name == "PID"
		for _, line := range t.lines {
			width[i] = max(width[i], utf8.RuneCountInString(line[i].text))
		}
		total += width[i]
	}
	for ; total > columns; total-- {
		widest := -1
		for i, w := range width {
			if !whole[i] && w > narrowest && (widest < 0 || w > width[widest]) {
				widest = i
			}
		}
		if widest < 0 {
			break
		}
		width[widest]--
	}
	for _, line := range t.lines {
		for i := range line {
			line[i].text = cut(line[i].text, width[i])
		}
	}
	return t
}

// cut leaves out the middle of what has more than most characters: a name's end
// tells as much as its beginning.
func cut(s string, most int) string {
	runes := []rune(s)
	if len(runes) <= most {
		return s
	}
	head := most / 2
	tail := most - 1 - head
	return string(runes[:head]) + "…" + string(runes[len(runes)-tail:])
}

// oneLine has each run of white space as one space.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }
