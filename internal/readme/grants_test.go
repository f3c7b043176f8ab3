package readme

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// The grants that the README names are enough for all but an operator's work,
// and not for that.
func TestGrants(t *testing.T) {
	t.Parallel()
	grants := marked(t, "grants").String()
	app, hear := appPool(t, grants)
	if err := live(t, app, hear); err != nil || len(hear.refusals()) > 0 {
		t.Errorf("%v, refused %v", err, hear.refusals())
	}
	calls := pgtest.ClientCalls(t, filepath.Join(root, "pglock"))
	if diff := cmp.Diff(calls, hear.calls()); diff != "" {
		t.Errorf("a lease's life doesn't send each call that stands in the client's code, or others:\n%s", diff)
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
	more, _ := appPool(t, grants+"\nGRANT SELECT ON pglock.fences, pglock.leases_token_seq TO app;")
	if names := open(more); names != "fences leases_token_seq protected_tables" {
		t.Errorf("privileges on fences and a sequence are seen as on %q: this test shows nothing", names)
	}
	if testing.Short() {
		return
	}
	for _, needed := range calls {
		t.Run("without "+needed, func(t *testing.T) {
			t.Parallel()
			app, hear := appPool(t, grants+"\nREVOKE EXECUTE ON FUNCTION pglock."+needed+" FROM app;")
			err := live(t, app, hear)
			without := needed == "exchange" || needed == "release" // the client then asks one by one
			if named := err != nil && strings.Contains(err.Error(), needed); named == without || !slices.Contains(hear.refusals(), needed) {
				t.Errorf("got %v, refused were %v", err, hear.refusals())
			}
		})
	}
}

// ear hears what a pool, and a client made from it, calls of the schema, and what
// the server refuses for want of a grant.
type ear struct {
	mu      sync.Mutex
	called  map[string]bool
	refused []string // functions
}

var called = regexp.MustCompile(`pglock\.(\w+)\(`)

func (e *ear) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, m := range called.FindAllStringSubmatch(data.SQL, -1) {
		e.called[m[1]] = true
	}
	return ctx
}

func (e *ear) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	if pg, ok := errors.AsType[*pgconn.PgError](data.Err); ok && pg.Code == "42501" {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.refused = append(e.refused, pg.Message[strings.LastIndex(pg.Message, " ")+1:])
	}
}

// calls are the functions called, sorted.
func (e *ear) calls() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Sorted(maps.Keys(e.called))
}

func (e *ear) refusals() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.refused)
}

// appPool returns a pool of a new role with the grants that are given to app, and
// what hears it.
func appPool(t *testing.T, grants string) (*pgxpool.Pool, *ear) {
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
	hear := &ear{called: map[string]bool{}}
	config.ConnConfig.Tracer = hear
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "SET SESSION AUTHORIZATION "+role)
		return err
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool, hear
}

// live is a lease's whole life, with others who wait for it and others beside it.
func live(t *testing.T, pool *pgxpool.Pool, hear *ear) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	renewed := make(renewals, 1)
	client := pglock.New(pool, pglock.WithObserver(renewed))
	defer client.Close(context.WithoutCancel(ctx))

	lease, err := client.TryAcquire(ctx, "accounts/42", time.Second)
	if err != nil {
		return err
	}
	if _, err := client.Leases(ctx); err != nil {
		return err
	}
	for granted := lease.Deadline(); !lease.Deadline().After(granted); {
		select {
		case <-renewed:
		case <-lease.Context().Done():
			return lease.Err()
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
	for !slices.Contains(hear.calls(), "exchange") {
		if err := beside(ctx, client); err != nil {
			return err
		}
	}
	if _, err := client.TryAcquireAll(ctx, []string{"accounts/1", "accounts/2"}, time.Hour); err != nil {
		return err
	}
	return client.Close(ctx)
}

// renewals tells that there was a renewal since it was last read.
type renewals chan struct{}

func (r renewals) Observe(_ context.Context, e pglock.Event) {
	if _, ok := e.(pglock.Renewed); ok {
		select {
		case r <- struct{}{}:
		default:
		}
	}
}

// beside takes and frees some leases at once.
func beside(ctx context.Context, client *pglock.Client) error {
	g, ctx := errgroup.WithContext(ctx)
	for i := range 16 {
		g.Go(func() error {
			lease, err := client.TryAcquire(ctx, fmt.Sprint("beside/", i), time.Hour)
			if err != nil {
				return err
			}
			return lease.Release(ctx)
		})
	}
	return g.Wait()
}
