package pglock

import (
	"errors"
	"strings"
)

// token is a piece of SQL as PostgreSQL's scanner cuts it (manual, 4.1 Lexical
// Structure). kind is word, quoted, literal, or the character itself.
type token struct {
	kind  byte
	text  string // a word in lower case, a quoted name without its quotes
	at    int
	inner []token // of an opening parenthesis or bracket: what it holds
}

const (
	word    = 'w' // a keyword or a plain identifier
	quoted  = 'q' // a quoted identifier
	literal = 'l' // a string, a number or a parameter
)

// is reports whether t is one of the words: a quoted "for" is none.
func (t token) is(words ...string) bool {
	if t.kind == word {
		for _, w := range words {
			if t.text == w {
				return true
			}
		}
	}
	return false
}

// lex cuts sql into tokens and leaves out space and comments. It takes
// standard_conforming_strings as on, its default since 2011.
func lex(sql string) ([]token, error) {
	var tokens []token
	for at := 0; at < len(sql); {
		c, rest := sql[at], sql[at:]
		t := token{kind: literal, at: at}
		n := 1
		switch {
		case isSpace(c):
			at++
			continue
		case strings.HasPrefix(rest, "--"):
			at += lineComment(rest)
			continue
		case strings.HasPrefix(rest, "/*"):
			if n = blockComment(rest); n < 0 {
				return nil, errors.New("a comment in it doesn't end")
			}
			at += n
			continue
		case c == '\'':
			n = closing(rest, 1, '\'', false)
		case (c == 'e' || c == 'E') && strings.HasPrefix(rest[1:], "'"):
			n = escapeString(rest)
		case c == '"':
			if n = closing(rest, 1, '"', false); n > 0 {
				t.kind, t.text = quoted, strings.ReplaceAll(rest[1:n-1], `""`, `"`)
			}
		case c == '$' && dollarTag(rest) > 0:
			tag := rest[:dollarTag(rest)]
			if n = strings.Index(rest[len(tag):], tag); n >= 0 {
				n += 2 * len(tag)
			}
		case isLetter(c):
			n = span(rest, func(c byte) bool { return isLetter(c) || isDigit(c) || c == '$' })
			t.kind, t.text = word, fold(rest[:n])
			if t.text == "u" && strings.HasPrefix(rest[n:], `&"`) {
				return nil, errors.New(`a name in it is written U&"…": write it out`)
			}
		case isDigit(c):
			n = span(rest, isDigit)
		case c == '$':
			n = 1 + span(rest[1:], isDigit)
		default:
			t.kind = c
		}
		if n < 0 {
			return nil, errors.New("a quotation in it doesn't end")
		}
		tokens = append(tokens, t)
		at += n
	}
	return tokens, nil
}

// nest puts what stands in parentheses and brackets into the tokens that open
// them, and leaves out those that close them.
func nest(tokens []token) ([]token, error) {
	levels := [][]token{nil}
	for _, t := range tokens {
		last := len(levels) - 1
		switch t.kind {
		case '(', '[':
			levels[last] = append(levels[last], t)
			levels = append(levels, nil)
		case ')', ']':
			if last == 0 {
				return nil, errUnbalanced
			}
			outer := levels[last-1]
			opening := &outer[len(outer)-1]
			if (opening.kind == '(') != (t.kind == ')') {
				return nil, errUnbalanced
			}
			opening.inner, levels = levels[last], levels[:last]
		default:
			levels[last] = append(levels[last], t)
		}
	}
	if len(levels) > 1 {
		return nil, errUnbalanced
	}
	return levels[0], nil
}

// fold turns a name to lower case as the server does, letters beyond ASCII not.
func fold(name string) string {
	b := []byte(name)
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}

// closing returns the length of s up to and with the quote that ends what was
// opened before from, or -1. A doubled quote ends nothing.
func closing(s string, from int, quote byte, escapes bool) int {
	for i := from; i < len(s); i++ {
		switch {
		case escapes && s[i] == '\\':
			i++
		case s[i] != quote:
		case i+1 < len(s) && s[i+1] == quote:
			i++
		default:
			return i + 1
		}
	}
	return -1
}

// escapeString returns the length of an E'...' string, or -1. One that goes on
// after a line break, and comments, keeps reading backslashes as escapes.
func escapeString(s string) int {
	for n := 2; ; {
		if n = closing(s, n, '\'', true); n < 0 {
			return n
		}
		gap := span(s[n:], isSpace)
		for strings.HasPrefix(s[n+gap:], "--") {
			gap += lineComment(s[n+gap:])
			gap += span(s[n+gap:], isSpace)
		}
		if !strings.HasPrefix(s[n+gap:], "'") || !strings.ContainsAny(s[n:n+gap], "\n\r") {
			return n
		}
		n += gap + 1
	}
}

func lineComment(s string) int {
	if i := strings.IndexAny(s, "\n\r"); i >= 0 {
		return i
	}
	return len(s)
}

// blockComment returns the length of a comment, which may hold others, or -1.
func blockComment(s string) int {
	depth := 0
	for i := 0; i+1 < len(s); i++ {
		switch s[i : i+2] {
		case "/*":
			depth++
			i++
		case "*/":
			depth--
			i++
			if depth == 0 {
				return i + 1
			}
		}
	}
	return -1
}

// dollarTag returns the length of the $tag$ that s begins with, or 0.
func dollarTag(s string) int {
	n := 1 + span(s[1:], func(c byte) bool { return isLetter(c) || isDigit(c) })
	if n < len(s) && s[n] == '$' && !isDigit(s[1]) {
		return n + 1
	}
	return 0
}

func span(s string, in func(byte) bool) int {
	n := 0
	for n < len(s) && in(s[n]) {
		n++
	}
	return n
}

func isSpace(c byte) bool { return c == ' ' || '\t' <= c && c <= '\r' }
func isDigit(c byte) bool { return '0' <= c && c <= '9' }
func isLetter(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || c == '_' || c >= 0x80
}
