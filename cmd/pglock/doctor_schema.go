package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/migrations"
)

func checkSchema(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	var version int64
	if err := ask1(ctx, tx, "SELECT pglock.schema_version()", nil, &version); err != nil {
		return nil, err
	}
	if newest := newestMigration(); version < newest {
		return []finding{{"", danger, fmt.Sprintf("it is at version %d, and clients of this version want %d", version, newest), "pglock migrate up"}}, nil
	}
	return []finding{ok("version %d", version)}, nil
}

// newestMigration is the version of the last file.
func newestMigration() (newest int64) {
	files, _ := fs.Glob(migrations.FS, "*.sql") // the pattern is no bad one
	for _, name := range files {
		digits, _, _ := strings.Cut(name, "_")
		version, _ := strconv.ParseInt(digits, 10, 64)
		newest = max(newest, version)
	}
	return newest
}

// checkGrants looks for what a client calls.
func checkGrants(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	var usage, role string
	var lacks []string
	err := ask1(ctx, tx, `SELECT coalesce((SELECT has_schema_privilege(n.oid, 'USAGE')::text FROM pg_namespace n WHERE n.nspname = 'pglock'), ''),
		quote_ident(current_user),
		ARRAY(SELECT DISTINCT p.proname::text FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
		      WHERE n.nspname = 'pglock' AND NOT has_function_privilege(p.oid, 'EXECUTE')
		        AND p.proname IN ('schema_version', 'check_epoch', 'acquire', 'acquire_one', 'enqueue', 'refresh', 'cancel', 'renew',
		                          'release', 'release_one', 'exchange', 'guard', 'present', 'fence', 'list_leases', 'list_waiters') ORDER BY 1)`, nil, &usage, &role, &lacks)
	switch {
	case err != nil || usage == "":
		return nil, err
	case usage == "false":
		return []finding{{"", warning, "role " + role + " may not use the schema, and can't take a lease", "GRANT USAGE ON SCHEMA pglock TO " + role + ", and EXECUTE on its functions"}}, nil
	case len(lacks) > 0:
		return []finding{{"", warning, "role " + role + " may not call " + strings.Join(lacks, ", "), "GRANT EXECUTE ON FUNCTION pglock." + strings.Join(lacks, ", pglock.") + " TO " + role}}, nil
	}
	return []finding{ok("role %s may call what a client calls", role)}, nil
}

// checkTokens looks at where they come from. Without SELECT on the table it sees
// the tokens of the leases that are held.
func checkTokens(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	var cache int64
	var cycles, sequence, table bool
	err := ask1(ctx, tx, `SELECT s.seqcache, s.seqcycle, has_sequence_privilege(c.oid, 'SELECT'),
		has_table_privilege(l.oid, 'SELECT') AND has_schema_privilege(c.relnamespace, 'USAGE')
		FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
		JOIN pg_class l ON l.relnamespace = n.oid AND l.relname = 'leases'
		WHERE n.nspname = 'pglock' AND c.relname = 'leases_token_seq'`, nil, &cache, &cycles, &sequence, &table)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var found []finding
	if cache > 1 || cycles {
		found = append(found, finding{"", danger, fmt.Sprintf("the sequence hands them out in blocks of %d (cycling: %t): they don't rise from one holder to the next", cache, cycles),
			"ALTER SEQUENCE pglock.leases_token_seq CACHE 1 NO CYCLE"})
	}
	if !sequence || !table {
		return append(found, finding{"", unseen, "where the sequence stands beside the highest token", "GRANT SELECT ON pglock.leases, pglock.leases_token_seq to this role"}), nil
	}
	var last, highest int64
	err = ask1(ctx, tx, `SELECT s.last_value, coalesce((SELECT max(l.token) FROM pglock.leases l), 0) FROM pglock.leases_token_seq s`, nil, &last, &highest)
	if err != nil {
		return nil, err
	}
	if last < highest {
		found = append(found, finding{"", danger, fmt.Sprintf("token regression: the sequence is at %d, and token %d was granted: it was reset or restored from elsewhere", last, highest),
			"SELECT pglock.new_epoch()"})
	}
	if len(found) == 0 {
		found = []finding{ok("the sequence is at %d, the highest token is %d", last, highest)}
	}
	return found, nil
}

func checkLeaseTable(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	var unlogged, vacuums bool
	var fill int
	var indexes []string
	err := ask1(ctx, tx, `SELECT c.relpersistence = 'u',
		current_setting('autovacuum')::bool AND current_setting('track_counts')::bool
			AND coalesce((SELECT o.option_value FROM pg_options_to_table(c.reloptions) o WHERE o.option_name = 'autovacuum_enabled')::bool, true),
		coalesce((SELECT o.option_value FROM pg_options_to_table(c.reloptions) o WHERE o.option_name = 'fillfactor')::int, 100),
		ARRAY(SELECT i.indexrelid::regclass::text FROM pg_index i WHERE i.indrelid = c.oid AND NOT i.indisprimary ORDER BY 1)
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'pglock' AND c.relname = 'leases'`,
		nil, &unlogged, &vacuums, &fill, &indexes)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var found []finding
	if unlogged {
		found = append(found, finding{"", danger, "pglock.leases is UNLOGGED: a crash empties it, and two hold one lease", "ALTER TABLE pglock.leases SET LOGGED"})
	}
	if !vacuums {
		found = append(found, finding{"", warning, "autovacuum doesn't reach pglock.leases: it grows, and gets slower", "turn on autovacuum and track_counts, and ALTER TABLE pglock.leases RESET (autovacuum_enabled)"})
	}
	if fill > 50 {
		found = append(found, finding{"", warning, fmt.Sprintf("the fillfactor of pglock.leases is %d: renewals find no room on their page", fill), "ALTER TABLE pglock.leases SET (fillfactor = 50)"})
	}
	if len(indexes) > 0 {
		found = append(found, finding{"", warning, "pglock.leases has been given an index, which each renewal has to write as well: " + strings.Join(indexes, ", "), "DROP INDEX " + strings.Join(indexes, ", ")})
	}
	if len(found) == 0 {
		found = []finding{ok("logged, vacuumed, fillfactor %d", fill)}
	}
	return found, nil
}

// checkBloat compares the size of the table with what its rows need, at 512 bytes
// for each and half of each page free.
func checkBloat(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	var size, live, dead int64
	err := ask1(ctx, tx, `SELECT pg_relation_size(c.oid), coalesce(s.n_live_tup, 0), coalesce(s.n_dead_tup, 0)
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
		WHERE n.nspname = 'pglock' AND c.relname = 'leases'`, nil, &size, &live, &dead)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return []finding{judgeBloat(size, live, dead)}, nil
}

func judgeBloat(size, live, dead int64) finding {
	says := fmt.Sprintf("pglock.leases has %d kB, %s and %d dead", size>>10, count(int(live), "live row"), dead)
	if size > 2<<20 && size > 8*1024*live {
		return finding{"", warning, says, "end what holds an old snapshot, then VACUUM pglock.leases; VACUUM FULL shrinks it, and stops all leases meanwhile"}
	}
	return ok("%s", says)
}

// A snapshot holds back VACUUM wherever it was taken; one of another database does
// not concern this one's tables, unless a standby or a slot sent it.
const snapshotsSQL = `SELECT * FROM (
	SELECT 'backend ' || pid || ' (' || concat_ws(', ', nullif(application_name, ''), state) || ')' AS who,
	       'SELECT pg_terminate_backend(' || pid || ') ends it' AS remedy,
	       age(backend_xmin)::bigint AS behind, coalesce(extract(epoch FROM clock_timestamp() - xact_start), 0)::float8 AS old
	FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()
	  AND (datname = current_database() OR datname IS NULL)
	UNION ALL
	SELECT 'replication slot ' || slot_name, 'pg_drop_replication_slot(''' || slot_name || ''') if nobody uses it any more',
	       age(xmin)::bigint, 0 FROM pg_replication_slots WHERE xmin IS NOT NULL) s
WHERE old > 1 OR behind > 1000
ORDER BY greatest(behind, old * 100) DESC LIMIT 1`

func checkSnapshots(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	var who, remedy string
	var behind int64
	var old float64
	var hidden bool
	err := ask1(ctx, tx, "SELECT NOT pg_has_role('pg_read_all_stats', 'USAGE')", nil, &hidden)
	if err != nil {
		return nil, err
	}
	var found []finding
	if hidden {
		found = append(found, finding{"", unseen, "the snapshots of other roles", "GRANT pg_read_all_stats, or pg_monitor, to this role"})
	}
	err = ask1(ctx, tx, snapshotsSQL, nil, &who, &remedy, &behind, &old)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		if !hidden {
			found = append(found, ok("none"))
		}
		return found, nil
	case err != nil:
		return nil, err
	}
	return append(found, judgeSnapshot(who, remedy, behind, time.Duration(old*1e9))), nil
}

func judgeSnapshot(who, remedy string, behind int64, old time.Duration) finding {
	says := fmt.Sprintf("the oldest is that of %s, %s old and %s behind", who, brief(old), count(int(behind), "transaction"))
	if old > time.Minute || behind > 10000 {
		return finding{"", warning, says + ": nothing behind it can be vacuumed, and leases get several times slower", remedy}
	}
	return ok("%s", says)
}

// checkExpiry finds leases that the server's clock has left behind.
func checkExpiry(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	rows, _ := tx.Query(ctx, `SELECT name, extract(epoch FROM remaining)::float8, extract(epoch FROM ttl)::float8
		FROM pglock.list_leases() WHERE remaining > 2 * ttl`, pgx.QueryExecModeExec)
	var found []finding
	var name string
	var left, ttl float64
	_, err := pgx.ForEachRow(rows, []any{&name, &left, &ttl}, func() error {
		found = append(found, finding{"", warning, fmt.Sprintf("lease %q has %s left, more than twice its TTL of %s: the server's clock has gone back", name, brief(time.Duration(left*1e9)), brief(time.Duration(ttl*1e9))),
			"if its holder is gone, pglock release " + name + " --force"})
		return nil
	})
	if len(found) == 0 && err == nil {
		found = []finding{ok("no lease runs longer than it may")}
	}
	return found, err
}

func checkProtection(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	rows, _ := tx.Query(ctx, listProtectedSQL, pgx.QueryExecModeExec)
	tables, err := pgx.CollectRows(rows, pgx.RowToStructByPos[protectedTable])
	if err != nil {
		return nil, err
	}
	var found []finding
	for _, p := range tables {
		switch {
		case !p.Enabled:
			found = append(found, finding{"", danger, "the triggers of " + p.Table + " are disabled: it takes every write", "ALTER TABLE " + p.Table + " ENABLE TRIGGER USER"})
		case len(p.Gaps) > 0:
			found = append(found, finding{"", danger, "of " + p.Table + " these take writes without a lease: " + strings.Join(p.Gaps, ", "),
				fmt.Sprintf("SELECT pglock.protect('%s', '%s'), again", strings.ReplaceAll(p.Table, "'", "''"), strings.ReplaceAll(p.Pattern, "'", "''"))})
		}
	}
	if len(tables) == 0 {
		found = []finding{ok("no table is protected")}
	} else if len(found) == 0 {
		found = []finding{ok("%s protected, none open", count(len(tables), "table"))}
	}
	return found, nil
}
