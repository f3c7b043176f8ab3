-- How tenures end: at once where nothing is in the way, after the guards that are
-- open, or not at all where those stay open for longer than the caller waits. The
-- states in the answers are those of renew; hand_on is in 00008_queue.sql.

-- +goose Up

-- Locks the row of a tenure FOR UPDATE, waiting no longer than told; says
-- whether it has it. What it waits for it asks again without waiting: a lock that a
-- subtransaction has waited for is not the outer one's. The UPDATE that ends the tenure
-- would then not be one of the key for a guard that comes to it from an older version
-- of the row, and that guard would pass.
--
-- First for whoever is no guard, who is through in a moment. For guards lock_timeout
-- counts anew each time, and new ones may keep coming: so it waits at a time no longer
-- than the same guards have been there, for those that come at such intervals outlast it.
-- +goose StatementBegin
CREATE FUNCTION pglock.lock_within(name text, token bigint, patience interval) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = 0
AS $$
DECLARE
    give_up timestamptz := clock_timestamp() + patience;
    first   boolean := true;
    pause   float8 := 0.001;                                  -- seconds
    locker  xid;                                              -- or multixact, which another guard changes
    before  xid;
    since   timestamptz;                                      -- it is there
    still   interval;
BEGIN
    LOOP
        PERFORM FROM pglock.leases l
        WHERE l.name = lock_within.name AND l.token = lock_within.token AND l.claim IS NOT NULL
        FOR UPDATE SKIP LOCKED;
        IF FOUND THEN
            RETURN true;
        END IF;
        SELECT l.xmax INTO locker FROM pglock.leases l
        WHERE l.name = lock_within.name AND l.token = lock_within.token AND l.claim IS NOT NULL;
        IF NOT FOUND OR clock_timestamp() >= give_up THEN
            RETURN false;
        END IF;
        IF before IS DISTINCT FROM locker THEN
            before := locker;
            since := clock_timestamp();
        END IF;
        still := CASE WHEN first THEN patience ELSE clock_timestamp() - since END;
        IF still < interval '8 ms' AND NOT first THEN
            PERFORM pg_sleep(pause);
            pause := least(2 * pause, 0.008);
            CONTINUE;
        END IF;
        BEGIN
            PERFORM set_config('lock_timeout', greatest(1, least(1e9, 1000 * extract(epoch FROM least(still, give_up - clock_timestamp()))))::bigint::text, true);
            IF first THEN
                first := false;
                PERFORM FROM pglock.leases l
                WHERE l.name = lock_within.name AND l.token = lock_within.token AND l.claim IS NOT NULL
                FOR NO KEY UPDATE;
            ELSE
                PERFORM FROM pglock.leases l
                WHERE l.name = lock_within.name AND l.token = lock_within.token AND l.claim IS NOT NULL
                FOR UPDATE;
            END IF;
            RAISE EXCEPTION USING ERRCODE = 'lock_not_available'; -- gives it back
        EXCEPTION
            WHEN lock_not_available THEN
                NULL;
            WHEN deadlock_detected THEN
                RETURN false;
        END;
    END LOOP;
END
$$;
-- +goose StatementEnd

-- The backends that hold a lease row locked. The row's xmax is the locker's
-- transaction or, with several, a multixact; which of the two can't be told
-- from SQL, so both are looked up, and only those that hold a lock on the
-- table count.
-- +goose StatementBegin
CREATE FUNCTION pglock.row_blockers(name text, OUT pids integer[], OUT since timestamptz)
LANGUAGE plpgsql
AS $$
DECLARE
    lockers xid[];
BEGIN
    SELECT ARRAY[l.xmax] INTO lockers FROM pglock.leases l WHERE l.name = row_blockers.name;
    BEGIN
        lockers := lockers || ARRAY(SELECT m.xid FROM pg_get_multixact_members(lockers[1]) m);
    EXCEPTION WHEN OTHERS THEN
        NULL;                                                 -- no such multixact: a single transaction
    END;
    SELECT array_agg(DISTINCT t.pid ORDER BY t.pid), min(a.xact_start) INTO pids, since
    FROM pg_locks t
    JOIN pg_locks r ON r.pid = t.pid AND r.relation = 'pglock.leases'::regclass AND r.granted
         AND r.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    LEFT JOIN pg_stat_activity a ON a.pid = t.pid
    WHERE t.locktype = 'transactionid' AND t.granted AND t.transactionid = ANY (lockers) AND t.pid <> pg_backend_pid();
END
$$;
-- +goose StatementEnd

-- Frees the leases of tenures that are over, or hands each on to whoever waits
-- for it. The caller has their rows locked FOR UPDATE, by an earlier statement:
-- this one sees every ticket drawn before that. awaited is a guess that spares a
-- statement: are they all waited for?
-- +goose StatementBegin
CREATE FUNCTION pglock.vacate(names text[], awaited boolean) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    freed  text[];
    again  text[];
    lease  text;
    handed boolean;
BEGIN
    LOOP
        freed := '{}';
        IF NOT awaited THEN
            WITH ended AS (
                UPDATE pglock.leases AS l
                SET claim = NULL, holder = NULL, role = NULL, expires_at = '-infinity', ttl = NULL, metadata = NULL,
                    awaited = false
                WHERE l.name = ANY (names) AND NOT EXISTS (SELECT FROM pglock.waiters w WHERE w.name = l.name)
                RETURNING l.name)
            SELECT coalesce(array_agg(e.name), '{}') INTO freed FROM ended e;
            IF cardinality(freed) = cardinality(names) THEN
                RETURN;
            END IF;
        END IF;
        again := '{}';
        FOREACH lease IN ARRAY names LOOP
            CONTINUE WHEN lease = ANY (freed);
            handed := pglock.hand_on(lease);
            IF handed IS NULL THEN                            -- who waits can't be asked, and will look himself
                UPDATE pglock.leases AS l
                SET claim = NULL, holder = NULL, role = NULL, expires_at = '-infinity', ttl = NULL, metadata = NULL,
                    awaited = true
                WHERE l.name = lease;
            ELSIF NOT handed THEN
                again := again || lease;                      -- nobody waits, or not any more
            END IF;
        END LOOP;
        EXIT WHEN cardinality(again) = 0;
        names := again;
        awaited := false;
    END LOOP;
END
$$;
-- +goose StatementEnd

-- Ends tenures, and hands each lease on to whoever waits for it. A row that an
-- open guard holds is waited for, all in all no longer than patience nor than
-- the lease has yet to run, and is then blocked: the tenure goes on, and the
-- release may be repeated. What could be locked at once stays locked during
-- such a wait: give a patience of 0 to free many, and a longer one to those
-- that were blocked.
--   SELECT * FROM pglock.release('{accounts/42}', '{17}');
-- +goose StatementBegin
CREATE FUNCTION pglock.release(names text[], tokens bigint[], patience interval DEFAULT '5 s')
RETURNS TABLE (name text, token bigint, state text, blockers integer[], since timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
DECLARE
    give_up timestamptz := clock_timestamp() + release.patience;
    locked  text[];
    ending  bigint[];                                         -- the tokens of what is locked
    ends    timestamptz;                                      -- when the first of them expires
    awaited boolean;                                          -- as it was before they were locked
    busy    record;
    moment  timestamptz;
BEGIN
    PERFORM pglock.check_tenures('release', release.names, release.tokens);
    SELECT coalesce(array_agg(h.name), '{}'), coalesce(array_agg(h.token), '{}'), min(h.expires_at), coalesce(bool_and(h.awaited), true)
    INTO locked, ending, ends, awaited FROM (
        SELECT l.name, l.token, l.expires_at, EXISTS (SELECT FROM pglock.waiters w WHERE w.name = l.name) AS awaited
        FROM pglock.leases l
        WHERE l.name = ANY (release.names) AND l.token = ANY (release.tokens)
          AND l.claim IS NOT NULL AND l.role = session_user
        ORDER BY l.name
        FOR UPDATE SKIP LOCKED) h;
    IF cardinality(locked) < cardinality(release.names) AND give_up > clock_timestamp() THEN
        FOR busy IN
            SELECT l.name, l.token, l.expires_at FROM pglock.leases l
            WHERE l.name = ANY (release.names) AND l.token = ANY (release.tokens)
              AND l.claim IS NOT NULL AND l.role = session_user AND l.name <> ALL (locked)
            ORDER BY l.name
        LOOP
            moment := clock_timestamp();
            IF least(give_up, busy.expires_at) > moment
               AND pglock.lock_within(busy.name, busy.token, least(give_up, busy.expires_at) - moment) THEN
                locked := locked || busy.name;
                ending := ending || busy.token;
                ends := least(ends, busy.expires_at);
            END IF;
        END LOOP;
    END IF;

    moment := clock_timestamp();
    IF ends <= moment THEN
        SELECT coalesce(array_agg(l.name), '{}'), coalesce(array_agg(l.token), '{}') INTO locked, ending
        FROM pglock.leases l WHERE l.name = ANY (locked) AND l.expires_at > moment;
    END IF;
    IF cardinality(locked) > 0 THEN
        PERFORM pglock.vacate(locked, awaited);
    END IF;
    IF cardinality(ending) = cardinality(release.tokens) THEN
        RETURN QUERY
        SELECT w.name, w.token, 'released', NULL::integer[], NULL::timestamptz
        FROM unnest(release.names, release.tokens) AS w (name, token);
        RETURN;
    END IF;
    RETURN QUERY
    SELECT f.name, f.token,
           CASE WHEN f.token = ANY (ending) AND f.name = ANY (locked) THEN 'released'
                WHEN f.state = 'busy' THEN 'blocked'
                ELSE f.state END,
           b.pids, b.since
    FROM pglock.fates(release.names, release.tokens, moment) f
    LEFT JOIN LATERAL pglock.row_blockers(f.name) b ON f.state = 'busy' AND f.token <> ALL (ending);
END
$$;
-- +goose StatementEnd

-- An answer of release about one tenure.
CREATE TYPE pglock.ending AS (state text, blockers integer[], since timestamptz);

-- release for one tenure, as the client calls it: quick where nothing is in its way.
-- awaited is a guess that spares a statement: does somebody wait?
-- +goose StatementBegin
CREATE FUNCTION pglock.release_one(name text, token bigint, patience interval, awaited boolean DEFAULT false) RETURNS pglock.ending
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
DECLARE
    ending   pglock.ending;
    head     pglock.waiters;
    first    bigint;                                          -- ticket of those who wait
    timeline text;                                            -- of the lease
    told     boolean;
BEGIN
    IF NOT release_one.awaited THEN
        UPDATE pglock.leases AS l
        SET claim = NULL, holder = NULL, role = NULL, expires_at = '-infinity', ttl = NULL, metadata = NULL
        WHERE l.ctid = (
            SELECT f.ctid FROM pglock.leases f
            WHERE f.name = release_one.name AND f.token = release_one.token AND f.claim IS NOT NULL AND f.role = session_user
              AND f.expires_at > clock_timestamp() AND NOT f.awaited
              AND current_setting('transaction_isolation') = 'read committed'
            FOR UPDATE SKIP LOCKED);
        IF FOUND THEN
            ending.state := 'released';
            RETURN ending;
        END IF;
    END IF;
    IF current_setting('transaction_isolation') = 'read committed' THEN
        SELECT CASE WHEN l.expires_at > clock_timestamp() THEN 'released' END, l.timeline,
               (SELECT min(w.ticket) FROM pglock.waiters w WHERE w.name = release_one.name)
        INTO ending.state, timeline, first
        FROM pglock.leases l
        WHERE l.name = release_one.name AND l.token = release_one.token AND l.claim IS NOT NULL AND l.role = session_user
        FOR UPDATE SKIP LOCKED;
    END IF;
    IF ending.state IS NULL THEN
        SELECT r.state, r.blockers, r.since INTO ending
        FROM pglock.release(ARRAY[release_one.name], ARRAY[release_one.token], release_one.patience) r;
        RETURN ending;
    END IF;
    -- Statements of their own, which see every ticket drawn before the row was locked.
    -- The first was seen before that: it may be gone, but none can have come before it.
    IF first IS NOT NULL AND timeline = pglock.timeline()
       AND release_one.token <= coalesce(pg_sequence_last_value('pglock.leases_token_seq'), 0)
       AND current_setting('synchronous_commit') <> 'off' THEN -- draw and the epoch have nothing to say
        DELETE FROM pglock.waiters w
        WHERE w.ctid = (
            SELECT f.ctid FROM pglock.waiters f WHERE f.name = release_one.name AND f.ticket = first
            FOR UPDATE SKIP LOCKED)
        RETURNING w.* INTO head;
        IF head.expires_at > clock_timestamp() THEN
            UPDATE pglock.leases AS l
            SET token = nextval('pglock.leases_token_seq'), holder = head.holder, role = head.role, claim = head.claim,
                acquired_at = clock_timestamp(), expires_at = head.expires_at, ttl = head.ttl, metadata = head.metadata
            WHERE l.name = release_one.name
            RETURNING CASE WHEN current_setting('pglock.quiet', true) = pg_current_xact_id()::text THEN true
                           ELSE pg_notify(head.channel, head.claim || ' ' || l.token) IS NOT NULL END INTO told;
            RETURN ending;
        END IF;
    END IF;
    PERFORM pglock.vacate(ARRAY[release_one.name], first IS NOT NULL);
    RETURN ending;
END
$$;
-- +goose StatementEnd

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock FROM PUBLIC;

-- +goose Down
DROP FUNCTION pglock.release_one(text, bigint, interval, boolean);
DROP TYPE pglock.ending;
DROP FUNCTION pglock.release(text[], bigint[], interval);
DROP FUNCTION pglock.vacate(text[], boolean);
DROP FUNCTION pglock.row_blockers(text);
DROP FUNCTION pglock.lock_within(text, bigint, interval);
