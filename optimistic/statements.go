package optimistic

import (
	"fmt"
	"reflect"
	"strings"

	"github.com/jackc/pgx/v5"
)

// statements is the SQL of one Table, and the names it was made from.
type statements struct {
	from    string   // the table, quoted
	keys    []string // unquoted
	version string   // unquoted
	live    string   // the live-row predicate in parentheses, "" for none

	selectSQL, lockSQL, insertSQL, insertNewSQL, updateSQL, touchSQL, deleteSQL string
}

// prepare checks the description and writes the statements.
func (t *Table[T]) prepare(o options) error {
	table, err := parseTableName(t.name)
	if err != nil {
		return err
	}
	if err := o.check(); err != nil {
		return err
	}
	t.from, t.keys, t.version = table.Sanitize(), o.keys, o.version
	if o.live != nil {
		t.live = "(" + *o.live + ")"
	}
	if t.columns, err = columnsOf(reflect.TypeFor[T]()); err != nil {
		return err
	}
	var list, assign, names, values []string
	for _, c := range t.columns {
		list = append(list, quote(c.name))
		if c.name == o.version {
			// Found only when a row comes back, a smaller type would make a
			// failure of a write that was done.
			if f := reflect.TypeFor[T]().FieldByIndex(c.path); f.Type.Kind() != reflect.Int64 {
				return fmt.Errorf("field %s for version column %q is %v: it has to be int64", f.Name, c.name, f.Type)
			}
			continue
		}
		if c.readOnly || o.isKey(c.name) {
			continue
		}
		t.set = append(t.set, c)
		names = append(names, quote(c.name))
		assign = append(assign, fmt.Sprintf("%s = $%d, ", quote(c.name), len(o.keys)+1+len(t.set)))
		values = append(values, fmt.Sprintf("$%d", len(t.set)))
	}
	version, row := quote(o.version), strings.Join(append(list, quote(o.version)), ", ")
	match, and := t.match(), ""
	if t.live != "" {
		and = " AND " + t.live
	}
	compare := fmt.Sprintf("%s AND %s = $%d%s", match, version, len(o.keys)+1, and)
	change := func(assign string) string {
		return fmt.Sprintf("UPDATE %s SET %s%s = %s + 1 WHERE %s RETURNING %s", t.from, assign, version, version, compare, row)
	}
	t.selectSQL = fmt.Sprintf("SELECT %s FROM %s WHERE %s%s", row, t.from, match, and)
	t.lockSQL = t.selectSQL + " FOR NO KEY UPDATE"
	t.updateSQL = change(strings.Join(assign, ""))
	t.touchSQL = change("")
	t.deleteSQL = fmt.Sprintf("DELETE FROM %s WHERE %s", t.from, compare)

	// A new row's version is written here and not left to the column's default,
	// which in most tables is a constant: delete, insert, and a version from
	// before the delete would fit again. A sequence that counts by ones has the
	// same fault, because versions count by ones too and run ahead of it. The
	// clock in microseconds is ahead of any version whose row began at a clock
	// or a constant and was updated less than once a microsecond.
	//
	// The predicate behind ON CONFLICT lets a unique index serve that holds live
	// rows only; an index without a predicate serves all the same.
	arbiter := "(" + quoteAll(o.keys) + ")"
	if t.live != "" {
		arbiter += " WHERE " + t.live
	}
	insert := func(names, values []string) string {
		return fmt.Sprintf("INSERT INTO %s (%s) VALUES (%s) ON CONFLICT %s DO NOTHING RETURNING %s",
			t.from, strings.Join(append(names, version), ", "),
			strings.Join(append(values, "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"), ", "), arbiter, row)
	}
	t.insertNewSQL = insert(names, values)
	for i, key := range o.keys {
		names, values = append(names, quote(key)), append(values, fmt.Sprintf("$%d", len(t.set)+1+i))
	}
	t.insertSQL = insert(names, values)
	return nil
}

// match is the condition on the key, whose parts are the first parameters.
func (s *statements) match() string {
	var parts []string
	for i, key := range s.keys {
		parts = append(parts, fmt.Sprintf("%s = $%d", quote(key), i+1))
	}
	return strings.Join(parts, " AND ")
}

// quote makes one SQL identifier of a column's name.
func quote(name string) string { return pgx.Identifier{name}.Sanitize() }

func quoteAll(names []string) string {
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = quote(name)
	}
	return strings.Join(quoted, ", ")
}
