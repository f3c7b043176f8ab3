package readme

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// The grants that the README names are enough for all but an operator's work,
// and not for that.
func TestGrants(t *testing.T) {
	t.Parallel()
	grants := marked(t, "grants").String()
	app := appPool(t, grants)
	if err := live(t, app); err != nil {
		t.Error(err)
	}
	for _, operators := range []string{
		"SELECT * FROM pglock.force_release('accounts/42', 1)", "SELECT pglock.purge('0')", "SELECT pglock.new_epoch()",
		"SELECT pglock.list_fences()", "SELECT pglock.reset_fence('accounts/42')",
	} {
		var refused *pgconn.PgError
		if _, err := app.Exec(t.Context(), operators); !errors.As(err, &refused) || refused.Code != "42501" {
			t.Errorf("%s: %v", operators, err)
		}
	}
	open := func(pool *pgxpool.Pool) (names string) {
		t.Helper()
		err := pool.QueryRow(t.Context(), `
			SELECT coalesce(string_agg(c.relname, ' ' ORDER BY c.relname), '') FROM pg_class c
			WHERE c.relnamespace = 'pglock'::regnamespace AND (
				c.relkind IN ('r', 'v') AND has_table_privilege(session_user, c.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
				OR c.relkind = 'S' AND has_sequence_privilege(session_user, c.oid, 'USAGE, SELECT, UPDATE'))`).Scan(&names)
		if err != nil {
			t.Fatal(err)
		}
		return names
	}
	if names := open(app); names != "protected_tables" {
		t.Errorf("the role has privileges on %s, want the view alone", names)
	}
	if names := open(appPool(t, grants+"\nGRANT SELECT ON pglock.fences, pglock.leases_token_seq TO app;")); names != "fences leases_token_seq protected_tables" {
		t.Errorf("privileges on fences and a sequence are seen as on %q: this test shows nothing", names)
	}
	if testing.Short() {
		return
	}
	for _, needed := range []string{
		"schema_version", "check_epoch", "acquire", "acquire_one", "enqueue", "refresh", "cancel", "renew", "release_one",
		"guard", "present", "fence", "list_leases", "list_waiters",
	} {
		t.Run("without "+needed, func(t *testing.T) {
			t.Parallel()
			err := live(t, appPool(t, grants+"\nREVOKE EXECUTE ON FUNCTION pglock."+needed+" FROM app;"))
			if err == nil || !strings.Contains(err.Error(), needed) {
				t.Errorf("got %v, want an error that names it", err)
			}
		})
	}
}

// appPool returns a pool of a new role with the grants that are given to app.
func appPool(t *testing.T, grants string) *pgxpool.Pool {
	t.Helper()
	owner := pgtest.Pool(t)
	exec := func(sql string) {
		t.Helper()
		if _, err := owner.Exec(context.WithoutCancel(t.Context()), sql); err != nil {
			t.Fatal(err)
		}
	}
	role := strings.TrimPrefix(owner.Config().ConnConfig.Database, "pawl_") // roles are all the server's
	exec("CREATE ROLE " + role)
	t.Cleanup(func() { exec("DROP OWNED BY " + role + "; DROP ROLE " + role) })
	exec(strings.ReplaceAll(grants, " app;", " "+role+";"))
	config := owner.Config()
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "SET SESSION AUTHORIZATION "+role)
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// live is a lease's whole life, with others who wait for it.
func live(t *testing.T, pool *pgxpool.Pool) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	client := pglock.New(pool)
	defer client.Close(context.WithoutCancel(ctx))

	lease, err := client.TryAcquire(ctx, "accounts/42", time.Second)
	if err != nil {
		return err
	}
	if _, err := client.Leases(ctx); err != nil {
		return err
	}
	for granted := lease.Deadline(); !lease.Deadline().After(granted); time.Sleep(10 * time.Millisecond) {
		if err := lease.Err(); err != nil {
			return err
		}
	}

	impatient, giveUp := context.WithCancel(ctx)
	defer giveUp()
	waited := make(chan error, 1)
	go func() {
		_, err := client.Acquire(impatient, "accounts/42", time.Hour)
		waited <- err
	}()
	// What a client does for those who wait, when a third of their TTL has passed.
	if _, err := pool.Exec(ctx, `SELECT pglock.refresh('{accounts/42}', ARRAY[gen_random_uuid()])`); err != nil {
		return err
	}
	for {
		waiters, err := client.Waiters(ctx)
		if err != nil {
			return err
		}
		if len(waiters) > 0 {
			break
		}
		select {
		case err := <-waited:
			return err
		case <-time.After(10 * time.Millisecond):
		}
	}
	giveUp()
	if err := <-waited; !errors.Is(err, context.Canceled) {
		return err
	}
	if waiters, err := client.Waiters(ctx); err != nil || len(waiters) > 0 {
		return fmt.Errorf("the wait was not cancelled: %d waiters, %w", len(waiters), err)
	}

	err = lease.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
		return errors.Join(lease.Guard(ctx, tx), pglock.Fence(ctx, tx, "accounts/42", lease.Token()))
	})
	if err != nil {
		return err
	}
	if err := lease.Release(ctx); err != nil {
		return err
	}
	if _, err := client.TryAcquireAll(ctx, []string{"accounts/1", "accounts/2"}, time.Hour); err != nil {
		return err
	}
	return client.Close(ctx)
}
