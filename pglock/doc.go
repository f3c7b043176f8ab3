// Package pglock takes locks in PostgreSQL: row locks, advisory locks, and
// leases whose tokens the data itself can check.
//
// What lives in your transaction is a function that takes your transaction:
// [LockRow], [LockTx], [Fence], [Present]. What outlives one is a method on
// [Client] that returns a handle to release: [Client.Lock], [Client.Acquire].
// Leases and fences need the schema pglock, which the package migrations applies;
// row locks and advisory locks need nothing.
//
// # Which lock do I need?
//
//	the work                                             take
//	can be done twice without harm (idempotent)          nothing
//	is a change that commutes: SET n = n + 1             nothing: the UPDATE locks its row
//	is a queue that only one process reads               nothing
//	is a queue that many processes read                  LockRows, ForUpdate.SkipLocked
//	changes a row by what was read from it               LockRow
//	the same, but conflicts are rare, or a person        package optimistic: no lock, a
//	  looks at the row between reading and writing       version is compared when writing
//	concerns something that has no row,                  LockTx
//	  and fits into one transaction
//	outlives a transaction, and twice at once            Client.WithLock: a session
//	  is a waste but no harm                             advisory lock
//	outlives a transaction, and a holder that hangs      Client.WithLease, and
//	  must be replaced; it writes to this database       Lease.InTx for each write
//	is for one process of many, for as long as it lives  Client.Elect
//	the lock is in another service, the data here        Fence, with that service's token
//	the lock is here, the data somewhere else            Client.WithLease, and Lease.Token
//	                                                     for what can refuse a lower one
//
// Where nothing can refuse a late write (a mail that is sent, an API that takes
// no token), a lease makes collisions rare and no more. Make that work
// idempotent.
//
// # Why a lease is not enough
//
// A lock must not be kept for ever by a process that has died, so a lease ends
// by itself (Gray and Cheriton, Leases: An Efficient Fault-Tolerant Mechanism for
// Distributed File Cache Consistency, 1989). But from outside, a process that is
// dead and one that is slow look the same. A holder can be paused at any line,
// for any time: by its garbage collector, a full disk, a starved processor, a
// packet that is late. Its lease runs out, another process is granted it and
// writes, and then the first goes on where it stopped and overwrites that with
// what it had computed before. To look at the clock first does not help: the
// pause can come between the look and the write (Kleppmann, How to do distributed
// locking, 2016).
//
// The remedy is in the same article. Each grant comes with a number that is
// higher than all before, the fencing token. Every write carries the token of its
// lease, and the resource refuses what is lower than the highest it has seen. So
// the time limit decides how soon another may go on, and the token decides whose
// write counts.
//
// # What each lock promises, and when it ends
//
// A row lock (PostgreSQL manual, 13.3.2 Row-Level Locks) and an advisory lock in
// a transaction (13.3.5 Advisory Locks) end with their transaction, and so does
// what was written under them: when the session is cut off, the write is gone
// with the lock. They need no token. There is no time limit either: a process
// that is paused inside its transaction keeps everybody waiting, unless
// [SetHoldTimeout] has the server end such a session. [SetLockTimeout] bounds
// the wait.
//
// A session advisory lock, [Lock], belongs to a connection of the client's own and
// ends with it; so do those that share the connection, as many as the client holds.
// It has no time limit: a process that hangs keeps it for as long as its machine
// answers for the connection. And when the connection breaks, the server may give
// the lock to another before the holder knows: Context ends within 5 s, and what
// is written meanwhile is not refused. Advisory locks are in memory and don't move
// to a standby. A client that holds none has no connection open for them.
//
// The server keeps all locks of all sessions in one table, whose size is fixed when
// it starts. A client stops at half of the room there is, with an error that says
// so ([FullError]): two clients that both go that far can fill it, and then
// everybody's transactions fail.
//
// A [Lease] is a row with a deadline. At most one unexpired holder has a name, by
// the database's clock, which is the only one that counts. [Client.Acquire]
// serves those who wait in the order in which they came; a [Client.TryAcquire]
// overtakes nobody. The client renews each lease when a third of its TTL has
// passed, until Release or Client.Close, or the end of the process. When the
// holder dies, the next in line has the lease once the TTL has passed since the
// last renewal and no transaction that Guard admitted is open. A renewal never
// changes the token and never revives what has ended; to acquire again is a new
// tenure with a new token.
//
// # The deadline
//
// [Lease.Deadline] is how far the holder knows that it holds: the time, by its
// own monotonic clock, before the last successful statement was sent, plus the
// time left that the answer gave, less a margin of 1 ms and a five-hundredth for
// clocks that don't run alike. It comes before the database's, unless their rates
// differ by more than that. When it passes, [Lease.Context] ends with the cause
// [ErrLost], whatever the network does; a process that was stopped learns it when
// it wakes. [Lease.Err] looks at the clock each time. Both save work that would be
// in vain. Neither is proof: the next pause can begin right after, and a clock
// that stands still while the machine is suspended knows nothing of it.
//
// # Guard, InTx, Present, Fence
//
// [Lease.Guard] is the proof. It asks in your transaction whether name, token and
// tenure still stand, and keeps the row locked so that nobody can be granted the
// lease before that transaction has ended, even if the lease expires meanwhile.
// If the lease is lost the transaction is aborted and nothing of it can commit.
// At READ COMMITTED an expired lease is lost; at REPEATABLE READ and above one
// that expired and that nobody took passes, and one that ended since the
// snapshot is SQLSTATE 40001: run the transaction again. [Lease.InTx] begins,
// guards and presents, runs your function and commits.
//
// While a guarded transaction is open, Release waits for it, for 5 s or the time
// left, whichever is less, and then says so with a [BlockedError]; the lease is
// still held.
//
// [Fence] is for tokens of locks that live elsewhere: etcd's revisions,
// ZooKeeper's zxids, any positive number that only goes up. It remembers the
// highest token that was accepted for a resource, in your transaction, and refuses
// a lower one. It is weaker than Guard: a stale holder is refused only after its
// successor's Fence. Call either before the first read that the write depends on,
// so that what others wrote before is in what you read.
//
// All of them bound the pause too. They lower idle_in_transaction_session_timeout
// for the transaction to the lease's TTL, Fence to 30 s, unless SetHoldTimeout was
// called before: a writer that is paused inside its transaction is cut off, those
// who wait go on, and its late COMMIT fails.
//
// A write that asks none of them is not checked, unless its table is protected:
//
//	SELECT pglock.protect('accounts', 'accounts/%')
//
// Such a table refuses every INSERT, UPDATE, DELETE and TRUNCATE of a transaction
// that has not presented a lease whose name is LIKE the pattern, and looks at the
// lease itself with each statement. InTx presents its lease; [Present] is Guard
// that does so in a transaction of yours; [Explain] turns the refusal into an
// error of this package. The table is tied to names, not each row to its lease,
// and the table's owner, a superuser, a role with the privilege TRIGGER on it and
// session_replication_role = replica can get around it. So what logical
// replication applies is not refused, whether or not the subscriber's table is
// protected; those who write there present leases of the subscriber's own.
//
// # Failover
//
// With synchronous replication the commit of a grant waits for the standby; where
// that wait was cancelled, acquiring returns an error and no lease. With
// asynchronous replication the last grants can be lost: the new primary may grant
// a lease that somebody still believes to hold, until the next renewal tells.
// Guard on the new primary refuses the one whose grant was lost.
//
// Tokens don't repeat, even then. A promotion begins a new timeline of the WAL
// (PostgreSQL manual, Continuous Archiving, Timelines). Each grant compares it with
// the one that tokens were last drawn on; where it differs, tokens go on from the
// seconds since 2020 times 2^22, above what the lost branch can have granted. Only
// there do tokens lean on the clock, and they never go below the last one. A new
// connection also compares the cluster's system identifier, which is another where
// a dump was restored. What shows neither, such as a snapshot of the disk put
// back, can repeat tokens: call
//
//	SELECT pglock.new_epoch()
//
// before clients come back. Two primaries at once are two databases; to keep
// that from happening is the task of whatever does the failover.
//
// # What is not promised
//
//   - Shared (reader and writer) leases, and leases for more than one holder.
//     Advisory locks have [Key.Shared].
//   - A lease acquired inside your transaction: nobody would see it before
//     COMMIT, and a rollback would undo it.
//   - Protection between sessions of one database role: by name and token they
//     can renew and release each other's leases. Those of another role can't,
//     unless they may call pglock.force_release.
//   - Secrecy: names, owners and tokens are shown to every role that may call the
//     functions.
//   - Anything against code that doesn't ask, or that lies: leases and advisory
//     locks bind those who take them, and Fence believes the token it is given.
//   - Any order between the grants of different names.
//   - Deadlock detection among leases, and among locks of [Client.Lock], which are
//     held by other sessions than those that wait: two processes that each hold
//     what the other waits for wait until a context ends. [Client.AcquireAll] and
//     [Client.LockAll] take several in an order that rules this out. Among row locks and [LockTx] PostgreSQL finds
//     the deadlock and aborts one side.
//   - Progress while the database is down. Leases then end at their deadlines,
//     and nothing is granted.
package pglock
