// Package optimistic writes to rows without locking them first: it compares a
// version column when it writes, and so notices that somebody else was faster.
//
// # Which verb
//
//	the version comes from               take
//	a person, a form, an If-Match        Table.CompareAndSet, Table.Delete: never retry
//	a person, for many rows              Table.CompareAndSetMany: one statement
//	a person, for a part of an aggregate Table.Touch on its root, first
//	this program, a moment ago           Table.Update: reads, calls your function, retries
//	SQL of your own                      Exec: makes sure that it changed one row
//	nowhere: SET n = n + 1 commutes      the plain UPDATE, which needs no version
//	nowhere: a rule over several rows    RunInTx: runs the whole transaction again
//
// The difference between the first two is who decides. What a person decided,
// they decided on what they saw: when the row has changed they have to look
// again. What a function computes it can compute again.
//
// Where most writers meet the same row, a lock from the start (pglock.LockRow) is
// simpler. Update goes over to one by itself after two conflicts.
//
// # What needs no comparison
//
// A change that commutes with the others is right in any order. It is one plain
// statement, the fastest of all on a hot row, and counts for those who compare:
//
//	UPDATE accounts SET balance = balance + 5, version = version + 1 WHERE id = 1
//
// What belongs together but stands in several tables, an order and its lines, is
// guarded by one version, that of its root. Who changes a line counts the order
// up first, in the same transaction, by [Table.Touch] or by hand with [Exec]:
//
//	UPDATE orders SET version = version + 1 WHERE id = 7 AND version = 3
//	UPDATE lines SET amount = 2 WHERE order_id = 7 AND line = 1
//
// A rule over rows that the writer reads and doesn't write ("somebody else is on
// call, so I may leave") has no version to compare. There the database finds the
// conflict, at SERIALIZABLE, and the whole transaction runs again: [RunInTx].
//
// # What the table needs
//
// A key column with a PRIMARY KEY or UNIQUE constraint of its own, and a bigint
// version column that is never NULL:
//
//	CREATE TABLE accounts (
//		id      bigint PRIMARY KEY,
//		balance bigint NOT NULL,
//		version bigint NOT NULL DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
//	);
//
// The key may have several columns: see WithKey. That is what a partitioned table
// needs, whose unique key contains the partition key. Table.Verify is an error
// where a table breaks this, and says all at once; Table.Inspect has advice too.
//
// In a table that has rows already the constant comes first, so that it isn't
// rewritten:
//
//	ALTER TABLE accounts ADD COLUMN version bigint NOT NULL DEFAULT 1;
//	ALTER TABLE accounts ALTER COLUMN version
//		SET DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
//
// Versions count up by one with each update. A new row must not begin at a
// number that an earlier row with its key may have had: otherwise delete and
// insert bring an old version back to life, and whoever still holds it
// overwrites a row they never saw (the ABA problem). Insert sees to that by
// itself, with the database's clock in microseconds; the default above is for
// everybody else who inserts. What is left is a clock set back, or a failover to
// a server whose clock is behind, by more than the time between the delete and
// the insert. The numbers stay below 2^53 until the year 2255, so that a browser
// can carry them.
//
// Every other writer has to count too: an UPDATE that leaves the version alone
// is one that nobody notices. SELECT pglock.guard_version('accounts') adds a
// trigger that counts for those who forget.
//
// The version is a column and nothing that the server keeps for itself. xmin
// looks as if it were free, and changes with a dump and restore.
//
// # In a transaction of yours
//
// Functions take a pool or a connection, and commit by themselves, or your
// pgx.Tx, and leave COMMIT to you. SQL and SQLTx do the same for database/sql. There
// the isolation level decides what a writer who came too late is told:
//
//	                     READ COMMITTED       REPEATABLE READ, SERIALIZABLE
//	CompareAndSet, …Many ErrConflict          ErrRetryOutside if the row changed after the
//	Touch, Delete, Exec                       snapshot, ErrConflict if it had before
//	Update               retries inside       ErrRetryOutside
//	tx afterwards        usable               aborted after ErrRetryOutside
//	the current row is   the newest           the snapshot's
//
// ErrRetryOutside means that the whole transaction has to run again, on a new
// snapshot. [RunInTx] does that.
//
// # After an error
//
// Any error but ErrUnknownCommit means that nothing was written, unless its text
// says otherwise: a key that isn't unique, and a trigger that undoes the
// increment, are noticed only in what a write returns. ErrUnknownCommit means
// that the connection ended between the write and its answer. A context that
// ends while a statement runs ends the connection too, by pgx's default; with
// pgconn.CancelRequestContextWatcherHandler in the pool's config the server is
// asked to stop instead, and mostly says that it did.
//
// # Over HTTP
//
// A version makes a strong ETag. IfMatch and IfNoneMatch read what a client
// sends back, and Status says an error in HTTP's words: examples/httpetag is a
// server and a client.
//
// # What no client can see
//
// Not seen is a wait for a synchronous standby that was cancelled on the server:
// PostgreSQL reports it as success with a warning.
package optimistic
