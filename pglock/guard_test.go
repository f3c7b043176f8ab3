package pglock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// What Guard says in a transaction whose snapshot is older than what happened
// to the lease.
func TestGuard_AfterTheSnapshot(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	mutate(t, pool, takePlain)
	type world struct {
		lease *pglock.Lease
		name  string
	}
	take := func(schema string) func(*testing.T, world) {
		return func(t *testing.T, w world) {
			expire(t, pool, w.name)
			if !one[bool](t, pool, `SELECT granted FROM `+schema+`.acquire(ARRAY[$1], '1 h')`, w.name) {
				t.Fatal("the takeover was not granted")
			}
		}
	}
	const serialization = "40001"
	for _, tt := range []struct {
		name  string
		event func(*testing.T, world)
		// The error at READ COMMITTED: none, or the cause of the loss. The
		// SQLSTATE at the levels above.
		cause pglock.Cause
		state string
	}{
		{"nothing", func(*testing.T, world) {}, "", ""},
		{"released", func(t *testing.T, w world) {
			exec(t, pool, `SELECT pglock.release(ARRAY[$1], ARRAY[$2::bigint])`, w.name, int64(w.lease.Token()))
		}, pglock.ForceReleased, serialization},
		{"renewed", func(t *testing.T, w world) {
			exec(t, pool, `SELECT pglock.renew(ARRAY[$1], ARRAY[$2::bigint])`, w.name, int64(w.lease.Token()))
		}, "", ""},
		{"expired and taken", take("pglock"), pglock.Taken, serialization},
		{"expired", func(t *testing.T, w world) { expire(t, pool, w.name) }, pglock.Expired, ""},
		// The mutant lets a stale guard pass above READ COMMITTED.
		{"mutant: taken by a plain UPDATE", take("mutant"), pglock.Taken, ""},
	} {
		for _, level := range levels {
			t.Run(tt.name+"/"+string(level), func(t *testing.T) {
				t.Parallel()
				c := newClient(t, pool)
				w := world{name: t.Name()}
				w.lease = acquire(t, c, w.name, time.Hour)
				inTx(t, pool, level, func(tx pgx.Tx) {
					one[int64](t, tx, `SELECT count(*) FROM pglock.leases`) // takes the snapshot
					tt.event(t, w)
					err := w.lease.Guard(t.Context(), tx)
					lost, _ := errors.AsType[*pglock.LostError](err)
					switch {
					case level == pgx.ReadCommitted && tt.cause != "":
						if lost == nil || lost.Cause != tt.cause || !errors.Is(err, pglock.ErrLost) {
							t.Fatalf("Guard said %v, want a loss: %s", err, tt.cause)
						}
						if w.lease.Err() == nil {
							t.Error("the lease still says that it is held")
						}
					case level != pgx.ReadCommitted && tt.state != "":
						if sqlState(err) != tt.state {
							t.Fatalf("Guard said %v, want SQLSTATE %s", err, tt.state)
						}
					default:
						if err != nil {
							t.Fatalf("Guard said %v, want nil", err)
						}
						return
					}
					if tx.Commit(t.Context()) == nil {
						t.Error("the transaction committed although Guard refused it")
					}
				})
			})
		}
	}
}

// A guarded lease may expire; nobody is granted it before the transaction ends.
func TestGuard_HoldsTakersOff(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	mutate(t, pool, takePlain)
	c := newClient(t, pool)
	other := newClient(t, pool)
	l := acquire(t, c, "guarded", time.Hour)
	inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
		if err := l.Guard(t.Context(), tx); err != nil {
			t.Fatal(err)
		}
		expire(t, pool, "guarded")
		if _, err := other.TryAcquire(t.Context(), "guarded", time.Minute); !errors.Is(err, pglock.ErrLocked) {
			t.Errorf("a try beside an open guard said %v, want ErrLocked", err)
		}
		inTx(t, newConn(t, pool), pgx.ReadCommitted, func(taker pgx.Tx) {
			if !one[bool](t, taker, `SELECT granted FROM mutant.acquire('{guarded}', '1 h')`) {
				t.Error("a take by a plain UPDATE was held off too: this test shows nothing")
			}
		})
		if err := tx.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
	})
	if _, err := other.TryAcquire(t.Context(), "guarded", time.Minute); err != nil {
		t.Errorf("a try after the guarded transaction said %v", err)
	}
}

// A try beside an open guard comes back at once: fact 5. The mutant locks the
// row before it looks, and waits.
func TestGuard_Fact5_ATryWaitsForNothing(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	mutate(t, pool, takeExcluded)
	l := acquire(t, newClient(t, pool), "guarded", time.Hour)
	inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
		if err := l.Guard(t.Context(), tx); err != nil {
			t.Fatal(err)
		}
		expire(t, pool, "guarded")
		// FOR KEY SHARE alone lets the mutant's plain UPDATE pass; the row
		// lock of a take in flight does not.
		exec(t, tx, `SELECT FROM pglock.leases WHERE name = 'guarded' FOR UPDATE`)
		try := newConn(t, pool)
		exec(t, try, `SET statement_timeout = '20 s'`)
		if one[bool](t, try, `SELECT granted FROM pglock.acquire('{guarded}', '1 h')`) {
			t.Error("a locked row was granted")
		}
		hung := newConn(t, pool)
		done := make(chan error, 1)
		go func() {
			_, err := hung.Exec(context.Background(), `SELECT granted FROM mutant.acquire('{guarded}', '1 h')`)
			done <- err
		}()
		blockedBy(t, pool, tx.Conn().PgConn().PID())
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	})
}

// The wait for a transaction that only locked the row may outlast the lease;
// then Guard must see it (fact 4). The mutant looks at the clock before it waits.
func TestGuard_Fact4_LooksAtTheClockAfterTheWait(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	mutate(t, pool, guardEarly)
	for schema, want := range map[string]string{"pglock": "PW002", "mutant": ""} {
		token := one[int64](t, pool, `SELECT token FROM pglock.acquire(ARRAY[$1], '3 s')`, schema)
		blocker, guard := newConn(t, pool), newConn(t, pool)
		exec(t, blocker, `BEGIN; SELECT FROM pglock.leases WHERE name = '`+schema+`' FOR UPDATE`)
		done := make(chan error, 1)
		go func() {
			_, err := guard.Exec(context.Background(), `SELECT `+schema+`.guard($1, $2)`, schema, token)
			done <- err
		}()
		blockedBy(t, pool, blocker.PgConn().PID())
		until(t, pool, "the lease expire", `SELECT expires_at <= clock_timestamp() FROM pglock.leases WHERE name = $1`, schema)
		exec(t, blocker, `ROLLBACK`)
		if err := <-done; sqlState(err) != want {
			t.Errorf("%s.guard after its wait said %v, want SQLSTATE %q", schema, err, want)
		}
	}
}

// Guard and Fence cut off a writer that is paused inside its transaction.
func TestGuard_BoundsThePause(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	guard := func(name string, ttl time.Duration) func(*testing.T, pgx.Tx) {
		return func(t *testing.T, tx pgx.Tx) {
			if err := acquire(t, c, name, ttl).Guard(t.Context(), tx); err != nil {
				t.Fatal(err)
			}
		}
	}
	fence := func(t *testing.T, tx pgx.Tx) {
		if err := pglock.Fence(t.Context(), tx, "r", 1); err != nil {
			t.Fatal(err)
		}
	}
	set := func(ms string) func(*testing.T, pgx.Tx) {
		return func(t *testing.T, tx pgx.Tx) { exec(t, tx, `SET LOCAL idle_in_transaction_session_timeout = `+ms) }
	}
	hold := func(d time.Duration) func(*testing.T, pgx.Tx) {
		return func(t *testing.T, tx pgx.Tx) {
			if err := pglock.SetHoldTimeout(t.Context(), tx, d); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, tt := range []struct {
		name string
		do   []func(*testing.T, pgx.Tx)
		want string
	}{
		{"nothing", nil, "0"},
		{"guard", []func(*testing.T, pgx.Tx){guard("a", 1500*time.Millisecond)}, "1500ms"},
		{"fence", []func(*testing.T, pgx.Tx){fence}, "30s"},
		{"guard lowers the caller's", []func(*testing.T, pgx.Tx){set("60000"), guard("b", 7*time.Second)}, "7s"},
		{"guard never raises the caller's", []func(*testing.T, pgx.Tx){set("20000"), guard("c", time.Minute)}, "20s"},
		{"the lowest of several", []func(*testing.T, pgx.Tx){guard("d", time.Minute), fence, guard("e", 40*time.Second)}, "30s"},
		{"chosen before", []func(*testing.T, pgx.Tx){hold(2 * time.Minute), guard("f", time.Second), fence}, "2min"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			conn := newConn(t, pool)
			inTx(t, conn, pgx.ReadCommitted, func(tx pgx.Tx) {
				for _, do := range tt.do {
					do(t, tx)
				}
				if got := one[string](t, tx, `SHOW idle_in_transaction_session_timeout`); got != tt.want {
					t.Errorf("idle_in_transaction_session_timeout is %s, want %s", got, tt.want)
				}
			})
			if got := one[string](t, conn, `SHOW idle_in_transaction_session_timeout`); got != "0" {
				t.Errorf("after the transaction it is %s, want 0", got)
			}
		})
	}
}

func TestInTx(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `CREATE TABLE written (what text)`)
	c := newClient(t, pool)
	write := func(what string, then error) func(context.Context, pgx.Tx) error {
		return func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `INSERT INTO written VALUES ($1)`, what); err != nil {
				return err
			}
			return then
		}
	}
	written := func() int64 { return one[int64](t, pool, `SELECT count(*) FROM written`) }
	l := acquire(t, c, "tx", time.Hour)
	if err := l.InTx(t.Context(), pool, write("held", nil)); err != nil || written() != 1 {
		t.Fatalf("while held: %v, %d rows", err, written())
	}
	oops := errors.New("oops")
	if err := l.InTx(t.Context(), pool, write("failed", oops)); !errors.Is(err, oops) || written() != 1 {
		t.Errorf("when fn fails: %v, %d rows", err, written())
	}
	exec(t, pool, `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused at commit'; END $$;
		CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON written DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW WHEN (NEW.what = 'refused') EXECUTE FUNCTION refuse()`)
	if err := l.InTx(t.Context(), pool, write("refused", nil)); sqlState(err) != "P0001" || written() != 1 {
		t.Errorf("when COMMIT fails: %v, %d rows", err, written())
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic of fn did not get through")
			}
		}()
		_ = l.InTx(t.Context(), pool, func(context.Context, pgx.Tx) error { panic("boom") })
	}()
	expire(t, pool, "tx")
	if err := l.InTx(t.Context(), pool, write("lost", nil)); !errors.Is(err, pglock.ErrLost) || written() != 1 {
		t.Errorf("after the loss: %v, %d rows", err, written())
	}
	if stat := pool.Stat(); stat.AcquiredConns() != 0 {
		t.Errorf("%d connections of the pool were not given back", stat.AcquiredConns())
	}
}
