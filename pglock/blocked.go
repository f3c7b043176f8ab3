package pglock

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// BlockInfo is a backend that waits for a lock or is in the way of one that does.
// What the server hides from the role is zero, and Query then says so; a member
// of pg_read_all_stats (pg_monitor is one) sees all.
type BlockInfo struct {
	Pid       int32   // 0: a transaction that was prepared and has no backend
	BlockedBy []int32 // those in its way, 0 for a prepared transaction; empty: it waits for nothing

	Waits    string    // what for: "row (0,3) of accounts", "advisory lock 42", "table accounts"; empty: nothing
	Mode     string    // the lock that it wants there, for example ExclusiveLock
	Relation string    // of a row or a table
	Key      Key       // of an advisory lock, else the zero Key
	Lease    string    // whose row it waits for; empty if it is none, or the role may not read pglock.leases
	Since    time.Time // when the wait began; zero in its first moments

	Role    string
	Program string // application_name
	Host    string // empty: a unix socket
	State   string // active, idle in transaction and so on
	Query   string // the last one: what holds a lock may have been an earlier one
	TxSince time.Time
}

// A wait for a row is a wait for the transaction that has it, and the row is the
// one whose tuple lock the waiter was granted; who comes after waits for that
// tuple lock. pg_locks is read once, and nothing else is opened but catalogs.
const blockedSQL = `WITH locks AS MATERIALIZED (SELECT * FROM pg_locks),
waits AS MATERIALIZED (
	SELECT l.*, t.relation AS row_relation, t.page AS row_page, t.tuple AS row_tuple,
	       ARRAY(SELECT DISTINCT b FROM unnest(pg_blocking_pids(l.pid)) b ORDER BY b) AS blockers
	FROM locks l JOIN pg_stat_activity a USING (pid)
	LEFT JOIN LATERAL (SELECT * FROM locks t WHERE t.pid = l.pid AND t.locktype = 'tuple'
	                   AND (l.locktype = 'transactionid' AND t.granted OR l.locktype = 'tuple' AND NOT t.granted) LIMIT 1) t ON true
	WHERE NOT l.granted AND a.datname = current_database()),
involved AS (SELECT pid FROM waits UNION SELECT unnest(blockers) FROM waits)
SELECT i.pid, coalesce(w.blockers, '{}'), coalesce(w.locktype, ''), coalesce(w.mode, ''),
       coalesce(coalesce(w.row_relation, w.relation)::regclass::text, ''),
       coalesce(format('(%s,%s)', w.row_page, w.row_tuple), '(,)'),
       coalesce(w.row_relation = (SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
	                                  WHERE n.nspname = 'pglock' AND c.relname = 'leases'), false),
       coalesce(w.transactionid::text, w.virtualxid, ''),
       coalesce(w.classid::bigint, 0), coalesce(w.objid::bigint, 0), coalesce(w.objsubid::int, 0), coalesce(w.waitstart, '0001-01-01 00:00Z'),
       coalesce(a.usename::text, ''), coalesce(a.application_name, ''), coalesce(host(a.client_addr), ''),
       coalesce(a.state, ''), coalesce(a.query, ''), coalesce(a.xact_start, '0001-01-01 00:00Z')
FROM involved i LEFT JOIN waits w USING (pid) LEFT JOIN pg_stat_activity a USING (pid)
ORDER BY w.waitstart NULLS LAST, i.pid`

// Blocked returns the backends that wait for a lock in this database, row locks,
// advisory locks and the rows of leases included, and those in their way, longest
// wait first and then those that wait for nothing themselves. It takes no row
// locks and waits for none, needs neither the schema pglock nor any grant, and
// works on a standby. It opens a connection for each call.
//
// One statement, of which this is the heart; where somebody waits for the row of
// a lease another looks up its name:
//
//	SELECT pid, pg_blocking_pids(pid), locktype, relation::regclass, mode, waitstart
//	FROM pg_locks WHERE NOT granted
func (c *Client) Blocked(ctx context.Context) ([]BlockInfo, error) {
	ctx, leave, err := c.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, c.ended(ctx, fmt.Errorf("list: %w", err))
	}
	defer closeConn(conn)
	rows := map[string][]int{} // of leases: which infos wait for them
	infos, err := blocked(ctx, conn, rows)
	if err != nil {
		return nil, c.ended(ctx, fmt.Errorf("list: %w", err))
	}
	if len(rows) > 0 {
		nameLeases(ctx, conn, rows, infos)
	}
	return infos, nil
}

func blocked(ctx context.Context, conn *pgx.Conn, leases map[string][]int) ([]BlockInfo, error) {
	answer, err := conn.Query(ctx, blockedSQL)
	if err != nil {
		return nil, err
	}
	var infos []BlockInfo
	err = read(answer, func(r pgx.Rows) error {
		var info BlockInfo
		var kind, ctid, xid string
		var ofLease bool
		var classid, objid int64
		var sub int32
		err := r.Scan(&info.Pid, &info.BlockedBy, &kind, &info.Mode, &info.Relation, &ctid, &ofLease, &xid,
			&classid, &objid, &sub, &info.Since, &info.Role, &info.Program, &info.Host, &info.State, &info.Query, &info.TxSince)
		if err != nil {
			return err
		}
		switch {
		case kind == "":
		case kind == "advisory":
			info.Key = Key{space: space(sub), number: classid<<32 | objid}
			info.Waits = "advisory lock " + info.Key.String()
		case ctid != "(,)":
			info.Waits = "row " + ctid + " of " + info.Relation
		case kind == "relation":
			info.Waits = "table " + info.Relation
		case info.Relation != "":
			info.Waits = kind + " of " + info.Relation
		case kind == "transactionid" || kind == "virtualxid":
			info.Waits = "the end of transaction " + xid
		default:
			info.Waits = kind
		}
		if ofLease {
			leases[ctid] = append(leases[ctid], len(infos))
		}
		infos = append(infos, info)
		return nil
	})
	return infos, err
}

const leaseRowsSQL = `SELECT ctid::text, name FROM pglock.leases WHERE ctid = ANY ($1::text[]::tid[])`

// nameLeases does without the names where the role may not read the table, and
// where somebody has it locked. The timeout is set before the statement is sent:
// the server already opens the table to parse it.
func nameLeases(ctx context.Context, conn *pgx.Conn, rows map[string][]int, infos []BlockInfo) {
	_ = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SELECT set_config('lock_timeout', '100', true)"); err != nil {
			return err
		}
		answer, err := tx.Query(ctx, leaseRowsSQL, slices.Collect(maps.Keys(rows)))
		if err != nil {
			return err
		}
		return read(answer, func(r pgx.Rows) error {
			var ctid, name string
			err := r.Scan(&ctid, &name)
			for _, i := range rows[ctid] {
				infos[i].Lease = name
			}
			return err
		})
	})
}
