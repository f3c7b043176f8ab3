package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"
	"golang.org/x/sync/errgroup"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

func lock(t *testing.T, c *pglock.Client, key pglock.Key) *pglock.Lock {
	t.Helper()
	l, err := c.Lock(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Release(context.Background()) })
	return l
}

func release(t *testing.T, l *pglock.Lock) {
	t.Helper()
	if err := l.Release(context.Background()); err != nil {
		t.Error(err)
	}
}

// holder returns the backend that holds the advisory lock of a key.
func holder(t *testing.T, db querier, key pglock.Key) int32 {
	t.Helper()
	return one[int32](t, db, `SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
		AND classid = ($1::bigint >> 32 & 4294967295)::oid AND objid = ($1::bigint & 4294967295)::oid`, key.Int64())
}

// ended waits for the end of a lock's context and returns its cause.
func ended(t *testing.T, ctx context.Context) error {
	t.Helper()
	select {
	case <-ctx.Done():
	case <-time.After(limit):
		t.Fatal("the context did not end")
	}
	return context.Cause(ctx)
}

func waiters(n int) string {
	return fmt.Sprintf(`SELECT count(*) = %d FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`, n)
}

func TestLock_WaitsInLine(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	key := pglock.KeyOf("accounts/42")
	first := lock(t, c, key)
	if first.Key() != key || first.Err() != nil || first.Context().Err() != nil {
		t.Errorf("a lock that is held: %v, %v", first.Key(), first.Err())
	}
	order := make(chan int, 3)
	var g errgroup.Group
	for i := range 3 {
		g.Go(func() error {
			l, err := c.Lock(t.Context(), key)
			if err != nil {
				return err
			}
			order <- i
			return l.Release(t.Context())
		})
		until(t, pool, "the waiter in line", waiters(i+1))
	}
	release(t, first)
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if got := []int{<-order, <-order, <-order}; !cmp.Equal(got, []int{0, 1, 2}) {
		t.Errorf("served in the order %v", got)
	}
	if err := first.Err(); !errors.Is(err, pglock.ErrReleased) || !errors.Is(ended(t, first.Context()), pglock.ErrReleased) {
		t.Errorf("after Release: %v", err)
	}
	release(t, first)
	until(t, pool, "the sessions end", `SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
		AND query LIKE '%advisory_unlock($1%'`)
}

func TestLock_Shared(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	key := pglock.KeyOf("report")
	a, b := lock(t, c, key.Shared()), lock(t, c, key.Shared())
	for _, l := range []*pglock.Lock{a, b} {
		if _, err := c.TryLock(t.Context(), key); !errors.Is(err, pglock.ErrLocked) {
			t.Errorf("an exclusive lock beside a shared one: %v", err)
		}
		release(t, l)
	}
	release(t, lock(t, c, key))
}

func TestLock_Cancelled(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	key := pglock.KeyOf("busy")
	held := lock(t, c, key)
	ctx, cancel := context.WithCancelCause(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := c.Lock(ctx, key)
		done <- err
	}()
	until(t, pool, "the waiter in line", waiters(1))
	mine := errors.New("changed my mind")
	cancel(mine)
	if err := <-done; !errors.Is(err, pglock.ErrLocked) || !errors.Is(err, context.Canceled) || !errors.Is(err, mine) {
		t.Errorf("a wait that was given up: %v", err)
	}
	if !one[bool](t, pool, waiters(0)) {
		t.Error("it still stands in line after it returned")
	}
	if _, err := c.Lock(ctx, key); !errors.Is(err, context.Canceled) || errors.Is(err, pglock.ErrLocked) {
		t.Errorf("with a context that ended before: %v", err)
	}
	if _, err := c.TryLock(ctx, key); !errors.Is(err, context.Canceled) || errors.Is(err, pglock.ErrLocked) {
		t.Errorf("with a context that ended before: %v", err)
	}
	release(t, held)
	release(t, lock(t, c, key))
}

func TestLock_BadKeys(t *testing.T) {
	t.Parallel()
	// There is no server: an error about the key came before any SQL.
	config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none")
	if err != nil {
		t.Fatal(err)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	c := newClient(t, pool)
	for why, key := range badKeys {
		for name, call := range map[string]func(context.Context, pglock.Key) (*pglock.Lock, error){"Lock": c.Lock, "TryLock": c.TryLock} {
			if _, err := call(t.Context(), key); err == nil || !strings.Contains(err.Error(), why) {
				t.Errorf("%s(%q): %v, want one about %s", name, key, err, why)
			}
		}
	}
	var connect *pgconn.ConnectError
	if _, err := c.TryLock(t.Context(), pglock.KeyOf("good")); !errors.As(err, &connect) || errors.Is(err, pglock.ErrLocked) {
		t.Errorf("no server: %v", err)
	}
}

// The caller's context, which ended before, has no say in the release.
func TestLock_ReleaseOutlivesItsContext(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	l := lock(t, c, pglock.KeyOf("a"))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Release(ctx); err != nil {
		t.Error(err)
	}
	if got := one[int](t, pool, advisoryLocks); got != 0 {
		t.Errorf("%d locks are held after the release", got)
	}
}

func TestLock_ClientClose(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := pglock.New(pool)
	held := []*pglock.Lock{lock(t, c, pglock.KeyOf("a")), lock(t, c, pglock.KeyOf("b"))}
	done := make(chan error, 1)
	go func() {
		_, err := c.Lock(context.Background(), pglock.KeyOf("a"))
		done <- err
	}()
	until(t, pool, "the waiter in line", waiters(1))
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-done; !errors.Is(err, pglock.ErrClosed) {
		t.Errorf("a wait beside Close: %v", err)
	}
	for _, l := range held {
		if err := l.Err(); !errors.Is(err, pglock.ErrReleased) {
			t.Errorf("after Close: %v", err)
		}
		release(t, l)
	}
	if got := one[int](t, pool, advisoryLocks); got != 0 {
		t.Errorf("%d locks are held after Close", got)
	}
	if _, err := c.Lock(t.Context(), pglock.KeyOf("a")); !errors.Is(err, pglock.ErrClosed) {
		t.Errorf("Lock after Close: %v", err)
	}
	if err := c.WithLock(t.Context(), pglock.KeyOf("a"), nil); !errors.Is(err, pglock.ErrClosed) {
		t.Errorf("WithLock after Close: %v", err)
	}
}

// Whatever ends a session is noticed, and reported as a loss from then on.
func TestLock_Lost(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for name, tt := range map[string]struct {
		configure func(*pgxpool.Config)
		event     func(key pglock.Key)
		state     string
	}{
		"terminated": {
			event: func(key pglock.Key) { exec(t, pool, `SELECT pg_terminate_backend($1)`, holder(t, pool, key)) },
			state: "57P01",
		},
		"idle_session_timeout": {
			configure: func(config *pgxpool.Config) {
				config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
					_, err := conn.Exec(ctx, `SET idle_session_timeout = '1s'`)
					return err
				}
			},
			event: func(pglock.Key) {},
			state: "57P05",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			config := pool.Config()
			if tt.configure != nil {
				tt.configure(config)
			}
			ours, err := pgxpool.NewWithConfig(t.Context(), config)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(ours.Close)
			c := newClient(t, ours)
			key := pglock.KeyOf(name)
			l := lock(t, c, key)
			tt.event(key)
			err = ended(t, l.Context())
			var lost *pglock.LostError
			if !errors.Is(err, pglock.ErrLost) || !errors.As(err, &lost) || sqlState(err) != tt.state {
				t.Fatalf("lost with %v", err)
			}
			if lost.Name != name || lost.Cause != pglock.Unreachable {
				t.Errorf("lost: %#v", lost)
			}
			for range 2 {
				if got := l.Release(t.Context()); got != err {
					t.Errorf("Release after the loss: %v", got)
				}
			}
			if l.Err() != err {
				t.Errorf("Err after the loss: %v", l.Err())
			}
			if err := c.Close(t.Context()); err != nil {
				t.Errorf("Close after the loss: %v", err)
			}
		})
	}
}

// A session that holds a lock is idle outside any transaction, so that it holds
// back no vacuum, and the server has been told to look after its client.
func TestLock_Session(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	var mu sync.Mutex
	var sent []string
	config := pool.Config()
	config.ConnConfig.Tracer = tracer(func(sql string) {
		mu.Lock()
		defer mu.Unlock()
		sent = append(sent, sql)
	})
	ours, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ours.Close)
	key := pglock.KeyOf("a")
	l := lock(t, newClient(t, ours), key)
	until(t, pool, "the session idle", `SELECT state = 'idle' AND backend_xid IS NULL AND backend_xmin IS NULL FROM pg_stat_activity WHERE pid = $1`, holder(t, pool, key))
	release(t, l)
	mu.Lock()
	defer mu.Unlock()
	all := strings.Join(sent, "\n")
	for _, want := range []string{
		`set_config('tcp_keepalives_idle', '5', false)`, `set_config('tcp_keepalives_interval', '5', false)`,
		`set_config('tcp_keepalives_count', '2', false)`, `set_config('tcp_user_timeout', '15000', false)`,
		`set_config('client_connection_check_interval', '5000', false)`,
	} {
		if !strings.Contains(all, want) {
			t.Errorf("no %s in\n%s", want, all)
		}
	}
	if first := strings.Index(all, "advisory"); first < strings.Index(all, "pg_backend_pid()") {
		t.Errorf("a lock was taken before the pooler was looked for:\n%s", all)
	}
}

type tracer func(sql string)

func (t tracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	t(data.SQL)
	return ctx
}

func (t tracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestWithLock(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	key := pglock.KeyOf("a")
	mine := errors.New("mine")
	type contextKey struct{}

	t.Run("holds while fn runs", func(t *testing.T) {
		ctx := context.WithValue(t.Context(), contextKey{}, "value")
		err := c.WithLock(ctx, key, func(ctx context.Context) error {
			if ctx.Value(contextKey{}) != "value" {
				t.Error("fn's context lacks the caller's values")
			}
			if _, err := c.TryLock(ctx, key); !errors.Is(err, pglock.ErrLocked) {
				t.Errorf("beside fn: %v", err)
			}
			return mine
		})
		if err != mine {
			t.Errorf("got %v, want fn's error as it is", err)
		}
		if got := one[int](t, pool, advisoryLocks); got != 0 {
			t.Errorf("%d locks are held", got)
		}
	})
	t.Run("panic", func(t *testing.T) {
		func() {
			defer func() {
				if recover() != "oh" {
					t.Error("the panic was swallowed")
				}
			}()
			_ = c.WithLock(t.Context(), key, func(context.Context) error { panic("oh") })
		}()
		if got := one[int](t, pool, advisoryLocks); got != 0 {
			t.Errorf("%d locks are held", got)
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		err := c.WithLock(ctx, key, func(ctx context.Context) error {
			cancel(mine)
			err := ended(t, ctx)
			if got := one[int](t, pool, advisoryLocks); got != 1 {
				t.Errorf("%d locks are held while fn runs", got)
			}
			return err
		})
		if err != mine {
			t.Errorf("got %v", err)
		}
	})
	t.Run("lost", func(t *testing.T) {
		err := c.WithLock(t.Context(), key, func(ctx context.Context) error {
			exec(t, pool, `SELECT pg_terminate_backend($1)`, holder(t, pool, key))
			if err := ended(t, ctx); !errors.Is(err, pglock.ErrLost) {
				t.Errorf("fn's context ended with %v", err)
			}
			return nil
		})
		if !errors.Is(err, pglock.ErrLost) {
			t.Errorf("got %v, want the loss", err)
		}
	})
	t.Run("not locked", func(t *testing.T) {
		held := lock(t, c, key)
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		err := c.WithLock(ctx, key, func(context.Context) error {
			t.Error("fn ran without the lock")
			return nil
		})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		release(t, held)
	})
}

// Not parallel: it looks at every goroutine of the process.
func TestLock_LeavesNoGoroutine(t *testing.T) {
	pool := pgtest.Pool(t)
	before := goleak.IgnoreCurrent()
	c := pglock.New(pool)
	a, b := lock(t, c, pglock.KeyOf("a")), lock(t, c, pglock.KeyOf("b"))
	release(t, a)
	exec(t, pool, `SELECT pg_terminate_backend($1)`, holder(t, pool, b.Key()))
	_ = ended(t, b.Context())
	held := lock(t, c, pglock.KeyOf("c"))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := c.Lock(ctx, held.Key())
		done <- err
	}()
	until(t, pool, "the waiter in line", waiters(1))
	cancel()
	if err := <-done; !errors.Is(err, pglock.ErrLocked) {
		t.Error(err)
	}
	if _, err := c.TryLock(t.Context(), held.Key()); !errors.Is(err, pglock.ErrLocked) {
		t.Error(err)
	}
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if err := goleak.Find(before); err != nil {
		t.Error(err)
	}
}
