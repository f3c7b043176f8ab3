package pgtest_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// briefly is long enough for an answer and short enough to wait for none.
func briefly(t *testing.T) (context.Context, context.CancelFunc) {
	return context.WithTimeout(t.Context(), 300*time.Millisecond)
}

func TestProxy_Silence(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	wire := pgtest.Proxy(t, dsn)
	conn := connect(t, wire.DSN())
	query[int](t, conn, "SELECT 1")
	wire.Silence()
	ctx, cancel := briefly(t)
	defer cancel()
	if _, err := conn.Exec(ctx, "CREATE TABLE sent ()"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("with the wire silent: %v", err)
	}
	if query[bool](t, connect(t, dsn), "SELECT to_regclass('sent') IS NOT NULL") {
		t.Error("the server heard it")
	}
	wire.Heal()
	query[int](t, connect(t, wire.DSN()), "SELECT 1")
}

func TestProxy_DropReplies(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	wire := pgtest.Proxy(t, dsn)
	conn := connect(t, wire.DSN())
	wire.DropReplies()
	ctx, cancel := briefly(t)
	defer cancel()
	if _, err := conn.Exec(ctx, "CREATE TABLE sent ()"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without a reply: %v", err)
	}
	if !query[bool](t, connect(t, dsn), "SELECT to_regclass('sent') IS NOT NULL") {
		t.Error("the server did not hear it")
	}
	wire.Heal()
	query[int](t, connect(t, wire.DSN()), "SELECT 1")
}

func TestProxy_Delay(t *testing.T) {
	t.Parallel()
	wire := pgtest.Proxy(t, pgtest.DSN(t))
	conn := connect(t, wire.DSN())
	wire.Delay(200 * time.Millisecond)
	start := time.Now()
	query[int](t, conn, "SELECT 1")
	if took := time.Since(start); took < 200*time.Millisecond {
		t.Errorf("answered after %v", took)
	}
	wire.Heal()
	wire.Delay(time.Hour)
	answer := make(chan error)
	go func() {
		_, err := conn.Exec(context.WithoutCancel(t.Context()), "SELECT 1")
		answer <- err
	}()
	select {
	case err := <-answer:
		t.Fatalf("answered within an hour: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	wire.Heal()
	if err := <-answer; err != nil {
		t.Errorf("the answer that was held back is lost: %v", err)
	}
}

func TestProxy_ResetAndCut(t *testing.T) {
	t.Parallel()
	wire := pgtest.Proxy(t, pgtest.DSN(t))
	conn := connect(t, wire.DSN())
	wire.Reset()
	if _, err := conn.Exec(t.Context(), "SELECT 1"); err == nil {
		t.Error("the connection outlived the reset")
	}
	query[int](t, connect(t, wire.DSN()), "SELECT 1")
	wire.Cut()
	if conn, err := pgx.Connect(t.Context(), wire.DSN()); err == nil {
		_ = conn.Close(t.Context())
		t.Error("connected through a cut wire")
	}
	wire.Heal()
	query[int](t, connect(t, wire.DSN()), "SELECT 1")
}

func TestPgBouncer_TransactionMode(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	direct, pooled := connect(t, dsn), connect(t, pgtest.PgBouncer(t, dsn))
	if pid := query[int64](t, direct, "SELECT pg_backend_pid()"); pid != int64(direct.PgConn().PID()) {
		t.Errorf("directly, backend %d serves what %d accepted", pid, direct.PgConn().PID())
	}
	if pid := query[int64](t, pooled, "SELECT pg_backend_pid()"); pid == int64(pooled.PgConn().PID()) {
		t.Errorf("through the pooler, backend %d serves what it accepted itself", pid)
	}
}
