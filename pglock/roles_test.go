package pglock_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
	"github.com/pawl-go/pawl/pglock"
)

// What PUBLIC may do in the schema: nothing.
func TestRoles_Public(t *testing.T) {
	t.Parallel()
	owner := pgtest.Pool(t)
	open := func() []string {
		rows, err := owner.Query(t.Context(), `
			SELECT p.oid::regprocedure::text FROM pg_proc p
			WHERE p.pronamespace = 'pglock'::regnamespace AND has_function_privilege('public', p.oid, 'EXECUTE')
			UNION ALL
			SELECT c.oid::regclass::text FROM pg_class c
			WHERE c.relnamespace = 'pglock'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'S')
			  AND has_table_privilege('public', c.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
			UNION ALL
			SELECT 'schema' WHERE has_schema_privilege('public', 'pglock', 'USAGE, CREATE')
			ORDER BY 1`)
		if err != nil {
			t.Fatal(err)
		}
		found, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	if found := open(); len(found) != 0 {
		t.Errorf("PUBLIC may use %v", found)
	}
	exec(t, owner, `GRANT EXECUTE ON FUNCTION pglock.purge TO PUBLIC; GRANT SELECT ON pglock.fences TO PUBLIC;
		GRANT USAGE ON SCHEMA pglock TO PUBLIC`)
	if diff := cmp.Diff([]string{"pglock.fences", "pglock.purge(interval)", "schema"}, open()); diff != "" {
		t.Errorf("what was granted to PUBLIC is not seen: this test shows nothing\n%s", diff)
	}
}

// A function that runs with its owner's rights, or that an owner calls or has
// called by a trigger, finds what it names in a search_path of its own, with
// the caller's temporary objects last.
func TestRoles_SearchPath(t *testing.T) {
	t.Parallel()
	owner := pgtest.Pool(t)
	const loose = `SELECT coalesce(string_agg(p.proname, ' '), '') FROM pg_proc p WHERE p.pronamespace = 'pglock'::regnamespace
		AND (p.prosecdef OR p.prorettype = 'trigger'::regtype OR p.proname IN ('protect', 'unprotect', 'guard_version'))
		AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (p.proconfig), false)`
	if found := one[string](t, owner, loose); found != "" {
		t.Errorf("no search_path is pinned in %s", found)
	}
	exec(t, owner, `ALTER FUNCTION pglock.guard RESET search_path`)
	if found := one[string](t, owner, loose); found != "guard" {
		t.Errorf("a function without one is not seen (%q): this test shows nothing", found)
	}
}

// What a role with the README's grants may not do, in its own words.
func TestRoles_Refused(t *testing.T) {
	t.Parallel()
	f := newFort(t)
	before := one[string](t, f.owner, fortDigest)
	leases := one[string](t, f.owner, `SELECT string_agg(l::text, ',') FROM pglock.leases l`)
	refusals := []struct{ name, sql, want string }{
		{"disable a trigger", `ALTER TABLE accounts DISABLE TRIGGER pglock_protect`, "42501"},
		{"disable all triggers", `ALTER TABLE accounts DISABLE TRIGGER ALL`, "42501"},
		{"disable a partition's trigger", `ALTER TABLE parts_1 DISABLE TRIGGER pglock_protect_row`, "42501"},
		{"drop a trigger", `DROP TRIGGER pglock_protect ON accounts`, "42501"},
		{"unprotect", `SELECT pglock.unprotect('accounts')`, "42501"},
		{"protect by another pattern", `SELECT pglock.protect('accounts', '%')`, "42501"},
		{"guard a version", `SELECT pglock.guard_version('accounts')`, "42501"},
		{"be a replica", `SET session_replication_role = replica`, "42501"},
		{"be the owner", `SET ROLE {owner}`, "42501"},
		{"log in as the owner", `SET SESSION AUTHORIZATION {owner}`, "42501"},
		{"replace the trigger's function", `CREATE OR REPLACE FUNCTION pglock.refuse_unpresented() RETURNS trigger
			LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$`, "42501"},
		{"create in the schema", `CREATE TABLE pglock.mine ()`, "42501"},
		{"inherit", `CREATE TABLE evil.child () INHERITS (accounts)`, "42501"},
		{"attach a partition", `CREATE TABLE evil.part PARTITION OF parts FOR VALUES FROM (50) TO (60)`, "42501"},
		{"make a rule", `CREATE RULE r AS ON UPDATE TO accounts DO INSTEAD NOTHING`, "42501"},
		{"refer with a cascade", `CREATE TABLE evil.refers (id int REFERENCES accounts ON DELETE CASCADE)`, "42501"},
		{"read the leases", `SELECT * FROM pglock.leases`, "42501"},
		{"forge a lease", `UPDATE pglock.leases SET token = 1, role = session_user`, "42501"},
		{"edit the queue", `DELETE FROM pglock.waiters`, "42501"},
		{"empty the fences", `TRUNCATE pglock.fences`, "42501"},
		{"draw a token", `SELECT nextval('pglock.leases_token_seq')`, "42501"},
		{"draw a token by function", `SELECT pglock.draw(0)`, "42501"},
		{"set the sequence", `SELECT setval('pglock.leases_token_seq', 1)`, "42501"},
		{"hand on", `SELECT pglock.hand_on('accounts/theirs')`, "42501"},
		{"turn the epoch", `SELECT pglock.turn_epoch(true)`, "42501"},
		{"a new epoch", `SELECT pglock.new_epoch()`, "42501"},
		{"purge", `SELECT pglock.purge('0')`, "42501"},
		{"release by force", `SELECT pglock.force_release('accounts/theirs', {theirs})`, "42501"},
		{"look at fences", `SELECT pglock.list_fences()`, "42501"},
		{"reset a fence", `SELECT pglock.reset_fence('ledger')`, "42501"},
		{"fence with nothing", `SELECT pglock.fence('r', NULL)`, "22023"},
		{"fence below the first", `SELECT pglock.fence('r', 0)`, "22023"},
	}
	for _, tt := range refusals {
		everywhere(func(p path, level pgx.TxIsoLevel) {
			t.Run(tt.name+"/"+p.name+"/"+string(level), func(t *testing.T) {
				t.Parallel()
				if state := p.run(f, t, level, []string{f.spells.Replace(tt.sql)}); state != tt.want {
					t.Errorf("SQLSTATE %q, want %q", state, tt.want)
				}
			})
		})
	}
	// What is answered, and of no use.
	t.Run("guess another's token", func(t *testing.T) {
		t.Parallel()
		app := newConn(t, pgtest.PoolOn(t, f.dsn))
		states := one[string](t, app, f.spells.Replace(`SELECT string_agg(DISTINCT state, ' ') FROM pglock.release(
			ARRAY(SELECT 'accounts/theirs' FROM generate_series(1, 500)), ARRAY(SELECT generate_series(1, 500)))`))
		if states != "taken" {
			t.Errorf("release says %s", states)
		}
		if states := one[string](t, app, f.spells.Replace(`SELECT state FROM pglock.renew('{accounts/theirs}', '{{theirs}}')`)); states != "taken" {
			t.Errorf("renew says %s", states)
		}
	})
	t.Cleanup(func() {
		if one[string](t, f.owner, fortDigest) != before {
			t.Error("a protected table was changed")
		}
		if now := one[string](t, f.owner, `SELECT string_agg(l::text, ',') FROM pglock.leases l`); now != leases {
			t.Errorf("the leases are now\n%s, and were\n%s", now, leases)
		}
		// The control: whom PostgreSQL lets do all this can.
		for _, tt := range refusals {
			inTx(t, f.owner, pgx.ReadCommitted, func(tx pgx.Tx) {
				if _, err := tx.Exec(context.Background(), f.spells.Replace(tt.sql)); tt.want == "42501" && err != nil {
					t.Errorf("%s, by the owner: %v: this test shows nothing", tt.name, err)
				}
			})
		}
	})
}

// A role that has learnt another's claims can neither take its ticket back nor
// keep it alive, and doesn't see its metadata. The other role can.
func TestRoles_AnothersClaims(t *testing.T) {
	t.Parallel()
	f := newFort(t)
	app := newConn(t, pgtest.PoolOn(t, f.dsn))
	exec(t, f.owner, `SELECT pglock.acquire('{secret}', '1 h', metadata => '{"password": "x"}')`)
	claim := newUUID()
	exec(t, f.owner, `SELECT pglock.enqueue('secret', '1 h', $1, 'nobody listens')`, claim)
	const (
		expiry   = `SELECT expires_at::text FROM pglock.list_waiters()`
		metadata = `SELECT metadata IS NOT NULL FROM pglock.list_leases('secret')`
		refresh  = `SELECT state FROM pglock.refresh('{secret}', ARRAY[$1::uuid])`
		cancel   = `SELECT pglock.cancel('secret', $1)`
	)
	before := one[string](t, f.owner, expiry)
	held := one[[16]byte](t, f.owner, `SELECT claim FROM pglock.leases WHERE name = 'secret'`)
	if state := one[string](t, app, refresh, claim); state != "gone" {
		t.Errorf("refresh of another's ticket says %s", state)
	}
	exec(t, app, cancel, claim)
	exec(t, app, cancel, held)
	if after := one[string](t, f.owner, expiry); after != before {
		t.Errorf("the ticket ran until %s, and now until %s", before, after)
	}
	if one[bool](t, app, metadata) {
		t.Error("another's metadata is shown")
	}
	if !one[bool](t, f.owner, metadata) || one[string](t, f.owner, refresh, claim) != "waiting" || one[string](t, f.owner, expiry) == before {
		t.Error("its own role can't either: this test shows nothing")
	}
	exec(t, f.owner, cancel, claim)
	exec(t, f.owner, cancel, held)
	if n := one[int64](t, f.owner, `SELECT count(*) FROM pglock.list_waiters()`) + one[int64](t, f.owner, `SELECT count(*) FROM pglock.list_leases('secret')`); n != 0 {
		t.Error("its own role can't take them back: this test shows nothing")
	}
}

// The privilege TRIGGER is enough to replace a trigger: protect refuses, and
// PostgreSQL itself doesn't, as the comment on protect says.
func TestRoles_TriggerPrivilege(t *testing.T) {
	t.Parallel()
	f := newFort(t)
	exec(t, f.owner, `GRANT TRIGGER ON accounts TO `+f.role)
	for _, tt := range []struct{ sql, want string }{
		{`SELECT pglock.protect('accounts', '%')`, "42501"},
		{`SELECT pglock.unprotect('accounts')`, "42501"},
		{`CREATE OR REPLACE TRIGGER pglock_protect BEFORE UPDATE ON accounts
			FOR EACH STATEMENT EXECUTE FUNCTION pglock.refuse_unpresented('%')`, ""},
	} {
		if state := paths[0].run(f, t, pgx.ReadCommitted, []string{tt.sql}); state != tt.want {
			t.Errorf("%s: SQLSTATE %q, want %q", tt.sql, state, tt.want)
		}
	}
}

// Who may call fence is believed: a huge token shuts the resource out, and an
// administrator sets it back.
func TestRoles_ResetFence(t *testing.T) {
	t.Parallel()
	f := newFort(t)
	app := pgtest.PoolOn(t, f.dsn)
	fence := func(token pglock.Token) error {
		return pgx.BeginFunc(t.Context(), app, func(tx pgx.Tx) error { return pglock.Fence(t.Context(), tx, "r", token) })
	}
	type row struct {
		Resource string
		Token    int64
	}
	list := func(want ...row) {
		t.Helper()
		rows, err := f.owner.Query(t.Context(), `SELECT * FROM pglock.list_fences() WHERE resource <> 'ledger'`)
		if err != nil {
			t.Fatal(err)
		}
		found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(append([]row{}, want...), found); diff != "" {
			t.Error(diff)
		}
	}
	const huge = 1<<63 - 1
	if err := errors.Join(fence(17), fence(huge)); err != nil {
		t.Fatal(err)
	}
	if err := fence(18); !errors.Is(err, pglock.ErrFenced) {
		t.Errorf("below a huge token: %v, want ErrFenced", err)
	}
	list(row{"r", huge})
	if was := one[int64](t, f.owner, `SELECT pglock.reset_fence('r', 17)`); was != huge {
		t.Errorf("reset_fence says that %d was accepted", was)
	}
	list(row{"r", 17})
	if err := fence(16); !errors.Is(err, pglock.ErrFenced) {
		t.Errorf("below what it was set back to: %v, want ErrFenced", err)
	}
	if err := fence(18); err != nil {
		t.Error(err)
	}
	one[int64](t, f.owner, `SELECT pglock.reset_fence('r')`)
	list()
	if err := fence(1); err != nil {
		t.Errorf("after it was forgotten: %v", err)
	}
	for sql, want := range map[string]string{
		`SELECT pglock.reset_fence('s')`: "P0002", `SELECT pglock.reset_fence(NULL)`: "22023", `SELECT pglock.reset_fence('r', 0)`: "22023",
	} {
		if _, err := f.owner.Exec(t.Context(), sql); sqlState(err) != want {
			t.Errorf("%s: %v, want SQLSTATE %s", sql, err, want)
		}
	}
}

// A reset waits for a transaction that is fenced, and that one loses nothing.
func TestRoles_ResetFence_Waits(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	fenced, admin := newConn(t, pool), newConn(t, pool)
	exec(t, fenced, `BEGIN; SELECT pglock.fence('r', 5)`)
	exec(t, fenced, `COMMIT; BEGIN; SELECT pglock.fence('r', 5)`)
	done := make(chan error, 1)
	go func() {
		_, err := admin.Exec(context.Background(), `SELECT pglock.reset_fence('r')`)
		done <- err
	}()
	blockedBy(t, pool, fenced.PgConn().PID())
	exec(t, fenced, `COMMIT`)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// An owner who is no superuser installs the schema and protects tables, and
// everything works for a role with the README's grants.
func TestRoles_OwnerIsNoSuperuser(t *testing.T) {
	t.Parallel()
	dsn := pgtest.EmptyDSN(t)
	super := pgtest.PoolOn(t, dsn)
	role, ownerDSN := login(t, super, dsn, `SELECT`)
	exec(t, super, `GRANT CREATE ON DATABASE `+one[string](t, super, `SELECT current_database()`)+` TO `+role)
	owner := pgtest.PoolOn(t, ownerDSN)
	if err := migrations.Up(t.Context(), owner); err != nil {
		t.Fatal(err)
	}
	exec(t, owner, `CREATE SCHEMA shop; CREATE TABLE shop.accounts (id int PRIMARY KEY, balance int);
		INSERT INTO shop.accounts VALUES (1, 100); SELECT pglock.guard_version('shop.accounts');
		SELECT pglock.protect('shop.accounts', 'accounts/%')`)
	role, appDSN := login(t, super, dsn, `SELECT`)
	exec(t, owner, appGrants(t, role)+`GRANT USAGE ON SCHEMA shop TO `+role+`; GRANT SELECT, UPDATE ON shop.accounts TO `+role)
	app := pgtest.PoolOn(t, appDSN)
	update := func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `UPDATE shop.accounts SET balance = balance - 1`)
		return err
	}
	if err := pglock.Explain(pgx.BeginFunc(t.Context(), app, func(tx pgx.Tx) error { return update(t.Context(), tx) })); !errors.Is(err, pglock.ErrUnpresented) {
		t.Errorf("a write without a lease: %v, want ErrUnpresented", err)
	}
	l := acquire(t, newClient(t, app), "accounts/1", time.Hour)
	if err := l.InTx(t.Context(), app, update); err != nil {
		t.Error(err)
	}
	if version := one[int64](t, app, `SELECT version FROM shop.accounts WHERE balance = 99`); version != 2 {
		t.Errorf("the version is %d, want 2", version)
	}
	if err := l.Release(t.Context()); err != nil {
		t.Error(err)
	}
	exec(t, owner, `SELECT pglock.unprotect('shop.accounts')`)
	exec(t, app, `UPDATE shop.accounts SET balance = 0`)
}
