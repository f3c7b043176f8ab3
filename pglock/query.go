package pglock

import (
	"errors"
	"fmt"
)

// lockQuery reads a caller's SELECT as far as it takes to tell whether a lock
// clause behind it locks the rows that it returns. It is no parser: where it
// can't see the fault (an aggregate of the user's own, a view that groups) the
// server refuses. What it must see is what the server lets pass without a word:
// a clause that locks nothing, and one that lands behind another statement.
type lockQuery struct {
	sql     string
	ordered bool // has an ORDER BY of its own, not one in a sub-select

	prev, next token
	subs       []bool // for each open parenthesis: does it hold, or stand in, a sub-query
	ctes       map[string]bool
	with       bool // still in the WITH queries before the SELECT

	from   bool   // in the FROM list
	item   bool   // the next token begins an item of it
	name   string // the item's, until the token behind it shows whether it is a function
	dotted bool
	locks  bool // some item has rows to lock
}

// regroups are words that make a row of the answer something else than a row
// of a table. All are reserved: as a column's name they come quoted, behind a
// dot or behind AS.
var regroups = map[string]string{
	"group": "GROUP BY", "having": "HAVING", "window": "WINDOW",
	"union": "UNION", "intersect": "INTERSECT", "except": "EXCEPT",
}

// aggregates are the ones seen before the server sees them.
var aggregates = map[string]bool{
	"count": true, "sum": true, "avg": true, "min": true, "max": true,
	"array_agg": true, "string_agg": true, "bool_and": true, "bool_or": true, "every": true,
	"json_agg": true, "jsonb_agg": true, "json_object_agg": true, "jsonb_object_agg": true,
}

// lockable reads sql and returns what a lock clause can follow.
func lockable(sql string) (lockQuery, error) {
	q := lockQuery{sql: sql, ctes: map[string]bool{}}
	if err := q.read(); err != nil {
		return lockQuery{}, fmt.Errorf("pglock: can't lock the rows of %.80q: %w", sql, err)
	}
	return q, nil
}

func (q *lockQuery) read() error {
	tokens, err := lex(q.sql)
	if err != nil {
		return err
	}
	if len(tokens) == 0 || !tokens[0].is("select", "with") {
		return errNoSelect
	}
	q.with = tokens[0].is("with")
	for i, t := range tokens[1:] {
		q.prev, q.next = tokens[i], token{}
		if i+2 < len(tokens) {
			q.next = tokens[i+2]
		}
		if t.kind == ';' {
			if q.next.kind != 0 {
				return errors.New("it is more than one statement")
			}
			q.sql = q.sql[:t.at]
			break
		}
		if err := q.meet(t); err != nil {
			return err
		}
	}
	q.lookFrom(token{})
	switch {
	case len(q.subs) > 0:
		return errUnbalanced
	case q.with:
		return errNoSelect
	case !q.locks:
		return errors.New("its FROM names no table, so that a lock clause would lock nothing")
	}
	return nil
}

var (
	errNoSelect   = errors.New("it is not a SELECT")
	errUnbalanced = errors.New("its parentheses don't match")
)

func (q *lockQuery) meet(t token) error {
	depth := len(q.subs)
	inSub := depth > 0 && q.subs[depth-1]
	switch {
	case t.kind == ')' || t.kind == ']':
		if depth == 0 {
			return errUnbalanced
		}
		q.subs = q.subs[:depth-1]
		return nil
	case q.with:
		if err := q.meetWith(t, depth); err != nil {
			return err
		}
	case depth == 0:
		q.lookFrom(t)
		if err := q.meetClause(t); err != nil {
			return err
		}
	}
	if t.kind == '(' || t.kind == '[' {
		q.subs = append(q.subs, inSub || q.with || q.next.is("select", "with", "values", "table"))
		return nil
	}
	if inSub || q.with || q.label() {
		return nil
	}
	switch {
	case q.next.kind == '(' && t.kind == word && aggregates[t.text]:
		return fmt.Errorf("with the aggregate %s a row of the answer is no row of a table: lock first, then aggregate", t.text)
	case t.is("over") && q.prev.kind == ')':
		return errors.New("with a window function a row of the answer is no row of a table: lock first, then compute")
	}
	return nil
}

// label reports whether a word here can only be a column's name.
func (q *lockQuery) label() bool { return q.prev.kind == '.' || q.prev.is("as") }

// meetWith collects the names of WITH queries, whose rows a lock clause on the
// SELECT doesn't reach, and refuses those that write: they run whether or not
// the rows get locked.
func (q *lockQuery) meetWith(t token, depth int) error {
	writes := t.is("insert", "update", "delete", "merge")
	switch {
	case depth == 0 && (q.prev.kind == ',' || q.prev.is("with", "recursive")) && !t.is("recursive"):
		q.ctes[t.text] = true
	case depth == 0 && t.is("select"):
		q.with = false
	case depth == 0 && (writes || t.is("values", "table")):
		return errNoSelect
	case depth == 1 && writes && (q.prev.kind == '(' || q.prev.kind == ')'):
		return errors.New("a WITH query of it writes: run that as a statement of its own")
	}
	return nil
}

// meetClause looks at a token of the SELECT itself, outside all parentheses.
func (q *lockQuery) meetClause(t token) error {
	switch {
	case t.kind != word || q.label():
	case t.is("for"):
		return errors.New("it has a FOR clause already: the RowLock argument says which lock to take")
	case t.is("into"):
		return errors.New("SELECT INTO makes a table")
	case t.is("distinct") && q.prev.is("select"):
		return errors.New("with DISTINCT a row of the answer is no row of a table: lock first, then reduce")
	case regroups[t.text] != "":
		return fmt.Errorf("with %s a row of the answer is no row of a table: lock first, then combine", regroups[t.text])
	case t.is("from") && !q.prev.is("distinct"): // not IS DISTINCT FROM
		q.from, q.item = true, true
	case t.is("join"):
		q.item = true
	case t.is("where", "order", "limit", "offset", "fetch"):
		q.from = false
		q.ordered = q.ordered || t.is("order")
	}
	return nil
}

// lookFrom notes whether the FROM list names a table, a view or a sub-select:
// functions, VALUES and WITH queries have no rows to lock.
func (q *lockQuery) lookFrom(t token) {
	if q.name != "" {
		switch {
		case t.kind == '.':
			q.dotted = true
			return
		case q.prev.kind == '.':
			return
		case t.kind != '(':
			q.locks = q.locks || q.dotted || !q.ctes[q.name]
		}
		q.name, q.dotted = "", false
	}
	switch {
	case !q.item:
		q.item = q.from && t.kind == ','
	case t.is("only", "lateral"):
	case t.kind == word || t.kind == quoted:
		q.name, q.item = t.text, false
	default:
		q.locks = q.locks || t.kind == '(' && !q.next.is("values")
		q.item = false
	}
}
