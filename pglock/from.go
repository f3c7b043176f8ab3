package pglock

import "errors"

// constants are functions that are called without parentheses.
var constants = set(`current_catalog current_date current_role current_schema current_time current_timestamp current_user
	localtime localtimestamp session_user system_user user`)

// fromEnd returns where the FROM list ends that begins at i.
func fromEnd(ts []token, i int) int {
	for i < len(ts) && !ts[i].is("where", "group", "having", "window", "union", "intersect", "except",
		"order", "limit", "offset", "fetch", "for", "into") {
		i++
	}
	return i
}

// readFrom reports whether a FROM list names a table, a view or a sub-select
// that does: functions, VALUES and WITH queries have no rows to lock. single
// reports whether it is one name and nothing else.
func readFrom(ts []token, known names) (locks, single bool, err error) {
	items := split(ts, func(t token) bool { return t.kind == ',' })
	for _, item := range items {
		parts := split(item, func(t token) bool { return t.is("join") })
		found := false
		for i, part := range parts {
			here, name, err := readItem(part, known)
			if err != nil {
				return false, false, err
			}
			if i > 0 && (found && joins(parts[i-1], "right", "full") || here && joins(parts[i-1], "left", "full")) {
				return false, false, errors.New("an outer join makes rows up where a table has none: lock that table's rows in a query of their own")
			}
			found = found || here
			single = name && len(parts) == 1 && len(items) == 1
		}
		locks = locks || found
	}
	return locks, single, nil
}

// readItem reads the table, function or sub-select that ts begins with.
func readItem(ts []token, known names) (locks, name bool, err error) {
	only := false
	for len(ts) > 0 && ts[0].is("only", "lateral") {
		only = only || ts[0].is("only")
		ts = ts[1:]
	}
	switch {
	case len(ts) == 0:
		return false, false, nil // the server has something to say
	case ts[0].kind == '(' && only:
		return readItem(ts[0].inner, known)
	case ts[0].kind == '(' && isQuery(ts[0].inner):
		s, err := readSelect(ts[0].inner, known)
		return s.locks, false, err
	case ts[0].kind == '(':
		locks, _, err = readFrom(ts[0].inner, known)
		return locks, false, err
	case len(ts) > 1 && ts[0].is("rows") && ts[1].is("from"):
		return false, false, nil
	}
	end := 1
	for end+1 < len(ts) && ts[end].kind == '.' {
		end += 2
	}
	called := end < len(ts) && ts[end].kind == '(' || ts[0].kind == word && constants[ts[0].text]
	queried := end == 1 && known[ts[0].text]
	return !called && !queried, !called && !queried, nil
}

// joins reports whether what stands before JOIN makes it one of the kinds.
func joins(ts []token, kinds ...string) bool {
	if len(ts) > 0 && ts[len(ts)-1].is("outer") {
		ts = ts[:len(ts)-1]
	}
	return len(ts) > 0 && ts[len(ts)-1].is(kinds...)
}

func split(ts []token, at func(token) bool) (parts [][]token) {
	from := 0
	for i, t := range ts {
		if at(t) {
			parts = append(parts, ts[from:i])
			from = i + 1
		}
	}
	return append(parts, ts[from:])
}
