package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pawl-go/pawl/internal/pgserver"
	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
	"github.com/pawl-go/pawl/pglock"
)

// listening returns a connection and the notices that it hears.
func listening(t testing.TB, pool *pgxpool.Pool) (*pgx.Conn, *[]string) {
	t.Helper()
	heard := &[]string{}
	config := pool.Config().ConnConfig.Copy()
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { *heard = append(*heard, n.Message) }
	conn, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn, heard
}

// What was presented ends with the lease or goes on, in one transaction.
func TestProtect_WithinATransaction(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE accounts (balance int); INSERT INTO accounts VALUES (100);
		SELECT pglock.protect('accounts', 'accounts/%')`)
	const update = `UPDATE accounts SET balance = balance - 1`
	for i, tt := range []struct {
		name string
		do   func(t *testing.T, tx pgx.Tx, name string, token int64)
		want string
	}{
		{"presented", func(*testing.T, pgx.Tx, string, int64) {}, ""},
		{"renewed", func(t *testing.T, _ pgx.Tx, name string, token int64) {
			exec(t, pool, `SELECT pglock.renew(ARRAY[$1], ARRAY[$2::bigint])`, name, token)
		}, ""},
		{"expired, and taken by nobody", func(t *testing.T, _ pgx.Tx, name string, _ int64) {
			expire(t, pool, name)
			if one[bool](t, pool, `SELECT granted FROM pglock.acquire(ARRAY[$1], '1 h')`, name) {
				t.Error("it was granted beside the transaction")
			}
		}, ""},
		{"a savepoint released", func(t *testing.T, tx pgx.Tx, name string, token int64) {
			exec(t, tx, `SAVEPOINT s`)
			exec(t, tx, `SELECT pglock.present($1, $2)`, name, token)
			exec(t, tx, `RELEASE s`)
		}, ""},
		{"rolled back to a savepoint after it", func(t *testing.T, tx pgx.Tx, _ string, _ int64) {
			exec(t, tx, `SAVEPOINT s`)
			exec(t, tx, update)
			exec(t, tx, `ROLLBACK TO s`)
		}, ""},
		{"presented again and again", func(t *testing.T, tx pgx.Tx, name string, token int64) {
			for range 3 {
				exec(t, tx, `SELECT pglock.present($1, $2)`, name, token)
			}
			if n := one[int32](t, tx, `SELECT jsonb_array_length(current_setting('pglock.presented')::jsonb)`); n != 1 {
				t.Errorf("it counts %d times", n)
			}
		}, ""},
		{"with others", func(t *testing.T, tx pgx.Tx, name string, _ int64) {
			for _, other := range []string{"other/" + name, name + "/more"} {
				exec(t, tx, `SELECT pglock.present($1, (SELECT token FROM pglock.leases WHERE name = $1))`, other)
			}
		}, ""},
		{"the setting emptied", func(t *testing.T, tx pgx.Tx, _ string, _ int64) {
			exec(t, tx, `RESET pglock.presented`)
		}, "PW004"},
		{"released in the same transaction", func(t *testing.T, tx pgx.Tx, name string, token int64) {
			if one[string](t, tx, `SELECT state FROM pglock.release(ARRAY[$1], ARRAY[$2::bigint])`, name, token) != "released" {
				t.Error("it was not released")
			}
		}, "PW002"},
		{"released, and acquired anew", func(t *testing.T, tx pgx.Tx, name string, token int64) {
			exec(t, tx, `SELECT pglock.release(ARRAY[$1], ARRAY[$2::bigint])`, name, token)
			exec(t, tx, `SELECT pglock.acquire(ARRAY[$1], '1 h')`, name)
		}, "PW001"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			name := fmt.Sprintf("accounts/%d", i)
			exec(t, pool, `SELECT pglock.acquire(ARRAY[$1, $2, $3], '1 h')`, name, name+"/more", "other/"+name)
			token := one[int64](t, pool, `SELECT token FROM pglock.leases WHERE name = $1`, name)
			inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
				exec(t, tx, `SELECT pglock.present($1, $2)`, name, token)
				tt.do(t, tx, name, token)
				if _, err := tx.Exec(t.Context(), update); sqlState(err) != tt.want {
					t.Errorf("the write: %v, want SQLSTATE %q", err, tt.want)
				}
			})
		})
	}
}

// A prepared transaction holds takers off until it ends, and one that was
// refused can't be prepared.
func TestProtect_PreparedTransaction(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t, pgserver.With("max_prepared_transactions", "4"))
	pool := pgtest.PoolOn(t, server.DSN())
	if err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `CREATE TABLE accounts (balance int); INSERT INTO accounts VALUES (100);
		SELECT pglock.protect('accounts', 'accounts/%')`)
	const acquire = `SELECT granted FROM pglock.acquire('{accounts/1}', '1 h')`
	conn := newConn(t, pool)
	one[bool](t, pool, acquire)
	token := one[int64](t, pool, `SELECT token FROM pglock.leases`)
	exec(t, conn, `BEGIN`)
	exec(t, conn, `SELECT pglock.present('accounts/1', $1)`, token)
	exec(t, conn, `UPDATE accounts SET balance = 1`)
	exec(t, conn, `PREPARE TRANSACTION 'p'`)
	expire(t, pool, "accounts/1")
	if one[bool](t, pool, acquire) {
		t.Error("the lease was granted beside a prepared transaction that had presented it")
	}
	exec(t, pool, `COMMIT PREPARED 'p'`)
	if !one[bool](t, pool, acquire) {
		t.Error("the lease was not granted after it")
	}
	// The setting went with the transaction.
	if _, err := conn.Exec(t.Context(), `UPDATE accounts SET balance = 2`); sqlState(err) != "PW004" {
		t.Errorf("after PREPARE TRANSACTION: %v, want PW004", err)
	}
	exec(t, conn, `BEGIN`)
	exec(t, conn, `SELECT set_config('pglock.presented', format('[["accounts/1", %s]]', $1::bigint), true)`, token)
	if _, err := conn.Exec(t.Context(), `UPDATE accounts SET balance = 3`); sqlState(err) != "PW001" {
		t.Errorf("a stale token: %v, want PW001", err)
	}
	exec(t, conn, `PREPARE TRANSACTION 'q'`) // which says ROLLBACK
	if n := one[int64](t, pool, `SELECT count(*) FROM pg_prepared_xacts`); n != 0 {
		t.Errorf("%d refused transactions were prepared", n)
	}
	const balance = `SELECT balance FROM accounts`
	if now := one[int32](t, pool, balance); now != 1 {
		t.Errorf("the balance is %d, want 1", now)
	}
	// The control.
	exec(t, pool, `SELECT pglock.unprotect('accounts')`)
	exec(t, conn, `BEGIN`)
	exec(t, conn, `SELECT set_config('pglock.presented', format('[["accounts/1", %s]]', $1::bigint), true)`, token)
	exec(t, conn, `UPDATE accounts SET balance = 3`)
	exec(t, conn, `PREPARE TRANSACTION 'q'`)
	exec(t, pool, `COMMIT PREPARED 'q'`)
	if now := one[int32](t, pool, balance); now != 3 {
		t.Errorf("unprotected, the balance is %d: this test shows nothing", now)
	}
}

// A thousand transactions, as many at once as there are connections, present
// one lease; half of them a token that is not it.
func TestProtect_ManyPresenters(t *testing.T) {
	t.Parallel()
	pool := poolBy(t, pgtest.DSN(t), func(config *pgxpool.Config) { config.MaxConns = int32(scale(60, 10)) })
	exec(t, pool, `CREATE TABLE log (n int); SELECT pglock.protect('log', 'log')`)
	token := one[int64](t, pool, `SELECT token FROM pglock.acquire('{log}', '1 h')`)
	total := scale(1000, 100)
	errs := make(chan error, total)
	var all sync.WaitGroup
	present := func(tx pgx.Tx, n int) error {
		presented := token + int64(n%2)
		if n%4 > 1 {
			_, err := tx.Exec(t.Context(), `SELECT set_config('pglock.presented', format('[["log", %s]]', $1::bigint), true)`, presented)
			return err
		}
		return pglock.Present(t.Context(), tx, "log", pglock.Token(presented))
	}
	write := func(n int) error {
		return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			if err := present(tx, n); err != nil {
				return err
			}
			_, err := tx.Exec(t.Context(), `INSERT INTO log VALUES ($1)`, n)
			return pglock.Explain(err)
		})
	}
	for n := range total {
		all.Go(func() { errs <- write(n) })
	}
	all.Wait()
	close(errs)
	refused := 0
	for err := range errs {
		if lost, ok := errors.AsType[*pglock.LostError](err); ok && lost.Name == "log" && lost.Token == pglock.Token(token+1) {
			refused++
		} else if err != nil {
			t.Error(err)
		}
	}
	if written := one[int64](t, pool, `SELECT count(*) FROM log WHERE n % 2 = 0`); refused != total/2 || written != int64(total/2) {
		t.Errorf("%d were refused and %d written, want %d each", refused, written, total/2)
	}
	const forged = `SELECT count(*) FROM log WHERE n % 2 = 1`
	if n := one[int64](t, pool, forged); n != 0 {
		t.Errorf("%d were written by a forged token", n)
	}
	// The control: unprotected, who forges the setting gets through.
	exec(t, pool, `SELECT pglock.unprotect('log')`)
	if err := write(3); err != nil || one[int64](t, pool, forged) != 1 {
		t.Errorf("unprotected, a forged token is refused (%v): this test shows nothing", err)
	}
}

// Who has a *sql.Tx presents and guards by the statement in the doc comment.
func TestProtect_DatabaseSQL(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE accounts (balance int); INSERT INTO accounts VALUES (100);
		SELECT pglock.protect('accounts', 'accounts/%')`)
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	l := acquire(t, newClient(t, pool), "accounts/42", time.Hour)
	for _, tt := range []struct {
		name, sql string
		token     pglock.Token
		want      error
	}{
		{"present", `SELECT pglock.present($1, $2)`, l.Token(), nil},
		{"present another", `SELECT pglock.present($1, $2)`, l.Token() + 1, pglock.ErrLost},
		{"guard", `SELECT pglock.guard($1, $2)`, l.Token(), pglock.ErrUnpresented},
		{"guard another", `SELECT pglock.guard($1, $2)`, l.Token() + 1, pglock.ErrLost},
	} {
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = tx.ExecContext(t.Context(), tt.sql, "accounts/42", int64(tt.token))
		if err == nil {
			_, err = tx.ExecContext(t.Context(), `UPDATE accounts SET balance = balance - 1`)
		}
		if err == nil {
			err = tx.Commit()
		} else {
			_ = tx.Rollback()
		}
		if err := pglock.Explain(err); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.name, err, tt.want)
		}
	}
	if balance := one[int32](t, pool, `SELECT balance FROM accounts`); balance != 99 {
		t.Errorf("the balance is %d, want 99", balance)
	}
}

// A write by a claim that was never presented, but is true, holds takers off
// as a guard does. The mutant looks at the lease and doesn't lock it.
func TestProtect_AWriteHoldsTakersOff(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	mutate(t, pool, `CREATE FUNCTION mutant.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			PERFORM FROM pglock.leases l WHERE l.name = 'accounts/1' AND l.claim IS NOT NULL
				AND l.token = (current_setting('pglock.presented')::jsonb -> 0 ->> 1)::bigint;
			IF NOT FOUND THEN RAISE EXCEPTION 'not held' USING ERRCODE = 'PW002'; END IF;
			RETURN NULL;
		END $$`)
	exec(t, pool, `CREATE TABLE accounts (balance int); INSERT INTO accounts VALUES (100)`)
	for _, tt := range []struct {
		protect string
		taken   bool
	}{
		{`SELECT pglock.protect('accounts', 'accounts/%')`, false},
		{`SELECT pglock.unprotect('accounts')`, true},
		{`CREATE TRIGGER mutant BEFORE UPDATE ON accounts FOR EACH STATEMENT EXECUTE FUNCTION mutant.refuse()`, true},
	} {
		exec(t, pool, tt.protect)
		for _, level := range levels {
			expire(t, pool, "accounts/1")
			token := one[int64](t, pool, `SELECT token FROM pglock.acquire('{accounts/1}', '1 h') WHERE granted`)
			inTx(t, pool, level, func(tx pgx.Tx) {
				exec(t, tx, `SELECT set_config('pglock.presented', format('[["accounts/1", %s]]', $1::bigint), true)`, token)
				exec(t, tx, `UPDATE accounts SET balance = 0`)
				expire(t, pool, "accounts/1")
				if taken := one[bool](t, pool, `SELECT granted FROM pglock.acquire('{accounts/1}', '1 h')`); taken != tt.taken {
					t.Errorf("%s, %s: taken beside the write: %t, want %t", tt.protect, level, taken, tt.taken)
				}
			})
		}
	}
}
