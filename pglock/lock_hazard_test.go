package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// TestLock_A04_OneClientTwice: a second handle never gets what the first holds,
// although one session may take its own lock as often as it likes.
func TestLock_A04_OneClientTwice(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	for _, key := range []pglock.Key{pglock.KeyOf("a"), pglock.KeyInt64(-1), pglock.KeyPair(-1, 7)} {
		held := lock(t, c, key)
		for _, again := range []pglock.Key{key, key.Shared()} {
			_, err := c.TryLock(t.Context(), again)
			var blocked *pglock.BlockedError
			if !errors.Is(err, pglock.ErrLocked) || !errors.As(err, &blocked) || len(blocked.Pids) != 1 {
				t.Errorf("%v: %v", again, err)
			}
		}
		release(t, held)
		l, err := c.TryLock(t.Context(), key)
		if err != nil {
			t.Fatal(err)
		}
		release(t, l)
	}
	// The control: what one session does.
	conn := newConn(t, pool)
	if !one[bool](t, conn, `SELECT pg_try_advisory_lock(1) AND pg_try_advisory_lock(1)`) {
		t.Error("a session was refused its own lock")
	}
}

// TestLock_A10_ReleaseOfTheDead kills sessions beside the releases of what they
// hold: each release says nil or lost, and nothing stays.
func TestLock_A10_ReleaseOfTheDead(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	const each = 10
	locks := make([]*pglock.Lock, scale(200, 60))
	var c *pglock.Client
	for i := range locks {
		if i%each == 0 {
			c = newClient(t, pool) // with a session of its own
		}
		locks[i] = lock(t, c, pglock.KeyInt64(int64(i)))
	}
	var lost atomic.Int64
	var g errgroup.Group
	g.Go(func() error {
		_, err := pool.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND (objid::bigint / $1) % 2 = 0
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`, each)
		return err
	})
	for _, l := range locks {
		g.Go(func() error {
			if err := l.Release(t.Context()); errors.Is(err, pglock.ErrLost) {
				lost.Add(1)
			} else if err != nil {
				return err
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	t.Logf("%d of %d releases came too late", lost.Load(), len(locks))
	until(t, pool, "all locks gone", `SELECT 0 = (`+advisoryLocks+`)`)
}

// TestLock_A06_MaxConnLifetime: the pool retires its own connections, not a
// lock's.
func TestLock_A06_MaxConnLifetime(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	config := pool.Config()
	config.MaxConnLifetime, config.MaxConnIdleTime, config.HealthCheckPeriod, config.MinConns = 20*time.Millisecond, 20*time.Millisecond, 20*time.Millisecond, 1
	short, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(short.Close)
	key := pglock.KeyOf("leader")
	l := lock(t, newClient(t, short), key)
	before := holder(t, pool, key)
	for short.Stat().MaxLifetimeDestroyCount() < 5 {
		exec(t, short, `SELECT 1`)
	}
	if after := holder(t, pool, key); after != before || l.Err() != nil {
		t.Errorf("held by backend %d, then by %d: %v", before, after, l.Err())
	}
	release(t, l)
}

// TestLock_A07_Timeout: a timeout that crosses the grant leaves nothing held,
// neither when each worker has a client, where the server is asked after every
// timeout, nor when all share one. The mutant, which believes the error, is caught
// holding.
func TestLock_A07_Timeout(t *testing.T) {
	t.Parallel()
	const workers = 48
	pool := pgtest.Pool(t)
	dsn := pool.Config().ConnString()
	asking := roomy(t, pool, 8)
	rounds := pgtest.Lasting(800, 100, 10)
	client := func(name string) *pglock.Client {
		return newClient(t, poolBy(t, dsn, func(config *pgxpool.Config) {
			config.ConnConfig.RuntimeParams["application_name"] = name
			config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, `SELECT set_config('lock_timeout', (1 + pg_backend_pid() % 5)::text, false)`)
				return err
			}
		}))
	}
	key := pglock.KeyOf("busy")
	run := func(t *testing.T, client func(worker int) (c *pglock.Client, holding string)) {
		var timeouts, grants, inside atomic.Int64
		var g errgroup.Group
		for w := range workers {
			c, holding := client(w)
			g.Go(func() error {
				for range rounds {
					l, err := c.Lock(t.Context(), key)
					if errors.Is(err, pglock.ErrLocked) {
						timeouts.Add(1)
						if holding == "" {
							continue
						}
						var held int
						if err := asking.QueryRow(t.Context(), holding).Scan(&held); err != nil {
							return err
						}
						if held > 0 {
							t.Errorf("held after %v", err)
						}
						continue
					}
					if err != nil {
						return err
					}
					grants.Add(1)
					if inside.Add(1) > 1 {
						t.Error("two hold it at once")
					}
					if _, err := pool.Exec(t.Context(), `SELECT pg_sleep(0.003)`); err != nil { // some of the others wait for less
						return err
					}
					inside.Add(-1)
					if err := l.Release(t.Context()); err != nil {
						return err
					}
				}
				return nil
			})
		}
		if err := g.Wait(); err != nil {
			t.Fatal(err)
		}
		t.Logf("%d workers × %d tries: %d timeouts, %d grants", workers, rounds, timeouts.Load(), grants.Load())
		if least := min(1000, workers*rounds/4); timeouts.Load() < int64(least) {
			t.Errorf("there were %d timeouts, want at least %d: this test shows nothing", timeouts.Load(), least)
		}
		if got := one[int](t, pool, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`); got != 0 {
			t.Errorf("%d locks are held or waited for after the last call", got)
		}
	}
	t.Run("a client each", func(t *testing.T) {
		run(t, func(worker int) (*pglock.Client, string) {
			name := fmt.Sprint("worker ", worker)
			return client(name), `SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
				WHERE locktype = 'advisory' AND datname = current_database() AND application_name = '` + name + `'`
		})
	})
	t.Run("one client", func(t *testing.T) {
		c := client("all")
		run(t, func(int) (*pglock.Client, string) { return c, "" })
	})

	ours := poolBy(t, dsn, func(config *pgxpool.Config) {
		config.MaxConns = workers
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `SELECT set_config('lock_timeout', (1 + pg_backend_pid() % 5)::text, false)`)
			return err
		}
	})
	var mu sync.Mutex
	stuck := 0
	// The mutant keeps its session after an error.
	sql, number := `SELECT pg_advisory_lock($1)`, key.Int64()
	var g errgroup.Group
	for range workers {
		g.Go(func() error {
			return ours.AcquireFunc(t.Context(), func(conn *pgxpool.Conn) error {
				for range 800 {
					if _, err := conn.Exec(t.Context(), sql, number); err == nil {
						if _, err := conn.Exec(t.Context(), `SELECT pg_sleep(0.001)`); err != nil {
							return err
						}
					} else if sqlState(err) != "55P03" {
						return err
					} else {
						var held bool
						if err := conn.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid())`).Scan(&held); err != nil {
							return err
						}
						mu.Lock()
						if held {
							stuck++
						}
						enough := stuck > 0
						mu.Unlock()
						if enough {
							return nil
						}
					}
					if _, err := conn.Exec(t.Context(), `SELECT pg_advisory_unlock_all()`); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if stuck == 0 {
		t.Error("the mutant was never caught holding after a timeout")
	}
}

// TestLock_A16_Bookkeeping: no warning about a lock that is not held, and what
// the caller's own sessions hold stays.
func TestLock_A16_Bookkeeping(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	var mu sync.Mutex
	var notices []string
	config := pool.Config()
	config.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		mu.Lock()
		defer mu.Unlock()
		notices = append(notices, n.Message)
	}
	ours, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ours.Close)
	conn := newConn(t, ours)
	exec(t, conn, `SELECT pg_advisory_lock(1)`)
	c := newClient(t, ours)
	for range scale(1000, 100) {
		l := lock(t, c, pglock.KeyInt64(2))
		if _, err := c.TryLock(t.Context(), pglock.KeyInt64(1)); !errors.Is(err, pglock.ErrLocked) {
			t.Error(err)
		}
		release(t, l)
		release(t, l)
	}
	if got := one[int](t, conn, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()`); got != 1 {
		t.Errorf("the caller's own session holds %d locks, want its 1", got)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(notices) > 0 {
		t.Errorf("the server said %q", notices)
	}
}

// TestLock_A18_AbortedTransaction: a transaction of the caller's that failed has
// no say in the release.
func TestLock_A18_AbortedTransaction(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	err := c.WithLock(t.Context(), pglock.KeyOf("a"), func(ctx context.Context) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `SELECT 1/0`)
			return err
		})
	})
	if sqlState(err) != "22012" {
		t.Error(err)
	}
	if got := one[int](t, pool, advisoryLocks); got != 0 {
		t.Errorf("%d locks are held after the release", got)
	}
}

// TestLock_A15_NoPredicate: no statement of ours calls a lock function anywhere
// but as all that it selects, so that no plan can call it for other rows.
func TestLock_A15_NoPredicate(t *testing.T) {
	t.Parallel()
	pool, spy := spied(t, pgtest.DSN(t))
	c := newClient(t, pool)
	alone := regexp.MustCompile(`^SELECT pg_(try_)?advisory_(xact_)?(un)?lock(_shared)?\(\$1::(bigint|int, \$2::int)\)$`)
	for _, key := range []pglock.Key{pglock.KeyOf("a"), pglock.KeyPair(1, 2), pglock.KeyOf("a").Shared()} {
		held := lock(t, c, key)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		exclusive := pglock.KeyInt64(key.Int64())
		if key == pglock.KeyPair(1, 2) {
			exclusive = key
		}
		go func() { _, err := c.Lock(ctx, exclusive); done <- err }()
		until(t, pool, "the waiter in line", waiters(1))
		cancel()
		<-done
		release(t, held)
		inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
			if err := errors.Join(pglock.LockTx(t.Context(), tx, key), pglock.TryLockTx(t.Context(), tx, key)); err != nil {
				t.Error(err)
			}
		})
	}
	locks := 0
	for _, s := range spy.heard("advisory_") {
		if strings.Contains(s.sql, "lock(") || strings.Contains(s.sql, "shared(") {
			locks++
			if !alone.MatchString(s.sql) {
				t.Errorf("it sent %s", s.sql)
			}
		}
	}
	t.Logf("%d statements took or freed a lock", locks)
	if locks < 15 {
		t.Error("too few: this test shows nothing")
	}
	// What a function in a predicate does is in TestLockTx_A14_HeldIsClaimed.
}
