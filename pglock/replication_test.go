package pglock_test

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgserver"
	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
)

// A protected table can be published and subscribed to. Protection goes on at
// the publisher; what was let through there is applied at a subscriber whose
// table is protected too, without any lease, because what applies it works as a
// replica, for which triggers don't fire. Local writers there are refused. The
// control has a partition's trigger fire always: nothing is applied any more.
// (A table's own would not, being one for statements, of which applying has none.)
func TestProtect_LogicalReplication(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t, pgserver.With("wal_level", "logical"), pgserver.With("max_wal_senders", "8"),
		pgserver.With("max_replication_slots", "8"), pgserver.With("max_logical_replication_workers", "4"),
		pgserver.With("max_worker_processes", "8"), pgserver.With("wal_retrieve_retry_interval", "100ms"),
		pgserver.With("log_statement", "ddl"))
	admin := pgtest.PoolOn(t, server.DSN())
	database := func(name string) *pgxpool.Pool {
		exec(t, admin, `CREATE DATABASE `+name)
		pool := poolBy(t, server.DSN(), func(config *pgxpool.Config) { config.ConnConfig.Database = name })
		if err := migrations.Up(t.Context(), pool); err != nil {
			t.Fatal(err)
		}
		exec(t, pool, `CREATE TABLE accounts (id int PRIMARY KEY, balance int);
			CREATE TABLE parts (id int PRIMARY KEY, n int) PARTITION BY RANGE (id);
			CREATE TABLE parts_1 PARTITION OF parts FOR VALUES FROM (0) TO (100);
			SELECT pglock.protect('accounts', 'accounts/%'), pglock.protect('parts', 'accounts/%')`)
		return pool
	}
	publisher, subscriber := database("publisher"), database("subscriber")
	token := one[int64](t, publisher, `SELECT token FROM pglock.acquire('{accounts/1}', '1 h')`)
	write := func(statements ...string) {
		t.Helper()
		inTx(t, publisher, pgx.ReadCommitted, func(tx pgx.Tx) {
			exec(t, tx, `SELECT pglock.present('accounts/1', $1)`, token)
			for _, sql := range statements {
				exec(t, tx, sql)
			}
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
		})
	}
	arrived := func(what, sql string) {
		t.Helper()
		until(t, subscriber, what, `SELECT coalesce((SELECT string_agg(a::text, ' ' ORDER BY id) FROM accounts a), '') || '/' ||
			coalesce((SELECT string_agg(p::text, ' ' ORDER BY id) FROM parts p), '') = $1`, sql)
	}
	write(`INSERT INTO accounts VALUES (1, 100)`, `INSERT INTO parts VALUES (1, 1)`)
	exec(t, publisher, `CREATE PUBLICATION shop FOR TABLE accounts, parts`)
	// Two databases of one cluster: the slot is made beforehand, or its creation
	// would wait for the transaction of CREATE SUBSCRIPTION.
	exec(t, publisher, `SELECT pg_create_logical_replication_slot('shop', 'pgoutput')`)
	dsn := pgtest.With(t, server.DSN(), "dbname", "publisher")
	exec(t, subscriber, `CREATE SUBSCRIPTION shop CONNECTION '`+dsn+`' PUBLICATION shop WITH (create_slot = false, slot_name = 'shop')`)
	t.Cleanup(func() { exec(t, subscriber, `DROP SUBSCRIPTION shop`) })

	arrived("the first copy", "(1,100)/(1,1)")
	write(`UPDATE accounts SET balance = 90`, `INSERT INTO accounts VALUES (2, 5)`, `DELETE FROM parts`, `INSERT INTO parts VALUES (2, 2)`)
	arrived("changes", "(1,90) (2,5)/(2,2)")
	write(`TRUNCATE parts`, `DELETE FROM accounts WHERE id = 2`)
	arrived("a truncation", "(1,90)/")
	for name, pool := range map[string]*pgxpool.Pool{"publisher": publisher, "subscriber": subscriber} {
		for _, sql := range []string{`UPDATE accounts SET balance = 0`, `INSERT INTO parts_1 VALUES (3, 3)`, `TRUNCATE parts_1`} {
			if _, err := pool.Exec(t.Context(), sql); sqlState(err) != "PW004" {
				t.Errorf("%s at the %s: %v, want PW004", sql, name, err)
			}
		}
	}

	// The control. The worker is refused again and again, and the row stays away.
	exec(t, subscriber, `ALTER TABLE parts_1 ENABLE ALWAYS TRIGGER pglock_protect_row`)
	write(`INSERT INTO parts VALUES (4, 4)`)
	refused := func() bool {
		_, after, _ := strings.Cut(server.Log(), "ENABLE ALWAYS")
		return strings.Contains(after, "parts_1 is protected: no lease was presented")
	}
	for end := time.Now().Add(limit); !refused(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("a trigger that fires always refuses nothing: this test shows nothing")
		}
	}
	exec(t, subscriber, `ALTER TABLE parts_1 ENABLE TRIGGER pglock_protect_row`)
	arrived("what was refused", "(1,90)/(4,4)")
}
