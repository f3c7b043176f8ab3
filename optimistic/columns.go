package optimistic

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

// A column is one field of T and where it is stored.
type column struct {
	name     string
	path     []int // for reflect's FieldByIndex
	readOnly bool  // never written
}

// columnsOf lists the columns of a struct in the order of its fields, by the
// rules of pgx.RowToStructByName: exported fields, embedded structs flattened,
// db:"-" left out. Where pgx matches an untagged field to whatever the query
// returned, this has to write the query, so it settles on snake case.
func columnsOf(t reflect.Type) ([]column, error) {
	if t.Kind() != reflect.Struct {
		return nil, fmt.Errorf("%v is not a struct: its fields name the columns", t)
	}
	columns, err := appendColumns(nil, t, nil)
	if err != nil {
		return nil, err
	}
	if len(columns) == 0 {
		return nil, fmt.Errorf("%v has no exported field: its fields name the columns", t)
	}
	seen := map[string]bool{}
	for _, c := range columns {
		if seen[c.name] {
			return nil, fmt.Errorf(`two fields of %v are column %q: tag one of them db:"-"`, t, c.name)
		}
		seen[c.name] = true
	}
	return columns, nil
}

func appendColumns(columns []column, t reflect.Type, path []int) ([]column, error) {
	for i := range t.NumField() {
		f := t.Field(i)
		path := append(slices.Clone(path), i)
		if f.Anonymous && f.Type.Kind() == reflect.Struct {
			var err error
			if columns, err = appendColumns(columns, f.Type, path); err != nil {
				return nil, err
			}
			continue
		}
		tag, tagged := f.Tag.Lookup("db")
		name, more, _ := strings.Cut(tag, ",")
		if !f.IsExported() || name == "-" {
			continue
		}
		if !tagged {
			name = snakeCase(f.Name)
		}
		if err := checkIdentifier(name); err != nil {
			return nil, fmt.Errorf("field %s of %v: column %w", f.Name, t, err)
		}
		columns = append(columns, column{name: name, path: path, readOnly: slices.Contains(strings.Split(more, ","), "readonly")})
	}
	return columns, nil
}

// snakeCase turns a Go field name into the column name that it most likely
// stands for: UserID is user_id, HTTPStatus is http_status.
func snakeCase(s string) string {
	var b strings.Builder
	runes := []rune(s)
	for i, r := range runes {
		if unicode.IsUpper(r) && i > 0 && runes[i-1] != '_' {
			afterLower := !unicode.IsUpper(runes[i-1])
			beforeLower := i+1 < len(runes) && unicode.IsLower(runes[i+1])
			if afterLower || beforeLower {
				b.WriteByte('_')
			}
		}
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}

// parseTableName splits table, schema.table and "Quo.ted"."Ta""ble" into their
// parts, and keeps the case of all of them.
func parseTableName(s string) (pgx.Identifier, error) {
	var parts pgx.Identifier
	rest := s
	for {
		part, quoted := "", strings.HasPrefix(rest, `"`)
		if quoted {
			var closed bool
			if part, rest, closed = cutQuoted(rest[1:]); !closed {
				return nil, fmt.Errorf("table name %q: a quote is not closed", s)
			}
		} else if i := strings.IndexAny(rest, `."`); i >= 0 {
			part, rest = rest[:i], rest[i:]
		} else {
			part, rest = rest, ""
		}
		if err := checkIdentifier(part); err != nil {
			return nil, fmt.Errorf("table name %q: part %w", s, err)
		}
		parts = append(parts, part)
		if rest == "" {
			break
		}
		if rest[0] != '.' {
			return nil, fmt.Errorf(`table name %q: quote a whole part, with "" for a quote inside it`, s)
		}
		rest = rest[1:]
	}
	if len(parts) > 2 {
		return nil, fmt.Errorf("table name %q has %d parts: write table or schema.table, and quote a part that has a dot in it", s, len(parts))
	}
	return parts, nil
}

// cutQuoted takes what stands before the closing quote of s.
func cutQuoted(s string) (part, rest string, closed bool) {
	var b strings.Builder
	for {
		before, after, ok := strings.Cut(s, `"`)
		if b.WriteString(before); !ok {
			return "", "", false
		}
		if !strings.HasPrefix(after, `"`) {
			return b.String(), after, true
		}
		b.WriteByte('"')
		s = after[1:]
	}
}

// checkIdentifier refuses what PostgreSQL can't store as a name, or stores as
// another one: it cuts long names off with no more than a notice.
func checkIdentifier(s string) error {
	const most = 63
	switch {
	case s == "":
		return fmt.Errorf("%q is empty", s)
	case len(s) > most:
		return fmt.Errorf("%q is %d bytes long: PostgreSQL keeps %d", s, len(s), most)
	case !utf8.ValidString(s) || strings.ContainsRune(s, 0):
		return fmt.Errorf("%q is not valid UTF-8 without NUL", s)
	}
	return nil
}
