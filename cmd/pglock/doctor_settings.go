package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// settings are what this session has got for a parameter, without what this
// transaction set; a duration as its number of milliseconds or seconds.
func settings(ctx context.Context, tx pgx.Tx, names ...string) (map[string]string, error) {
	rows, _ := tx.Query(ctx, "SELECT name, CASE WHEN name LIKE 'tcp%' THEN setting ELSE reset_val END FROM pg_settings WHERE name = ANY ($1::text[])",
		pgx.QueryExecModeExec, names)
	found := map[string]string{}
	var name, value string
	_, err := pgx.ForEachRow(rows, []any{&name, &value}, func() error {
		found[name] = value
		return nil
	})
	return found, err
}

func number(s string) (n int64) {
	_, _ = fmt.Sscan(s, &n) // an unknown setting counts as zero, which is off
	return n
}

// cuts are timeouts that end what has a lock or waits for one, and the value below
// which that is no longer what a timeout is for.
var cuts = []struct {
	name  string
	below time.Duration
	level level
	says  string
}{
	{"idle_session_timeout", 5 * time.Second, danger, "ends sessions that hold an advisory lock, whose watch may send nothing for 2.5 s"},
	{"transaction_timeout", 0, warning, "ends a transaction, and frees its locks, however busy it is"},
	{"idle_in_transaction_session_timeout", time.Second, warning, "ends a transaction whose client stops to think, with its locks"},
	{"statement_timeout", 10 * time.Second, warning, "ends LockRow and LockTx that wait for longer, as if they had failed"},
	{"lock_timeout", 100 * time.Millisecond, warning, "makes short waits for a lock fail, those of clients for a lease's row too"},
}

func checkTimeouts(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	names := make([]string, len(cuts))
	for i, c := range cuts {
		names[i] = c.name
	}
	values, err := settings(ctx, tx, names...)
	if err != nil {
		return nil, err
	}
	var found []finding
	for _, c := range cuts {
		set := time.Duration(number(values[c.name])) * time.Millisecond
		if set > 0 && (c.below == 0 || set < c.below) {
			found = append(found, finding{"", c.level, fmt.Sprintf("%s is %s for this role: it %s", c.name, brief(set), c.says),
				"ALTER ROLE … SET " + c.name + " = 0, or a higher value; SetLockTimeout and SetHoldTimeout bound single transactions"})
		}
	}
	if len(found) == 0 {
		found = []finding{ok("none that cuts a lock")}
	}
	return found, nil
}

// goneWarning is how long a client that vanished from the network may keep what its
// transaction has locked.
const goneWarning = 10 * time.Minute

func checkKeepalives(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	values, err := settings(ctx, tx, "tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count")
	if err != nil {
		return nil, err
	}
	if tx.Conn().PgConn().Conn().RemoteAddr().Network() == "unix" {
		return []finding{{"", unseen, "this connection is a unix socket, which has none", "ask over TCP"}}, nil
	}
	return []finding{judgeKeepalives(number(values["tcp_keepalives_idle"]), number(values["tcp_keepalives_interval"]), number(values["tcp_keepalives_count"]))}, nil
}

func judgeKeepalives(idle, interval, count int64) finding {
	after := time.Duration(idle+interval*count) * time.Second
	says := fmt.Sprintf("the server gives up a client that is gone from the network after %s", brief(after))
	if after == 0 || after > goneWarning {
		return finding{"", warning, says + ": until then its transactions keep their row locks. Pawl's own sessions set theirs to 15 s",
			"tcp_keepalives_idle = 60, tcp_keepalives_interval = 10, tcp_keepalives_count = 6 in postgresql.conf"}
	}
	return ok("%s", says)
}

func checkDurability(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	values, err := settings(ctx, tx, "fsync", "full_page_writes", "synchronous_commit")
	if err != nil {
		return nil, err
	}
	var found []finding
	for _, name := range []string{"fsync", "full_page_writes"} {
		if values[name] == "off" {
			found = append(found, finding{"", danger, name + " is off: a crash of the machine loses leases and tokens, and tokens come back", name + " = on in postgresql.conf"})
		}
	}
	if values["synchronous_commit"] == "off" {
		found = append(found, finding{"", warning, "synchronous_commit is off for this role. Leases and fences wait for the disk all the same; your own writes may be lost in a crash", "ALTER ROLE … SET synchronous_commit = on"})
	}
	if len(found) == 0 {
		found = []finding{ok("commits wait for the disk")}
	}
	return found, nil
}

// checkReplication counts standbys, as far as the role sees what they are.
func checkReplication(ctx context.Context, tx pgx.Tx) ([]finding, error) {
	values, err := settings(ctx, tx, "synchronous_standby_names", "synchronous_commit")
	if err != nil {
		return nil, err
	}
	var standbys, synchronous int
	var hidden bool
	err = ask1(ctx, tx, `SELECT count(*), count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')), NOT pg_has_role('pg_read_all_stats', 'USAGE')
		FROM pg_stat_replication`, nil, &standbys, &synchronous, &hidden)
	if err != nil {
		return nil, err
	}
	return []finding{judgeReplication(values["synchronous_standby_names"], values["synchronous_commit"], standbys, synchronous, hidden)}, nil
}

func judgeReplication(names, commit string, standbys, synchronous int, hidden bool) finding {
	waits := names != "" && commit != "off" && commit != "local"
	switch {
	case waits && hidden:
		return finding{"", unseen, "whether one of " + names + " is there, for which every commit waits", "GRANT pg_read_all_stats, or pg_monitor, to this role"}
	case waits && synchronous == 0:
		return finding{"", danger, "none of " + names + " is there: every commit waits for one, and no lease is granted or renewed",
			"bring the standby back, or ALTER SYSTEM RESET synchronous_standby_names and reload"}
	case waits:
		return ok("commits wait for %d of %d standbys", synchronous, standbys)
	case standbys > 0:
		return finding{"", warning, fmt.Sprintf("%s, and commits wait for none: a failover can lose the last grants, and a lease then has two holders until its TTL has passed. Tokens go on rising, so that fences and protected tables hold", count(standbys, "standby connection")),
			"set synchronous_standby_names, or accept it"}
	}
	return ok("no standby")
}
