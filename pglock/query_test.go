package pglock_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pawl-go/pawl/pglock"
)

// recorder is a transaction that keeps the SQL and runs none.
type recorder struct {
	pgx.Tx
	sql string
}

var errRecorded = errors.New("recorded")

func (r *recorder) Query(_ context.Context, sql string, _ ...any) (pgx.Rows, error) {
	r.sql = sql
	return nil, errRecorded
}

// saving is a recorder that takes savepoints.
type saving struct{ recorder }

func (*saving) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, nil
}

// lockedSQL returns what LockRows sends for a query, or its refusal.
func lockedSQL(how pglock.RowLock, sql string) (string, error) {
	tx := &saving{}
	_, err := pglock.LockRows(context.Background(), tx, how, pgx.RowTo[int], sql)
	if errors.Is(err, errRecorded) {
		return tx.sql, nil
	}
	return tx.sql, err
}

// The library adds a clause to a SELECT, where it has an effect, and to nothing
// else.
func TestLockRows_R02_Clause(t *testing.T) {
	t.Parallel()
	const sql = "SELECT id FROM t ORDER BY id"
	for how, clause := range map[pglock.RowLock]string{
		{}:                                 "FOR NO KEY UPDATE",
		pglock.ForNoKeyUpdate:              "FOR NO KEY UPDATE",
		pglock.ForUpdate:                   "FOR UPDATE",
		pglock.ForShare:                    "FOR SHARE",
		pglock.ForKeyShare:                 "FOR KEY SHARE",
		pglock.ForUpdate.NoWait():          "FOR UPDATE NOWAIT",
		pglock.ForKeyShare.SkipLocked():    "FOR KEY SHARE SKIP LOCKED",
		pglock.ForShare.NoWait().NoWait():  "FOR SHARE NOWAIT",
		pglock.ForNoKeyUpdate.SkipLocked(): "FOR NO KEY UPDATE SKIP LOCKED",
	} {
		got, err := lockedSQL(how, sql)
		if err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(sql+"\n"+clause, got); diff != "" {
			t.Error(diff)
		}
	}
	if got := pglock.ForUpdate.NoWait().SkipLocked(); got != pglock.ForUpdate.SkipLocked() {
		t.Errorf("NoWait().SkipLocked() is %v", got)
	}
	if got := pglock.ForUpdate.SkipLocked().NoWait(); got != pglock.ForUpdate.NoWait() {
		t.Errorf("SkipLocked().NoWait() is %v", got)
	}
}

// Each of these is sound, however much it looks like what is not.
func TestLockRows_Accepted(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{
		"select * from t order by id",
		"SELECT * FROM s.t ORDER BY id LIMIT 3",
		"SELECT 'GROUP BY', ' it''s UNION' FROM t ORDER BY 1",
		`SELECT e'\' UNION SELECT \'' FROM t ORDER BY 1`,
		"SELECT e'a'\n  '\\' union ' FROM t ORDER BY 1",
		`SELECT '\' FROM t ORDER BY 1 -- '`,
		"SELECT $$ FOR UPDATE; $$, $a$ $$ UNION $a$, $1 FROM t ORDER BY id",
		"SELECT a$b$c, d$b$ FROM t ORDER BY a$b$c",
		`SELECT "for", "group by" AS union, t.having FROM t ORDER BY "for"`,
		`SELECT "a""for" FROM "T" ORDER BY 1`,
		"SELECT id /* UNION /* nested */ GROUP BY */ FROM t -- HAVING\nORDER BY id",
		"SELECT id FROM t ORDER BY id -- the oldest first",
		"SELECT id FROM t ORDER BY id /* the oldest first */",
		"SELECT substring(name FOR 3) FROM t ORDER BY id",
		"SELECT id FROM t WHERE a IS DISTINCT FROM b AND c IS NOT DISTINCT FROM d ORDER BY id",
		"SELECT id FROM t WHERE n = (SELECT max(n) FROM u GROUP BY k) ORDER BY id",
		"SELECT (SELECT count(*) OVER () FROM u), id FROM t ORDER BY id",
		"SELECT id FROM t WHERE id IN (SELECT 1 UNION SELECT 2) ORDER BY id",
		"SELECT id FROM t WHERE tags @> ARRAY[(SELECT count(*) FROM u)] ORDER BY id",
		"SELECT * FROM (SELECT * FROM t WHERE a > 0) s ORDER BY id",
		"SELECT t.* FROM unnest($1::int[]) AS x(id) JOIN t USING (id) ORDER BY t.id",
		"SELECT * FROM generate_series(1, 3) g, ONLY t ORDER BY t.id",
		"WITH x AS (SELECT id FROM u) SELECT t.* FROM x JOIN t USING (id) ORDER BY t.id",
		"WITH RECURSIVE x(id, update) AS (SELECT 1, 2 UNION SELECT 3, 4), y AS NOT MATERIALIZED (SELECT 2) SELECT * FROM x, t ORDER BY t.id",
		"WITH x AS (SELECT 1) SELECT * FROM s.x ORDER BY 1",
		"SELECT count, sum, over FROM t ORDER BY count",
		"SELECT my.count(id) FROM t ORDER BY id",
		"SELECT id FROM (SELECT *, (SELECT max(n) FROM u) FROM t LIMIT 3) s ORDER BY id",
		"SELECT id FROM (TABLE t) s ORDER BY id",
		"SELECT id FROM ((SELECT id FROM t) ORDER BY id LIMIT 3) s ORDER BY id",
		"SELECT id FROM (WITH x AS (SELECT 1) SELECT t.* FROM x, t) s ORDER BY id",
		"SELECT t.id FROM ((SELECT 1) a CROSS JOIN t) ORDER BY 1",
		"SELECT t.id FROM ONLY (t) ORDER BY id",
		"SELECT t.id FROM t TABLESAMPLE SYSTEM (10) REPEATABLE (1) ORDER BY id",
		"SELECT t.id FROM t LEFT JOIN unnest($1::int[]) AS x (id) USING (id) ORDER BY 1",
		"SELECT t.id FROM unnest($1::int[]) AS x (id) RIGHT OUTER JOIN t USING (id) ORDER BY 1",
		"SELECT t.id FROM t JOIN u ON left(t.a, 3) = right(u.a, 3) ORDER BY 1",
		"WITH x AS (SELECT 1) SELECT t.id FROM t LEFT JOIN x ON true ORDER BY 1",
		"WITH RECURSIVE x AS (SELECT 1 AS a, 2 AS b) SEARCH DEPTH FIRST BY a, b SET ord CYCLE a SET hit USING path, y AS (SELECT 2) SELECT b.id FROM b, x, y ORDER BY 1",
		"WITH recursive AS (SELECT 1) SELECT t.id FROM t, recursive ORDER BY 1",
		`WITH "Ä" AS (SELECT 1) SELECT * FROM ä ORDER BY 1`,
		"SELECT ALL id FROM t ORDER BY id USING > OFFSET 1 ROW FETCH FIRST ROW ONLY",
		"SELECT id FROM t ORDER BY a FETCH FIRST 3 ROWS WITH TIES",
		"SELECT id FROM t WHERE a IN ((SELECT 1) UNION (SELECT count(*) FROM u)) ORDER BY id",
		"SELECT id, CASE WHEN a > 0 THEN 1 END, t.tags[1], row(1, 2), my.unnest(a) FROM t ORDER BY id",
		"SELECT e'a' -- with a comment\n '\\' union ' FROM t ORDER BY 1",
		"SELECT rows.id FROM rows ORDER BY 1",
	} {
		got, err := lockedSQL(pglock.ForUpdate, sql)
		if err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(sql+"\nFOR UPDATE", got); diff != "" {
			t.Errorf("%s: %s", sql, diff)
		}
	}
}

func TestLockRows_Semicolon(t *testing.T) {
	t.Parallel()
	got, err := lockedSQL(pglock.ForShare, "SELECT ';' FROM t ORDER BY id; -- done\n")
	if err != nil {
		t.Error(err)
	}
	if diff := cmp.Diff("SELECT ';' FROM t ORDER BY id\nFOR SHARE", got); diff != "" {
		t.Error(diff)
	}
}

func TestLockRows_R02_Refused(t *testing.T) {
	t.Parallel()
	for sql, why := range map[string]string{
		"":                                "not a SELECT",
		"-- x\n":                          "not a SELECT",
		"UPDATE t SET a = 1 RETURNING id": "not a SELECT",
		"(SELECT id FROM t ORDER BY id)":  "not a SELECT",
		"TABLE t":                         "not a SELECT",
		"VALUES (1)":                      "not a SELECT",
		"WITH x AS (SELECT 1) UPDATE t SET a = 1 RETURNING id":                                                          "not a SELECT",
		"WITH x AS (SELECT 1)":                                                                                          "not a SELECT",
		"SELECT id FROM t ORDER BY id FOR UPDATE":                                                                       "FOR clause",
		"SELECT id FROM t ORDER BY id\nfor\tno key update":                                                              "FOR clause",
		"SELECT id FROM t GROUP BY id ORDER BY id":                                                                      "GROUP BY",
		"SELECT 1 FROM t HAVING true ORDER BY 1":                                                                        "HAVING",
		"SELECT DISTINCT id FROM t ORDER BY id":                                                                         "DISTINCT",
		"SELECT DISTINCT ON (a) id FROM t ORDER BY a":                                                                   "DISTINCT",
		"SELECT id FROM t UNION ALL SELECT id FROM u ORDER BY id":                                                       "UNION",
		"SELECT id FROM t INTERSECT SELECT id FROM u ORDER BY id":                                                       "INTERSECT",
		"SELECT id FROM t except SELECT id FROM u ORDER BY id":                                                          "EXCEPT",
		"SELECT id/**/FROM/**/t/**/union/**/SELECT 1 ORDER BY 1":                                                        "UNION",
		"SELECT id, rank() OVER (ORDER BY a) FROM t ORDER BY id":                                                        "window function",
		"SELECT id, 1 + (rank() OVER w) FROM t ORDER BY id":                                                             "window function",
		"SELECT id FROM t WINDOW w AS (ORDER BY a) ORDER BY id":                                                         "WINDOW",
		"SELECT count(*) FROM t ORDER BY 1":                                                                             "aggregate",
		"SELECT coalesce(MAX (a), 0) FROM t ORDER BY 1":                                                                 "aggregate",
		"SELECT id INTO u FROM t ORDER BY id":                                                                           "SELECT INTO",
		"WITH x AS (DELETE FROM t RETURNING id) SELECT * FROM x, t ORDER BY 1":                                          "writes",
		"WITH x AS MATERIALIZED (\n-- x\nINSERT INTO t VALUES (1)) SELECT 1 FROM t":                                     "writes",
		"SELECT id FROM t ORDER BY id; DELETE FROM t":                                                                   "more than one statement",
		"SELECT id FROM t ORDER BY id;;":                                                                                "more than one statement",
		"SELECT id FROM t WHERE (a = 1 ORDER BY id":                                                                     "parentheses",
		"SELECT id FROM t WHERE a = 1) ORDER BY id":                                                                     "parentheses",
		"SELECT id FROM t WHERE a = 'x ORDER BY id":                                                                     "quotation",
		"SELECT id FROM t WHERE a = $q$x$$ ORDER BY id":                                                                 "quotation",
		"SELECT id FROM t ORDER BY id /* and /* so */ on":                                                               "comment",
		"SELECT 1 ORDER BY 1":                                                                                           "names no table",
		"SELECT * FROM generate_series(1, 3) ORDER BY 1":                                                                "names no table",
		"SELECT * FROM pg_catalog.generate_series(1, 3) ORDER BY 1":                                                     "names no table",
		"SELECT * FROM (VALUES (1)) v(id) ORDER BY id":                                                                  "names no table",
		"WITH x AS (SELECT * FROM t) SELECT * FROM x ORDER BY id":                                                       "names no table",
		`WITH a AS (SELECT 1), "B" AS (SELECT 2) SELECT * FROM a, "B" b ORDER BY 1`:                                     "names no table",
		"SELECT * FROM ROWS FROM (generate_series(1, 2)) x ORDER BY 1":                                                  "names no table",
		"SELECT * FROM current_date, LATERAL f(1) ORDER BY 1":                                                           "names no table",
		"SELECT * FROM ((VALUES (1))) v (id) ORDER BY id":                                                               "names no table",
		"SELECT * FROM (SELECT 1 AS id) s ORDER BY id":                                                                  "names no table",
		"SELECT * FROM (f(1) a CROSS JOIN f(2) b) ORDER BY 1":                                                           "names no table",
		"SELECT * FROM (WITH x AS (SELECT * FROM t) SELECT * FROM x) s ORDER BY 1":                                      "names no table",
		"WITH x AS (SELECT * FROM t) SELECT * FROM (SELECT * FROM x) s ORDER BY 1":                                      "names no table",
		`WITH "Ä" AS (SELECT * FROM t) SELECT * FROM Ä ORDER BY 1`:                                                      "names no table",
		"WITH RECURSIVE x AS (SELECT 1) SEARCH DEPTH FIRST BY a SET ord, y AS (SELECT 2) SELECT * FROM x, y ORDER BY 1": "names no table",
		"WITH x AS (WITH y AS (SELECT 1) UPDATE t SET a = 1 RETURNING id) SELECT * FROM t ORDER BY 1":                   "writes",
		"SELECT * FROM (SELECT id FROM t GROUP BY id) s ORDER BY 1":                                                     "GROUP BY",
		"SELECT * FROM (SELECT DISTINCT id FROM t) s ORDER BY 1":                                                        "DISTINCT",
		"SELECT * FROM u, LATERAL (SELECT max(id) FROM t) s ORDER BY 1":                                                 "aggregate",
		"SELECT * FROM ((SELECT id FROM t) UNION SELECT 1) s ORDER BY 1":                                                "UNION",
		"SELECT * FROM (SELECT id FROM t FOR SHARE) s ORDER BY 1":                                                       "FOR clause",
		"SELECT id FROM t ORDER BY id FOR READ ONLY":                                                                    "FOR clause",
		"SELECT my.sum(a) FILTER (WHERE a > 0) FROM t ORDER BY 1":                                                       "aggregate",
		"SELECT my.pick() WITHIN GROUP (ORDER BY a) FROM t ORDER BY 1":                                                  "aggregate",
		"SELECT my.rank() OVER (), id FROM t ORDER BY id":                                                               "window function",
		"SELECT unnest(tags) FROM t ORDER BY 1":                                                                         "returns a set",
		"SELECT id FROM t ORDER BY (generate_series(1, 2))":                                                             "returns a set",
		"SELECT t.id FROM t LEFT JOIN u USING (id) ORDER BY 1":                                                          "outer join",
		"SELECT t.id FROM u RIGHT OUTER JOIN t USING (id) ORDER BY 1":                                                   "outer join",
		"SELECT t.id FROM t FULL JOIN f(1) ON true ORDER BY 1":                                                          "outer join",
		"SELECT t.id FROM f(1) FULL JOIN t ON true ORDER BY 1":                                                          "outer join",
		"SELECT t.id FROM t LEFT JOIN (f(1) x JOIN u USING (id)) ON true ORDER BY 1":                                    "outer join",
		`SELECT id FROM U&"d\0061t" ORDER BY 1`:                                                                         "write it out",
		"SELECT id FROM t WHERE (a[1) = 1] ORDER BY id":                                                                 "parentheses",
		"WITH x (SELECT 1) SELECT id FROM t ORDER BY id":                                                                "not a SELECT",
		"SELECT id FROM t": "without ORDER BY",
		"SELECT id FROM (SELECT id FROM t ORDER BY id) s":                   "without ORDER BY",
		"SELECT id FROM t WHERE a = any(ARRAY(SELECT a FROM u ORDER BY a))": "without ORDER BY",
		"SELECT id FROM t -- ORDER BY id":                                   "without ORDER BY",
		"SELECT id AS order FROM t":                                         "without ORDER BY",
	} {
		got, err := lockedSQL(pglock.ForUpdate, sql)
		if err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%s: %v, want one about %s", sql, err, why)
		}
		if got != "" {
			t.Errorf("%s was sent as %s", sql, got)
		}
	}
}

// Which rows tie can't be known beside SkipLocked.
func TestLockRows_WithTies(t *testing.T) {
	t.Parallel()
	const sql = "SELECT id FROM t ORDER BY a FETCH FIRST 3 ROWS WITH TIES"
	if got, err := lockedSQL(pglock.ForUpdate.SkipLocked(), sql); got != "" || err == nil || !strings.Contains(err.Error(), "WITH TIES") {
		t.Errorf("sent %q, %v", got, err)
	}
}

// Only LockRows wants an order, and only where a row is waited for.
func TestLockRows_Order(t *testing.T) {
	t.Parallel()
	const sql = "SELECT id FROM t"
	if _, err := lockedSQL(pglock.ForUpdate.SkipLocked(), sql); err != nil {
		t.Error(err)
	}
	tx := &recorder{}
	_, err := pglock.LockRow(context.Background(), tx, pglock.ForUpdate, pgx.RowTo[int], sql)
	if !errors.Is(err, errRecorded) {
		t.Error(err)
	}
}
