package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// ask1 reads one row.
func ask1(ctx context.Context, tx pgx.Tx, sql string, args []any, into ...any) error {
	return tx.QueryRow(ctx, sql, append([]any{pgx.QueryExecModeExec}, args...)...).Scan(into...)
}

func checkServer(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	var version string
	var number int
	if err := ask1(ctx, tx, "SELECT version(), current_setting('server_version_num')::int", nil, &version, &number); err != nil {
		return nil, err
	}
	return []finding{judgeServer(version, number)}, nil
}

// lookalikes talk PostgreSQL's protocol, and don't keep its promises on locks.
var lookalikes = []string{"CockroachDB", "YB-", "Redshift", "Greenplum", "QuestDB", "Materialize", "Spanner", "CrateDB"}

func judgeServer(version string, number int) finding {
	name, _, _ := strings.Cut(version, " on ")
	for _, other := range lookalikes {
		if strings.Contains(version, other) {
			return finding{"", danger, name + " is no PostgreSQL: its locks promise something else", "use PostgreSQL 14 or later"}
		}
	}
	switch {
	case !strings.HasPrefix(version, "PostgreSQL "):
		return finding{"", danger, cut(oneLine(version), 80) + " is no PostgreSQL", "use PostgreSQL 14 or later"}
	case number < 140000:
		return finding{"", danger, name + " is too old: the functions of the schema need 14", "upgrade to PostgreSQL 14 or later"}
	case number >= 190000:
		return ok("%s, newer than what this version was tested with", name)
	}
	return ok("%s", name)
}

func checkRole(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	var standby, readOnly bool
	var level string
	err := ask1(ctx, tx, `SELECT pg_is_in_recovery(), current_setting('default_transaction_read_only')::bool,
		current_setting('default_transaction_isolation')`, nil, &standby, &readOnly, &level)
	if err != nil {
		return nil, err
	}
	switch {
	case standby:
		return []finding{{"", danger, "it is a standby: it grants no lease, and its advisory locks are not the primary's",
			"connect to the primary: target_session_attrs=read-write with all hosts in the DSN"}}, nil
	case readOnly:
		return []finding{{"", danger, "default_transaction_read_only is on: it grants no lease",
			"connect to a primary that takes writes, or set it off for this role"}}, nil
	}
	return []finding{ok("primary, transactions at %s", strings.ToUpper(level))}, nil
}

func checkPooler(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	var pid uint32
	if err := ask1(ctx, tx, "SELECT pg_backend_pid()", nil, &pid); err != nil {
		return nil, err
	}
	if told := tx.Conn().PgConn().PID(); told != pid {
		return []finding{{"", warning, fmt.Sprintf("there is one: backend %d answers for %d. Session advisory locks are refused through it, and waiters for a lease look by the clock instead of being woken", pid, told),
			"give clients of Lock and Acquire a DSN of the server itself; LockTx and leases go through the pooler"}}, nil
	}
	return []finding{ok("none between here and the server")}, nil
}

// checkAdvisory takes a lock that nobody uses, for the transaction that only looks.
func checkAdvisory(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	var taken bool
	var shown int
	key := rand.Int64()
	if err := ask1(ctx, tx, "SELECT pg_try_advisory_xact_lock($1::bigint)", []any{key}, &taken); err != nil {
		return nil, err
	}
	err := ask1(ctx, tx, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND granted
		AND (classid::bigint << 32) | objid::bigint = $1::bigint AND objsubid = 1`, []any{key}, &shown)
	if err != nil {
		return nil, err
	}
	if !taken || shown != 1 {
		return []finding{{"", danger, fmt.Sprintf("they are not PostgreSQL's: the server says that it locked (%t) a key nobody uses, and shows that %d times", taken, shown),
			"use leases there, or a PostgreSQL"}}, nil
	}
	return []finding{ok("they lock what they say")}, nil
}

// clockWarning is a distance that shows in what people read and compare.
const clockWarning = time.Second

func checkClock(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	var server time.Time
	sent := time.Now()
	if err := ask1(ctx, tx, "SELECT clock_timestamp()", nil, &server); err != nil {
		return nil, err
	}
	trip := time.Since(sent)
	distance := server.Sub(sent.Add(trip / 2)).Round(time.Millisecond)
	if max(distance, -distance) > clockWarning+trip/2 {
		ahead := "ahead of"
		if distance < 0 {
			ahead = "behind"
		}
		return []finding{{"", warning, fmt.Sprintf("the server's is %s %s this machine's. Leases don't mind, but times in logs and errors won't agree, nor will tokens after a failover if it is the server's that is wrong", brief(max(distance, -distance)), ahead),
			"let NTP set both"}}, nil
	}
	return []finding{ok("the server's is this machine's, give or take %s", brief(max(distance, -distance)+trip/2))}, nil
}

// checkNotify looks at the one queue of the whole server.
func checkNotify(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	var usage float64
	if err := ask1(ctx, tx, "SELECT pg_notification_queue_usage()", nil, &usage); err != nil {
		return nil, err
	}
	return []finding{judgeNotify(usage)}, nil
}

func judgeNotify(usage float64) finding {
	says := fmt.Sprintf("the queue of NOTIFY is %.1f %% full", usage*100)
	const remedy = "end the session that listens and sits in an open transaction: the oldest xact_start in pg_stat_activity, in any database"
	switch {
	case usage > 0.5:
		return finding{"", danger, says + ": when it is, every NOTIFY of this server fails, and with it the transactions that send one", remedy}
	case usage > 0.01:
		return finding{"", warning, says + ": somebody listens and doesn't read", remedy}
	}
	return ok("%s", says)
}

func checkPrepared(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	rows, _ := tx.Query(ctx, `SELECT gid, extract(epoch FROM clock_timestamp() - prepared)::float8 FROM pg_prepared_xacts
		WHERE database = current_database() ORDER BY prepared`, pgx.QueryExecModeExec)
	var found []finding
	var gid string
	var age float64
	_, err := pgx.ForEachRow(rows, []any{&gid, &age}, func() error {
		found = append(found, finding{"", warning, fmt.Sprintf("transaction %q has been prepared for %s: it keeps its row locks and holds back VACUUM, and outlives its client and a restart", gid, brief(time.Duration(age*1e9))),
			fmt.Sprintf("let its coordinator end it, or COMMIT PREPARED or ROLLBACK PREPARED '%s'", strings.ReplaceAll(gid, "'", "''"))})
		return nil
	})
	if len(found) == 0 && err == nil {
		found = []finding{ok("no transaction is")}
	}
	return found, err
}
