package pglock_test

import (
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// parts of a SELECT whose first column is the key of t. What is made of them
// is what people write, and what they should not.
var (
	withs = []string{"",
		"WITH c AS (SELECT id FROM t)",
		"WITH c AS NOT MATERIALIZED (SELECT id FROM u FOR SHARE)",
		"WITH RECURSIVE c (id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c WHERE id < 3) SEARCH DEPTH FIRST BY id SET ord",
		"WITH c AS (DELETE FROM u WHERE id > 90 RETURNING id)",
	}
	lists = []string{"t.id", "ALL t.id, t.*", "t.id, 'FOR UPDATE', $$ UNION $$", "t.id AS union",
		"t.id, (SELECT max(a) FROM u GROUP BY a LIMIT 1)", "t.id, ARRAY(SELECT count(*) FROM u)", "t.id, EXTRACT(year FROM now())",
		"DISTINCT t.id", "DISTINCT ON (t.id) t.id", "max(t.id)", "t.id, pg_catalog.count(*)", "t.id, rank() OVER (ORDER BY t.id)",
		"t.id, mode() WITHIN GROUP (ORDER BY t.id)", "t.id, generate_series(1, 2)",
	}
	sources = []string{"t", "ONLY t", "ONLY (t)", "public.t AS t (id, a)", "t TABLESAMPLE SYSTEM (100)", "v AS t", "parted AS t",
		"(SELECT * FROM t) t", "LATERAL (SELECT * FROM t ORDER BY id LIMIT 3) t", "(TABLE t) t", "((SELECT id FROM t) LIMIT 2) t",
		"(WITH t AS (SELECT 1) SELECT * FROM public.t) t", "(SELECT t.* FROM t, LATERAL (SELECT 1) x) t", "(t CROSS JOIN (SELECT 1) x)",
		"(SELECT id FROM t GROUP BY id) t", "(SELECT DISTINCT id FROM t) t", "(SELECT id FROM t UNION SELECT 9) t",
		"(SELECT id FROM t HAVING true) t", "(SELECT unnest(ARRAY[id]) AS id FROM t) t", "(SELECT id, count(*) OVER () FROM t) t",
		"(SELECT id FROM t FOR SHARE) t",
	}
	tableless = []string{"generate_series(1, 3) AS t (id)", "ROWS FROM (generate_series(1, 3)) AS t (id)", "(VALUES (1), (2)) AS t (id)",
		"((VALUES (1))) AS t (id)", "c AS t", "(SELECT * FROM c) AS t", "(SELECT 1 AS id) t", "(abs(1) AS t (id) CROSS JOIN abs(2) x)",
	}
	joined = []string{"", ", u", "CROSS JOIN u", "JOIN u ON u.id = t.id", "INNER JOIN u USING (id)", "NATURAL JOIN u",
		", LATERAL (SELECT u.id FROM u WHERE u.id = t.id LIMIT 1) x", "JOIN LATERAL generate_series(1, t.id) g ON true",
		"LEFT JOIN unnest('{1,2}'::int[]) AS g ON g = t.id", "LEFT OUTER JOIN c ON c.id = t.id", "LEFT JOIN (VALUES (1)) g (n) ON n = t.id",
		"LEFT JOIN u ON u.id = t.id", "RIGHT JOIN u ON u.id = t.id", "FULL JOIN u ON u.id = t.id", "FULL JOIN generate_series(1, 3) g ON g = t.id",
		"LEFT JOIN (u JOIN u AS w USING (id)) ON u.id = t.id", "LEFT JOIN u ON left('a', 1) = right('a', 1) JOIN u AS w ON w.id = u.id",
	}
	wheres = []string{"", "WHERE t.id < 3", "WHERE t.id IS NOT DISTINCT FROM 2", "WHERE t.id IN (SELECT id FROM u UNION SELECT 1)",
		"WHERE t.id = (SELECT max(id) FROM t)", "WHERE EXISTS (SELECT FROM u FOR KEY SHARE) -- GROUP BY\n",
		"GROUP BY t.id", "GROUP BY GROUPING SETS ((t.id), ())", "HAVING true", "WINDOW w AS (ORDER BY t.id)",
	}
	orderings = []string{"ORDER BY t.id", "ORDER BY 1 DESC NULLS LAST", "ORDER BY t.id USING <", "ORDER BY (SELECT count(*) FROM u), t.id",
		"UNION SELECT 7 ORDER BY 1", "EXCEPT ALL SELECT 7 ORDER BY 1",
	}
	limits = []string{"", "LIMIT 2", "LIMIT ALL OFFSET 1", "OFFSET 1 ROW FETCH NEXT 2 ROWS ONLY", "FETCH FIRST 2 ROWS WITH TIES",
		"LIMIT (SELECT 2) /* FOR UPDATE */", "FOR UPDATE", "FOR READ ONLY", "LIMIT 2;",
	}
)

// Whatever people write: either this package refuses it before anything is
// sent, or the server takes the clause and the rows of the answer are locked.
// Without the clause they are not.
func TestLockRows_AcceptedByTheServerOrRefused(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE t (id int PRIMARY KEY, a int);
		CREATE TABLE u (id int PRIMARY KEY, a int);
		CREATE TABLE parted (id int PRIMARY KEY, a int) PARTITION BY HASH (id);
		CREATE TABLE parted_1 PARTITION OF parted FOR VALUES WITH (MODULUS 1, REMAINDER 0);
		CREATE VIEW v AS SELECT * FROM t WHERE id > 0;
		INSERT INTO t SELECT n, n FROM generate_series(1, 5) n;
		INSERT INTO u TABLE t; INSERT INTO parted TABLE t`)
	free := func(sql string, ids []int) (n int) {
		t.Helper()
		table := "t"
		if strings.Contains(sql, "parted") {
			table = "parted"
		}
		inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
			n = one[int](t, tx, `SELECT count(*) FROM (SELECT FROM `+table+` WHERE id = ANY ($1) FOR KEY SHARE SKIP LOCKED) s`, ids)
		})
		return n
	}
	pick := func(from []string) string { return from[max(0, rand.IntN(2*len(from))-len(from))] } // often the first
	other := regexp.MustCompile(`\bu\b`)
	first := func(row pgx.CollectableRow) (id int, err error) {
		values, err := row.Values()
		if err == nil && values[0] != nil {
			id = int(values[0].(int32))
		}
		return id, err
	}
	accepted, refused, nonsense, unlocked := 0, 0, 0, 0
	for range scale(1500, 400) {
		source, tabled := pick(sources), rand.IntN(4) > 0
		if !tabled {
			source = pick(tableless)
		}
		join := pick(joined)
		sql := strings.Join([]string{pick(withs), "SELECT", pick(lists), "FROM", source, join, pick(wheres), pick(orderings), pick(limits)}, " ")
		var plain []int
		var err error
		inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
			var rows pgx.Rows
			if rows, err = tx.Query(t.Context(), sql); err == nil {
				plain, err = pgx.CollectRows(rows, first)
			}
			if err == nil && tabled && free(sql, plain) > 0 {
				unlocked++
			}
		})
		if err != nil {
			nonsense++
			continue
		}
		how := []pglock.RowLock{pglock.ForUpdate, pglock.ForUpdate.NoWait(), pglock.ForUpdate.SkipLocked()}[rand.IntN(3)]
		inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
			ids, err := pglock.LockRows(t.Context(), tx, how, first, sql)
			switch {
			case sqlState(err) != "":
				t.Errorf("%v: %s: the server says %v", how, sql, err)
			case err != nil:
				refused++
				usable(t, tx)
			default:
				accepted++
				// Without a table the rows of u are locked, if there are any.
				if n := free(sql, ids); tabled && n > 0 || !tabled && !other.MatchString(join) {
					t.Errorf("%v: %s: of the rows %v of the answer %d are not locked", how, sql, ids, n)
				}
			}
		})
	}
	t.Logf("%d accepted and locked, %d refused before anything was sent, %d no SQL to begin with; without a clause %d were not locked",
		accepted, refused, nonsense, unlocked)
	if min(accepted, refused, unlocked) < 20 {
		t.Error("that is too few of one kind: this test shows nothing")
	}
}

// What the text can't show the server refuses, and the error says to whom.
func TestLockRows_RefusedByTheServer(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 1)
	exec(t, pool, `CREATE VIEW sums AS SELECT sum(balance) AS n FROM accounts GROUP BY id;
		CREATE AGGREGATE my_sum(int) (sfunc = int4pl, stype = int);
		CREATE MATERIALIZED VIEW stored AS TABLE accounts`)
	for sql, state := range map[string]string{
		`SELECT n FROM sums ORDER BY n`:                         "0A000",
		`SELECT my_sum(balance) FROM accounts ORDER BY 1`:       "0A000",
		`SELECT (SELECT max(balance)) FROM accounts ORDER BY 1`: "0A000",
		`SELECT id FROM stored ORDER BY id`:                     "42809",
	} {
		inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
			_, err := pglock.LockRows(t.Context(), tx, pglock.ForUpdate, pgx.RowTo[int], sql)
			if sqlState(err) != state || !strings.HasPrefix(err.Error(), "pglock: can't lock the rows of ") {
				t.Errorf("%s: %v", sql, err)
			}
		})
	}
}

// Every aggregate of this server's own is known, and every function that
// returns a set, but for those that look into the server.
func TestLockRows_KnowsBuiltIns(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	rows, err := pool.Query(t.Context(), `SELECT DISTINCT proname::text FROM pg_proc
		WHERE pronamespace = 'pg_catalog'::regnamespace AND (prokind = 'a' OR proretset AND proname !~ '^pg_')`)
	if err != nil {
		t.Fatal(err)
	}
	functions, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(functions) < 60 {
		t.Fatalf("%d functions, %v", len(functions), err)
	}
	for _, f := range functions {
		if got, err := lockedSQL(pglock.ForUpdate, "SELECT "+f+"(id) FROM t ORDER BY 1"); err == nil {
			t.Errorf("sent %s", got)
		}
	}
}

// No text makes the reader panic, and what it lets pass it sends as it is.
func FuzzLockRows(f *testing.F) {
	for _, seed := range []string{"SELECT id FROM t ORDER BY id", "WITH x AS (SELECT 1) SELECT * FROM x, t ORDER BY 1;", "select e'", "((", "SELECT FROM (,) ORDER",
		"SELECT 1 FROM ONLY", "SELECT 1 FROM ONLY (", "SELECT 1 FROM ()", "WITH", "WITH x", "WITH x AS", "WITH x AS () SEARCH", "SELECT 1 FROM a.", "SELECT 1 FROM ,JOIN"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, sql string) {
		got, err := lockedSQL(pglock.ForUpdate, sql)
		switch query, found := strings.CutSuffix(got, "\nFOR UPDATE"); {
		case err != nil && got != "":
			t.Errorf("refused and sent %q: %v", got, err)
		case err == nil && (!found || !strings.HasPrefix(sql, query)):
			t.Errorf("%q was sent as %q", sql, got)
		}
	})
}
