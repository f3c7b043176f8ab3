package pglock_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// The shapes of the protocol's SQL that are known to be wrong, each in a
// function that takes and answers what the right one does. A test that passes
// with the right one and with its mutant shows nothing.

// mutate creates a mutant under the name mutant.
func mutate(t testing.TB, pool *pgxpool.Pool, sql string) {
	t.Helper()
	exec(t, pool, `CREATE SCHEMA IF NOT EXISTS mutant`)
	exec(t, pool, sql)
}

// replace puts a function of the schema in its place with a part of it replaced.
func replace(t testing.TB, pool *pgxpool.Pool, function, old, new string) {
	t.Helper()
	source := one[string](t, pool, `SELECT pg_get_functiondef($1::regproc)`, "pglock."+function)
	if !strings.Contains(source, old) {
		t.Fatalf("%s has changed: there is no %q in it", function, old)
	}
	exec(t, pool, strings.ReplaceAll(source, old, new))
}

const (
	takeHead = `CREATE FUNCTION mutant.acquire(names text[], ttl interval, claim uuid DEFAULT gen_random_uuid(),
		owner text DEFAULT NULL, metadata jsonb DEFAULT NULL)
		RETURNS TABLE (name text, granted boolean, token bigint, holder text, remaining interval, expires_at timestamptz)
		LANGUAGE plpgsql AS $$ #variable_conflict use_column
		BEGIN RETURN QUERY `
	takeTail = `; IF NOT FOUND THEN RETURN QUERY SELECT l.name, false, l.token, l.holder,
			l.expires_at - clock_timestamp(), l.expires_at FROM pglock.leases l WHERE l.name = acquire.names[1];
		END IF; END $$`

	// The proposed row's token is drawn before the row lock is held.
	takeExcluded = takeHead + `INSERT INTO pglock.leases AS l (name, claim, role, expires_at, ttl)
		VALUES (acquire.names[1], acquire.claim, session_user, clock_timestamp() + acquire.ttl, acquire.ttl)
		ON CONFLICT (name) DO UPDATE SET token = EXCLUDED.token, claim = EXCLUDED.claim, role = EXCLUDED.role,
			expires_at = EXCLUDED.expires_at, ttl = EXCLUDED.ttl
		WHERE l.expires_at <= clock_timestamp()
		RETURNING l.name, true, l.token, l.holder, acquire.ttl, l.expires_at` + takeTail

	// A CTE draws the token before the row lock is held.
	takeEarly = takeHead + `WITH drawn AS MATERIALIZED (SELECT nextval('pglock.leases_token_seq') AS token)
		UPDATE pglock.leases AS l SET token = drawn.token, claim = acquire.claim, role = session_user,
			expires_at = clock_timestamp() + acquire.ttl, ttl = acquire.ttl
		FROM drawn WHERE l.name = acquire.names[1] AND l.expires_at <= clock_timestamp()
		RETURNING l.name, true, l.token, l.holder, acquire.ttl, l.expires_at` + takeTail

	// A plain UPDATE: a guard's FOR KEY SHARE doesn't hold it back.
	takePlain = takeHead + `UPDATE pglock.leases AS l SET token = nextval('pglock.leases_token_seq'),
			claim = acquire.claim, role = session_user, expires_at = clock_timestamp() + acquire.ttl, ttl = acquire.ttl
		WHERE l.name = acquire.names[1] AND l.expires_at <= clock_timestamp()
		RETURNING l.name, true, l.token, l.holder, acquire.ttl, l.expires_at` + takeTail

	// The time is that of the transaction's start.
	takeNow = takeHead + `UPDATE pglock.leases AS l SET token = nextval('pglock.leases_token_seq'),
			claim = acquire.claim, role = session_user, expires_at = now() + acquire.ttl, ttl = acquire.ttl
		WHERE l.name = (SELECT name FROM pglock.leases l WHERE name = acquire.names[1] AND expires_at <= clock_timestamp()
		                FOR UPDATE SKIP LOCKED)
		RETURNING l.name, true, l.token, l.holder, acquire.ttl, l.expires_at` + takeTail

	// The row is created with no bound on the wait for another creator.
	takeCreating = takeHead + `WITH created AS (INSERT INTO pglock.leases (name, token)
			SELECT n, 0 FROM unnest(acquire.names) n ON CONFLICT DO NOTHING RETURNING name)
		SELECT name, false, NULL::bigint, NULL::text, NULL::interval, NULL::timestamptz FROM created` + takeTail

	// The clock is read in the condition, which is not looked at again after
	// the wait for a transaction that only locked the row.
	guardEarly = `CREATE FUNCTION mutant.guard(name text, token bigint) RETURNS void LANGUAGE plpgsql AS $$
		BEGIN
			PERFORM FROM pglock.leases l WHERE l.name = guard.name AND l.token = guard.token AND l.claim IS NOT NULL
				AND l.expires_at > clock_timestamp() FOR KEY SHARE;
			IF NOT FOUND THEN RAISE EXCEPTION 'not held' USING ERRCODE = 'PW002'; END IF;
		END $$`

	// A renewal that asks only whose tenure it is, not whether it has ended.
	renewReviving = `CREATE FUNCTION mutant.renew(names text[], tokens bigint[])
		RETURNS TABLE (name text, token bigint, state text, remaining interval) LANGUAGE sql AS $$
			UPDATE pglock.leases AS l SET expires_at = clock_timestamp() + l.ttl
			WHERE l.name = names[1] AND l.token = tokens[1] RETURNING l.name, l.token, 'held', l.ttl $$`

	// Released by DELETE and granted by INSERT.
	takeInserting = takeHead + `INSERT INTO pglock.leases AS l (name, claim, role, expires_at, ttl)
		VALUES (acquire.names[1], acquire.claim, session_user, clock_timestamp() + acquire.ttl, acquire.ttl)
		ON CONFLICT DO NOTHING RETURNING l.name, true, l.token, l.holder, acquire.ttl, l.expires_at` + takeTail
	releaseDeleting = `CREATE FUNCTION mutant.release(names text[], tokens bigint[]) RETURNS void LANGUAGE sql AS $$
		DELETE FROM pglock.leases AS l WHERE l.name = names[1] AND l.token = tokens[1] $$`
)
