package pglock

import (
	"errors"
	"fmt"
	"strings"
)

// lockQuery is a caller's SELECT, read as far as it takes to tell whether a
// lock clause behind it locks the rows that it returns. What must not be missed
// is what the server lets pass without a word: a clause that locks nothing, and
// one that lands behind another statement. Of what the server refuses, only
// what can't be told from the text is left to it: an aggregate of the user's
// own, a view that groups.
type lockQuery struct {
	sql string
	selection
}

// selection is what a SELECT, or one in a FROM list, turned out to be.
type selection struct {
	locks   bool // its FROM names a table, or a view, somewhere
	ordered bool // it has an ORDER BY
	ties    bool // it ends WITH TIES
	single  bool // its FROM is one name
	from    int  // where that stands
}

// names are those of the WITH queries in reach, whose rows a lock clause on the
// SELECT doesn't reach.
type names map[string]bool

func set(words string) names {
	s := names{}
	for _, w := range strings.Fields(words) {
		s[w] = true
	}
	return s
}

// regroups are words that make a row of the answer something else than a row
// of a table. All are reserved: as a column's name they come quoted, behind a
// dot or behind AS.
var regroups = map[string]string{
	"group": "GROUP BY", "having": "HAVING", "window": "WINDOW",
	"union": "UNION", "intersect": "INTERSECT", "except": "EXCEPT",
}

// PostgreSQL's own, to 18.
var (
	aggregates = set(`any_value array_agg avg bit_and bit_or bit_xor bool_and bool_or corr count covar_pop covar_samp
		cume_dist dense_rank every json_agg json_agg_strict json_arrayagg json_object_agg json_object_agg_strict
		json_object_agg_unique json_object_agg_unique_strict json_objectagg jsonb_agg jsonb_agg_strict jsonb_object_agg
		jsonb_object_agg_strict jsonb_object_agg_unique jsonb_object_agg_unique_strict max min mode percent_rank
		percentile_cont percentile_disc range_agg range_intersect_agg rank regr_avgx regr_avgy regr_count regr_intercept
		regr_r2 regr_slope regr_sxx regr_sxy regr_syy stddev stddev_pop stddev_samp string_agg sum var_pop var_samp
		variance xmlagg`)
	setReturning = set(`aclexplode generate_series generate_subscripts json_array_elements json_array_elements_text
		json_each json_each_text json_object_keys json_populate_recordset json_to_recordset jsonb_array_elements
		jsonb_array_elements_text jsonb_each jsonb_each_text jsonb_object_keys jsonb_path_query jsonb_path_query_tz
		jsonb_populate_recordset jsonb_to_recordset regexp_matches regexp_split_to_table string_to_table ts_debug ts_parse
		ts_stat ts_token_type txid_snapshot_xip unnest`)
)

var (
	errNoSelect   = errors.New("it is not a SELECT")
	errUnbalanced = errors.New("its parentheses don't match")
)

// lockable reads sql and returns what a lock clause can follow.
func lockable(sql string) (lockQuery, error) {
	q := lockQuery{sql: sql}
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
	tokens, err = nest(tokens)
	if err != nil {
		return err
	}
	for i, t := range tokens {
		if t.kind == ';' {
			if i < len(tokens)-1 {
				return errors.New("it is more than one statement")
			}
			q.sql, tokens = q.sql[:t.at], tokens[:i]
		}
	}
	if len(tokens) == 0 || !tokens[0].is("select", "with") {
		return errNoSelect
	}
	q.selection, err = readSelect(tokens, nil)
	if err == nil && !q.locks {
		err = errors.New("its FROM names no table, so that a lock clause would lock nothing")
	}
	return err
}

// readSelect reads a SELECT, and in a FROM list also TABLE, VALUES and another
// pair of parentheses.
func readSelect(ts []token, known names) (s selection, err error) {
	if ts, known, err = readWith(ts, known); err != nil {
		return s, err
	}
	switch {
	case len(ts) > 1 && ts[0].is("table"):
		s.locks, _, err = readItem(ts[1:], known)
	case len(ts) > 0 && ts[0].kind == '(':
		s, err = readSelect(ts[0].inner, known)
	case len(ts) == 0 || !ts[0].is("select", "values"):
		err = errNoSelect
	}
	for i := 1; i < len(ts) && err == nil; i++ {
		if t := ts[i]; t.is("from") && !label(ts, i) && !ts[i-1].is("distinct") { // not IS DISTINCT FROM
			end := fromEnd(ts, i+1)
			s.from = t.at
			s.locks, s.single, err = readFrom(ts[i+1:end], known)
			i = end - 1
			continue
		}
		if err = s.meet(ts, i); err == nil {
			err = meetCall(ts, i)
		}
	}
	return s, err
}

// label reports whether the word at i can only be a column's name.
func label(ts []token, i int) bool {
	return ts[i].kind != word || i > 0 && (ts[i-1].kind == '.' || ts[i-1].is("as"))
}

// meet looks at a token of the SELECT itself, outside all parentheses.
func (s *selection) meet(ts []token, i int) error {
	switch t := ts[i]; {
	case label(ts, i):
	case t.is("for"):
		return errors.New("it has a FOR clause already: the RowLock argument says which lock to take")
	case t.is("into"):
		return errors.New("SELECT INTO makes a table")
	case t.is("distinct") && i == 1:
		return errors.New("with DISTINCT a row of the answer is no row of a table: lock first, then reduce")
	case regroups[t.text] != "":
		return fmt.Errorf("with %s a row of the answer is no row of a table: lock first, then combine", regroups[t.text])
	case t.is("order"):
		s.ordered = true
	case t.is("ties") && ts[i-1].is("with"):
		s.ties = true
	}
	return nil
}

// meetCall looks at a token of an expression for what makes one row of the
// answer out of many rows of a table, or many out of one. It looks into
// parentheses, but not into sub-queries, which do as they like.
func meetCall(ts []token, i int) error {
	t := ts[i]
	if t.kind != '(' && t.kind != '[' {
		over := i+2 < len(ts) && ts[i+2].is("over")
		switch {
		case label(ts, i) || i+1 == len(ts) || ts[i+1].kind != '(' || over:
		case aggregates[t.text]:
			return fmt.Errorf("with the aggregate %s a row of the answer is no row of a table: lock first, then aggregate", t.text)
		case setReturning[t.text]:
			return fmt.Errorf("with %s, which returns a set, a row of the answer is no row of a table: call it in FROM", t.text)
		}
		return nil
	}
	switch {
	case i+1 == len(ts):
	case ts[i+1].is("over"):
		return errors.New("with a window function a row of the answer is no row of a table: lock first, then compute")
	case ts[i+1].is("within", "filter"):
		return errors.New("with an aggregate a row of the answer is no row of a table: lock first, then aggregate")
	}
	if isQuery(t.inner) {
		return nil
	}
	for j := range t.inner {
		if err := meetCall(t.inner, j); err != nil {
			return err
		}
	}
	return nil
}

// isQuery reports whether what stands in parentheses is a query: neither an
// expression nor a join.
func isQuery(ts []token) bool {
	if len(ts) > 0 && ts[0].kind == '(' && isQuery(ts[0].inner) {
		return len(ts) == 1 || ts[1].is("union", "intersect", "except", "order", "limit", "offset", "fetch", "for")
	}
	return len(ts) > 0 && ts[0].is("select", "with", "values", "table")
}

// readWith collects the names of WITH queries and returns what comes behind
// them. It refuses those that write: they run whether or not the rows get
// locked.
func readWith(ts []token, outer names) ([]token, names, error) {
	if len(ts) == 0 || !ts[0].is("with") {
		return ts, outer, nil
	}
	known := names{}
	for name := range outer {
		known[name] = true
	}
	rest := ts[1:]
	if len(rest) > 1 && rest[0].is("recursive") && !rest[1].is("as") {
		rest = rest[1:]
	}
	for len(rest) > 0 {
		known[rest[0].text] = true
		rest = behind(rest, "as")
		for len(rest) > 0 && rest[0].is("not", "materialized") {
			rest = rest[1:]
		}
		if len(rest) == 0 || rest[0].kind != '(' {
			break
		}
		query, _, err := readWith(rest[0].inner, nil)
		if err != nil {
			return nil, nil, err
		}
		if len(query) > 0 && query[0].is("insert", "update", "delete", "merge") {
			return nil, nil, errors.New("a WITH query of it writes: run that as a statement of its own")
		}
		rest = rest[1:]
		if len(rest) > 0 && rest[0].is("search") {
			rest = behind(behind(rest, "set"), "")
		}
		if len(rest) > 0 && rest[0].is("cycle") {
			rest = behind(behind(rest, "using"), "")
		}
		if len(rest) == 0 || rest[0].kind != ',' {
			return rest, known, nil
		}
		rest = rest[1:]
	}
	return nil, nil, errNoSelect
}

// behind returns what comes behind the first such word, or the first token.
func behind(ts []token, w string) []token {
	for i, t := range ts {
		if w == "" || t.is(w) {
			return ts[i+1:]
		}
	}
	return nil
}
