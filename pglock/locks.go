package pglock

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// LockInfo is what the server says about an advisory lock that somebody holds or
// waits for.
type LockInfo struct {
	Key     Key    // of a lock of this Client as it was given, else the number or the pair
	Name    string // what KeyOf was given, for a lock of this Client; else ""
	Own     bool   // this Client's; false: somebody else's, by this package or not
	Shared  bool
	Granted bool      // false: it waits
	Pid     int32     // the backend; 0: a prepared transaction
	Since   time.Time // of a wait, or of a lock of this Client; else when its transaction began, zero where unknown
	Role    string
	Program string // application_name
}

const locksSQL = `SELECT l.objsubid, l.classid, l.objid, l.mode = 'ShareLock', l.granted, coalesce(l.pid, 0),
	coalesce(l.waitstart, a.xact_start), coalesce(a.usename::text, ''), coalesce(a.application_name, '')
FROM pg_locks l LEFT JOIN pg_stat_activity a USING (pid)
WHERE l.locktype = 'advisory' AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
ORDER BY l.objsubid, l.classid, l.objid, l.granted DESC, l.waitstart, l.pid`

// Locks returns every advisory lock of this database that is held or waited for,
// whoever's, by key, and for each first who holds it. The server knows numbers
// only: names are those of this Client's own locks. It takes no row locks, and
// needs no schema. One statement, on a connection of its own (PostgreSQL manual,
// 54.12 pg_locks):
//
//	SELECT * FROM pg_locks WHERE locktype = 'advisory'
func (c *Client) Locks(ctx context.Context) ([]LockInfo, error) {
	ctx, leave, err := c.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	conn, err := c.dial(ctx)
	if err != nil {
		return nil, c.ended(ctx, err)
	}
	defer closeConn(conn)
	rows, _ := conn.Query(ctx, locksSQL) // its error comes with the rows
	infos, err := pgx.CollectRows(rows, scanLock)
	if err != nil {
		return nil, c.ended(ctx, fmt.Errorf("list: %w", err))
	}
	c.bank.recognise(infos)
	return infos, nil
}

func scanLock(row pgx.CollectableRow) (info LockInfo, err error) {
	var objsubid int16
	var classid, objid uint32
	var since *time.Time
	err = row.Scan(&objsubid, &classid, &objid, &info.Shared, &info.Granted, &info.Pid, &since, &info.Role, &info.Program)
	if since != nil {
		info.Since = *since
	}
	info.Key = keyInLocks(objsubid, classid, objid, info.Shared)
	return info, err
}

// recognise marks what is this client's.
func (b *bank) recognise(infos []LockInfo) {
	type place struct {
		pid int32
		id  lockID
	}
	held := map[place]*Lock{}
	for _, l := range b.client.locks() {
		if first := held[place{l.session.pid, l.key.id()}]; first == nil || l.since.Before(first.since) {
			held[place{l.session.pid, l.key.id()}] = l
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	sessions := map[int32]*session{}
	for s := range b.sessions {
		sessions[s.pid] = s
	}
	for i := range infos {
		info := &infos[i]
		s := sessions[info.Pid]
		if s == nil {
			continue
		}
		info.Own = true
		if l := held[place{info.Pid, info.Key.id()}]; l != nil && info.Granted {
			info.Key, info.Name, info.Since = l.key, l.key.name, l.since
		} else if s.waits != nil && s.waits.id() == info.Key.id() {
			info.Key, info.Name = *s.waits, s.waits.name
		}
	}
}
