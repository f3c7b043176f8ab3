package optimistic

import (
	"fmt"
	"math/bits"
	"strconv"
	"strings"
)

// manySQL writes the statement. Its changes are a VALUES list and not arrays:
// unnest would need the name of each column's type and flattens a column that
// is an array itself. The list's first row, which is never used, gives the
// parameters the types of the columns. Its length is rounded up to a power of
// two, so that batches of any size make a handful of prepared statements.
//
// Locked first, in a CTE that the UPDATE has to wait for (it counts what fits),
// the rows are changed under the locks in whatever order the join likes: with
// the ORDER BY inside the UPDATE's own sub-query the join would be free to
// reorder it. FOR NO KEY UPDATE returns each row as it is once the lock is held,
// and so compares with the newest version where the snapshot has an old one.
func (t *Table[T]) manySQL(changes []Change[T], o manyOptions) (string, []any) {
	width := t.width()
	size := 1 << bits.Len(uint(len(changes)-1))
	if 1+size*width > maxParameters {
		size = len(changes)
	}
	least := len(changes)
	if o.partial {
		least = 0
	}
	args := make([]any, 1, 1+size*width)
	args[0] = least
	for _, c := range changes {
		args = append(args, t.args(c.Key)...)
		args = t.values(append(args, c.Version), &c.Value)
	}
	args = append(args, make([]any, 1+size*width-len(args))...)

	names := make([]string, 0, width) // of the columns of a change
	var keys, keyMatch, lockMatch, assign, now []string
	for i, key := range t.keys {
		k := "k" + strconv.Itoa(i)
		names = append(names, key)
		keys = append(keys, k)
		keyMatch = append(keyMatch, fmt.Sprintf("t.%s = f.%s", quote(key), k))
		lockMatch = append(lockMatch, fmt.Sprintf("l.%s = c.%s", k, k))
	}
	names = append(names, t.version)
	columns := append(append([]string{"n"}, keys...), "v")
	for i, c := range t.set {
		names = append(names, c.name)
		columns = append(columns, "c"+strconv.Itoa(i))
		assign = append(assign, fmt.Sprintf("%s = f.c%d, ", quote(c.name), i))
	}
	row := func(table string) string {
		var list []string
		for i, c := range t.columns {
			list = append(list, fmt.Sprintf("%s%s AS r%d", table, quote(c.name), i))
		}
		return strings.Join(append(list, table+quote(t.version)+" AS r"), ", ")
	}
	for i := range len(t.columns) {
		now = append(now, fmt.Sprintf("CASE WHEN u.n IS NULL THEN l.r%d ELSE u.r%d END", i, i))
	}
	now = append(now, "CASE WHEN u.n IS NULL THEN l.r ELSE u.r END")
	live := ""
	if t.live != "" {
		live = " AND " + t.live
	}
	var lockKeys []string
	for i, key := range t.keys {
		lockKeys = append(lockKeys, fmt.Sprintf("%s AS k%d", quote(key), i))
	}
	version := quote(t.version)

	var b strings.Builder
	b.WriteString("WITH changes AS MATERIALIZED (SELECT * FROM (VALUES (0")
	for _, name := range names {
		fmt.Fprintf(&b, ", (SELECT %s FROM %s LIMIT 0)", quote(name), t.from)
	}
	b.WriteString(")")
	for n, p := 1, 2; n <= size; n++ {
		fmt.Fprintf(&b, ", (%d", n)
		for range width {
			b.WriteString(", $")
			b.WriteString(strconv.Itoa(p))
			p++
		}
		b.WriteString(")")
	}
	list := strings.Join(keys, ", ")
	fmt.Fprintf(&b, `) AS list (%s) WHERE n > 0 AND v IS NOT NULL),
locked AS MATERIALIZED (SELECT %s, %s FROM %s
	WHERE (%s) IN (SELECT %s FROM changes)%s ORDER BY %s FOR NO KEY UPDATE),
fit AS MATERIALIZED (SELECT c.* FROM changes c JOIN locked l ON %s AND l.r = c.v),
written AS (UPDATE %s AS t SET %s%s = t.%s + 1 FROM fit f
	WHERE %s AND t.%s = f.v AND (SELECT count(*) FROM fit) >= $1::bigint RETURNING f.n, %s),
vetoed AS (SELECT string_agg(n::text, ',') AS list FROM fit WHERE n NOT IN (SELECT n FROM written)
	HAVING $1::bigint > 0 AND (SELECT count(*) FROM fit) >= $1::bigint)
SELECT c.n, u.n IS NOT NULL, l.k0 IS NOT NULL, %s
FROM changes c LEFT JOIN locked l ON %s LEFT JOIN written u ON u.n = c.n
WHERE (SELECT '%s' || list FROM vetoed)::int IS NULL`,
		strings.Join(columns, ", "),
		strings.Join(lockKeys, ", "), row(""), t.from,
		quoteAll(t.keys), list, live, quoteAll(t.keys),
		strings.Join(lockMatch, " AND "),
		t.from, strings.Join(assign, ""), version, version,
		strings.Join(keyMatch, " AND "), version, row("t."),
		strings.Join(now, ", "), strings.Join(lockMatch, " AND "), vetoMark)
	return b.String(), args
}

// vetoMark makes the text that is no number, and so fails the statement, tell
// which rows were vetoed.
const vetoMark = "pawl: vetoed "
