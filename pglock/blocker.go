package pglock

import (
	"context"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// The rows that a second look can't lock either are those that were refused,
// and nobody is blamed for a lock on another row. A row's xmax is who locks it,
// or the multixact of several; which of the two can't be told from SQL, so that
// both are looked up. Of the members of a multixact, those that the wanted lock
// can stand beside are not in the way. Only who can have a row lock in the table
// counts. A lock taken under a savepoint that was released since bears a number
// that pg_locks shows no more: it is known by whose it can only be.
const blockersSQL = `WITH seen AS MATERIALIZED (
{seen}
), free AS MATERIALIZED (
{seen}
{lock} SKIP LOCKED
), blocked AS (
	SELECT s.pglock_table, s.pglock_row, s.pglock_xmax || ARRAY(
		SELECT m.xid FROM pg_get_multixact_members(
			CASE WHEN mxid_age(s.pglock_xmax) BETWEEN 1 AND (SELECT max(mxid_age(d.datminmxid)) FROM pg_database d) THEN s.pglock_xmax END) m
		WHERE m.mode = ANY ('{modes}')) AS xids
	FROM seen s
	WHERE s.pglock_xmax <> '0' AND NOT EXISTS (
		SELECT FROM free f WHERE f.pglock_table = s.pglock_table AND f.pglock_row = s.pglock_row)
), held AS MATERIALIZED (
	SELECT l.locktype, l.relation, l.transactionid, l.virtualtransaction, l.pid FROM pg_locks l
	WHERE l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
		AND (l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock'
		OR l.locktype = 'relation' AND l.mode <> 'AccessShareLock' AND l.relation IN (SELECT pglock_table FROM blocked)
			AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database()))
), suspect AS (
	SELECT b.pglock_table, b.pglock_row, x.virtualtransaction, x.pid, bool_or(x.transactionid = ANY (b.xids)) AS sure
	FROM blocked b
	JOIN held r ON r.locktype = 'relation' AND r.relation = b.pglock_table
	JOIN held x ON x.locktype = 'transactionid' AND x.virtualtransaction = r.virtualtransaction
	GROUP BY 1, 2, 3, 4
), judged AS (
	SELECT *, bool_or(sure) OVER w AS known, count(*) OVER w AS suspects FROM suspect
	WINDOW w AS (PARTITION BY pglock_table, pglock_row)
)
SELECT array_agg(DISTINCT coalesce(j.pid, 0)), min(a.xact_start)
FROM judged j LEFT JOIN pg_stat_activity a ON a.pid = j.pid
WHERE j.sure OR NOT j.known AND j.suspects = 1`

// conflicting are, for each strength, the modes of a multixact's members that
// it can't stand beside.
var conflicting = [...]string{
	noKeyUpdate: "{sh,fornokeyupd,nokeyupd,forupd,upd}",
	update:      "{keysh,sh,fornokeyupd,nokeyupd,forupd,upd}",
	share:       "{fornokeyupd,nokeyupd,forupd,upd}",
	keyShare:    "{forupd,upd}",
}

// blockers asks who is in the way of a query that was refused, and since when.
// It locks rows again and may fail, which aborts tx: it needs a savepoint.
func (q lockQuery) blockers(ctx context.Context, tx pgx.Tx, how RowLock, args []any, into *BlockedError) {
	if !q.single {
		return
	}
	seen := q.sql[:q.from] + ", tableoid AS pglock_table, ctid AS pglock_row, xmax AS pglock_xmax\n" + q.sql[q.from:]
	sql := strings.NewReplacer("{seen}", seen, "{lock}", strengths[how.strength], "{modes}", conflicting[how.strength]).Replace(blockersSQL)
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return
	}
	var since *time.Time
	// A view, for one, has no xmax: then nobody is named.
	if _, err := pgx.ForEachRow(rows, []any{&into.Pids, &since}, func() error { return nil }); err == nil && since != nil {
		into.Since = *since
	}
}
