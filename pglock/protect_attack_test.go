package pglock_test

import (
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// manners are those of writing to a protected table.
var manners = []struct{ name, sql string }{
	{"insert", `INSERT INTO accounts VALUES (9, 9)`},
	{"update", `UPDATE accounts SET balance = 0`},
	{"delete", `DELETE FROM accounts WHERE id = 1`},
	{"truncate", `TRUNCATE accounts`},
	{"copy", `COPY accounts FROM STDIN`},
	{"on conflict update", `INSERT INTO accounts VALUES (1, 0) ON CONFLICT (id) DO UPDATE SET balance = 0`},
	{"on conflict nothing", `INSERT INTO accounts VALUES (9, 9) ON CONFLICT DO NOTHING`},
	{"in a query", `WITH gone AS (DELETE FROM accounts WHERE id = 1 RETURNING *) SELECT count(*) FROM gone`},
	{"a view", `UPDATE seen SET balance = 0`},
	{"dynamic", `DO $$ BEGIN EXECUTE 'UPDATE accounts SET balance = 0'; END $$`},
	{"explained", `EXPLAIN ANALYZE UPDATE accounts SET balance = 0`},
	{"a cascading delete", `DELETE FROM parents WHERE id = 1`},
	{"a cascading update", `UPDATE parents SET id = 5 WHERE id = 1`},
	{"a cascading truncate", `TRUNCATE parents CASCADE`},
	{"partitions by the root, insert", `INSERT INTO parts VALUES (2, 2)`},
	{"partitions by the root, update", `UPDATE parts SET n = 0`},
	{"partitions by the root, move", `UPDATE parts SET id = 12 WHERE id = 1`},
	{"partitions by the root, truncate", `TRUNCATE parts`},
	{"partitions by the root, copy", `COPY parts FROM STDIN`},
	{"partition, insert", `INSERT INTO parts_1 VALUES (2, 2)`},
	{"partition, update", `UPDATE parts_1 SET n = 0`},
	{"partition, delete", `DELETE FROM parts_1`},
	{"partition, truncate", `TRUNCATE parts_1`},
	{"partition, copy", `COPY parts_1 FROM STDIN`},
	{"partition of partitions, insert", `INSERT INTO parts_2 VALUES (12, 2)`},
	{"partition of partitions, truncate", `TRUNCATE parts_2`},
	{"partition in a partition, update", `UPDATE parts_2_1 SET n = 0`},
	{"partition in a partition, truncate", `TRUNCATE parts_2_1`},
	{"partition attached later, update", `UPDATE parts_late SET n = 0`},
	{"partition attached later, delete", `DELETE FROM parts_late`},
	{"partition created later, insert", `INSERT INTO parts_later VALUES (31, 1)`},
	{"inheritance, update by the parent", `UPDATE kin SET n = 0`},
	{"inheritance, delete by the parent", `DELETE FROM kin`},
	{"inheritance, truncate by the parent", `TRUNCATE kin`},
}

const merge = `MERGE INTO accounts a USING (VALUES (1)) v (id) ON a.id = v.id
	WHEN MATCHED THEN UPDATE SET balance = 0 WHEN NOT MATCHED THEN INSERT VALUES (v.id, 0)`

// Every manner of writing, with no lease presented.
func TestProtect_EveryManner(t *testing.T) {
	t.Parallel()
	var attacks []attack
	for _, manner := range manners {
		attacks = append(attacks, attack{name: manner.name, sql: []string{manner.sql}, want: "PW004"})
	}
	attacks = append(attacks,
		attack{name: "merge", since: 150000, want: "PW004", sql: []string{merge}},
		attack{name: "swallowing the refusal", sql: []string{
			`DO $$ BEGIN UPDATE accounts SET balance = 0; EXCEPTION WHEN OTHERS THEN NULL; END $$`}},
	)
	storm(t, attacks)
}

// Every manner of writing goes through, and writes, once a lease is presented.
func TestProtect_EveryManner_Presented(t *testing.T) {
	t.Parallel()
	f := newFort(t)
	app := pgtest.PoolOn(t, f.dsn)
	before := one[string](t, app, fortDigest)
	try := func(name, sql string) {
		for _, level := range levels {
			inTx(t, app, level, func(tx pgx.Tx) {
				exec(t, tx, f.spells.Replace(`SELECT pglock.present('accounts/mine', {mine})`))
				if err := write(t.Context(), tx, sql); err != nil {
					t.Errorf("%s at %s: %v", name, level, err)
				} else if one[string](t, tx, fortDigest) == before {
					t.Errorf("%s at %s wrote nothing", name, level)
				}
			})
		}
	}
	for _, manner := range manners {
		try(manner.name, manner.sql)
	}
	if one[bool](t, app, `SELECT current_setting('server_version_num')::int >= 150000`) {
		try("merge", merge)
	}
}

// Every credential that is none, before one plain UPDATE. A setting can be
// forged, but only into a claim.
func TestProtect_EveryCredential(t *testing.T) {
	t.Parallel()
	const update = `UPDATE accounts SET balance = 0`
	forge := func(name, presented, want string) attack {
		return attack{name: "set_config, " + name, want: want,
			sql: []string{`SELECT set_config('pglock.presented', '` + presented + `', true)`, update}}
	}
	present := func(name, args, want string) attack {
		return attack{name: "present, " + name, want: want, always: true, sql: []string{`SELECT pglock.present(` + args + `)`, update}}
	}
	storm(t, []attack{
		forge("a token of before", `[["accounts/mine", 1]]`, "PW001"),
		forge("a token to come", `[["accounts/mine", 99999]]`, "PW002"),
		forge("the highest there can be", `[["accounts/mine", 9223372036854775807]]`, "PW002"),
		forge("higher", `[["accounts/mine", 9223372036854775808]]`, "22003"),
		forge("negative", `[["accounts/mine", -1]]`, "PW001"),
		forge("NULL", `[["accounts/mine", null]]`, "PW002"),
		forge("no token", `[["accounts/mine"]]`, "PW002"),
		forge("a token that is a word", `[["accounts/mine", "x"]]`, "22P02"),
		forge("another role's lease", `[["accounts/theirs", {theirs}]]`, "PW002"),
		unseen(forge("a lease that there is not", `[["accounts/none", 1]]`, "PW002")),
		forge("a lease of another name", `[["other", {other}]]`, "PW005"),
		forge("a name that is NULL", `[[null, {mine}]]`, "PW005"),
		unseen(forge("the pattern", `[["accounts/%", {mine}]]`, "PW002")),
		forge("nothing in an array", `[]`, "PW005"),
		forge("nothing in arrays", `[[], [[]], {}, "mine", 7, null]`, "PW005"),
		forge("an object", `{"accounts/mine": {mine}}`, "22023"),
		forge("a number", `7`, "22023"),
		forge("null", `null`, "22023"),
		forge("no JSON", `accounts/mine`, "22P02"),
		forge("many", `[["accounts/mine", 1], ["other", {other}], ["accounts/theirs", {theirs}]]`, "PW002"),
		present("a token of before", `'accounts/mine', 1`, "PW002"),
		present("the highest there can be", `'accounts/mine', 9223372036854775807`, "PW002"),
		present("higher", `'accounts/mine', 9223372036854775808`, "42883"),
		present("negative", `'accounts/mine', -1`, "PW002"),
		present("NULL", `'accounts/mine', NULL`, "PW002"),
		present("no name", `NULL, {mine}`, "22023"),
		present("another role's lease", `'accounts/theirs', {theirs}`, "PW002"),
		{name: "a lease of another name", want: "PW005", sql: []string{`SELECT pglock.present('other', {other})`, update}},
		{name: "JSON in a name", want: "PW005",
			sql: []string{`SELECT pglock.present('x", 1], ["accounts/theirs", 2], ["', {inject})`, update}},
		forge("SQL in a name", `[["accounts/''); DELETE FROM accounts; --", 99999]]`, "PW002"),
		{name: "rolled back to a savepoint", want: "PW004", sql: []string{
			`SAVEPOINT s`, `SELECT pglock.present('accounts/mine', {mine})`, `ROLLBACK TO s`, update}},
		{name: "refused, and back to a savepoint", want: "PW004", sql: []string{
			`DO $$ BEGIN PERFORM pglock.present('accounts/theirs', {theirs}); EXCEPTION WHEN OTHERS THEN NULL; END $$`, update}},
		{name: "for the session", want: "PW001", sql: []string{
			`SET pglock.presented = '[["accounts/mine", 1]]'`, update}},
		{name: "search_path", want: "PW002", sql: append(slices.Clone(games),
			`SELECT set_config('pglock.presented', '[["accounts/theirs", {theirs}]]', true)`, `UPDATE public.accounts SET balance = 0`)},
		{name: "search_path, nothing presented", want: "PW004", sql: append(slices.Clone(games), `UPDATE public.accounts SET balance = 0`)},
	})
}

// What guard and fence refuse, before a write that nothing else would.
func TestRefusals_EveryPath(t *testing.T) {
	t.Parallel()
	const write = `INSERT INTO ledger VALUES ('stale')`
	guard := func(name, args, want string) attack {
		return attack{name: "guard, " + name, want: want, always: true, sql: []string{`SELECT pglock.guard(` + args + `)`, write}}
	}
	fence := func(name, args, want string, always bool) attack {
		return attack{name: "fence, " + name, want: want, always: always, sql: []string{`SELECT pglock.fence(` + args + `)`, write}}
	}
	storm(t, []attack{
		guard("a token of before", `'accounts/mine', 1`, "PW002"),
		guard("the highest there can be", `'accounts/mine', 9223372036854775807`, "PW002"),
		guard("negative", `'accounts/mine', -1`, "PW002"),
		guard("NULL", `'accounts/mine', NULL`, "PW002"),
		guard("no name", `NULL, 1`, "22023"),
		guard("another role's lease", `'accounts/theirs', {theirs}`, "PW002"),
		unseen(guard("SQL in a name", `'accounts/mine''; DELETE FROM ledger; --', {mine}`, "PW002")),
		fence("a token of before", `'ledger', 4`, "PW001", false),
		fence("the lowest", `'ledger', 1`, "PW001", false),
		fence("zero", `'ledger', 0`, "22023", true),
		fence("negative", `'ledger', -1`, "22023", true),
		fence("NULL", `'ledger', NULL`, "22023", true),
		fence("no resource", `NULL, 5`, "22023", true),
		fence("higher than a token can be", `'ledger', 9223372036854775808`, "42883", true),
		{name: "fence, refused, and back to a savepoint", want: "PW001", sql: []string{
			`DO $$ BEGIN PERFORM pglock.fence('ledger', 4); EXCEPTION WHEN OTHERS THEN NULL; END $$`,
			`SELECT pglock.fence('ledger', 4)`, write}},
		{name: "fence, search_path", want: "PW001", sql: []string{
			`CREATE TEMP TABLE fences (resource text, token bigint)`,
			`CREATE FUNCTION pg_temp.no(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT false'`,
			`CREATE OPERATOR pg_temp.> (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = pg_temp.no)`,
			`SET LOCAL search_path = pg_temp, evil, pg_catalog, public`,
			`SELECT pglock.fence('ledger', 4)`, `INSERT INTO public.ledger VALUES ('stale')`}},
	})
}

// games have whatever the functions name found in the attacker's schemas first,
// operators included.
var games = []string{
	`CREATE TEMP TABLE leases (name text, token bigint, claim uuid, role name, expires_at timestamptz)`,
	`INSERT INTO leases SELECT 'accounts/theirs', {theirs}, gen_random_uuid(), session_user, 'infinity'`,
	`CREATE FUNCTION pg_temp.current_setting(text, boolean) RETURNS text LANGUAGE sql AS $$ SELECT '[["accounts/theirs", {theirs}]]' $$`,
	`CREATE FUNCTION pg_temp.yes(name, name) RETURNS boolean LANGUAGE sql AS 'SELECT true'`,
	`CREATE FUNCTION pg_temp.yes(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true'`,
	`CREATE FUNCTION pg_temp.yes(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT true'`,
	`CREATE OPERATOR pg_temp.= (LEFTARG = name, RIGHTARG = name, FUNCTION = pg_temp.yes)`,
	`CREATE OPERATOR pg_temp.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = pg_temp.yes)`,
	`CREATE OPERATOR pg_temp.= (LEFTARG = text, RIGHTARG = text, FUNCTION = pg_temp.yes)`,
	`CREATE FUNCTION evil.current_setting(text, boolean) RETURNS text LANGUAGE sql AS $$ SELECT '[["accounts/theirs", {theirs}]]' $$`,
	`SET LOCAL search_path = pg_temp, evil, pg_catalog, public`,
}
