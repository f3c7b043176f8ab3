-- The lease protocol, in this file and the five after it. hand_on, which grants a
-- lease to who waits for it, is in 00008_queue.sql. What takes, renews or
-- frees leases is set-based and answers a row for each name it was asked about;
-- every row lock is taken in the order of the names, but for those that a release
-- has to wait for, which come last. A token stands for one tenure of one name, so
-- that arrays of names and tokens need not be joined: each is looked up in its own.
-- Whatever ends a tenure first locks the row FOR UPDATE, which waits for a
-- guard's FOR KEY SHARE; a renewal is a plain UPDATE of columns outside any
-- key, which passes it.
--
-- Plans of what works on arrays are generic: the planner takes an array that it
-- doesn't know for one of ten elements, finds every custom plan cheaper, and would
-- plan each statement anew at each call, for several times what it then takes to
-- run. All go by the indexes: between two vacuums these small tables are full of
-- dead rows, which a scan of the heap would read each time. A plan that has to scan
-- after all looks dear enough to be compiled, at each call: no JIT. Statements are
-- few because each costs as much as the work that it does; one name, which is what
-- most calls are about, has functions of its own, at a third of what the arrays cost.
--
-- Where leases.awaited says that nobody waits, one statement locks a row and writes it,
-- which it finds again by its ctid: no second look in the index, and a plan that hangs
-- on no statistics, as a join would. A row that was written between the statement's
-- snapshot and its lock has another ctid then, and is left to the functions that leave
-- nothing out.

-- +goose Up

-- Statements that wait need a snapshot of their own after the wait, which only
-- READ COMMITTED gives them; no function can change the level from inside.
-- +goose StatementBegin
CREATE FUNCTION pglock.check_level(verb text) RETURNS void
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'pglock.% needs READ COMMITTED, this transaction is at %', verb, upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'invalid_transaction_state',
                  HINT = 'Call it in a transaction begun with BEGIN ISOLATION LEVEL READ COMMITTED.';
    END IF;
END
$$;
-- +goose StatementEnd

-- Creates the rows of names never used before, unheld and with token 0: a
-- first INSERT draws its token before it is known to win. Waits no longer than
-- 100 ms for another transaction that is creating one of them, and then says
-- false. It is here that a name is looked at: what can't be one has no row.
-- +goose StatementBegin
CREATE FUNCTION pglock.create_names(names text[]) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms'
AS $$
BEGIN
    PERFORM pglock.check_name('lease', n.name) FROM unnest(create_names.names) AS n (name);
    INSERT INTO pglock.leases AS l (name, token)
    SELECT n.name, 0 FROM unnest(create_names.names) AS n (name) ORDER BY n.name COLLATE "C"
    ON CONFLICT DO NOTHING;
    RETURN true;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
END
$$;
-- +goose StatementEnd

-- The TTL of a request that check_request has nothing to say about, without days
-- as there, else NULL. The planner puts its text in the place of a call, so that it
-- is one expression: PL/pgSQL sets up each anew in each transaction.
-- +goose StatementBegin
CREATE FUNCTION pglock.plain_ttl(ttl interval, claim uuid, owner text, metadata jsonb) RETURNS interval
LANGUAGE sql STABLE
AS $$
    SELECT CASE WHEN ttl BETWEEN '100 ms' AND '24 h' AND claim IS NOT NULL
        AND (owner IS NULL OR octet_length(owner) <= 1024)
        AND (metadata IS NULL OR octet_length(metadata::text) <= 8192)
        AND current_setting('transaction_isolation') = 'read committed'
        THEN date_part('epoch', ttl) * interval '1 s' END
$$;
-- +goose StatementEnd

-- Refuses what acquire and enqueue can't grant, and returns the TTL without days:
-- one that is added to a timestamp has 23 or 25 hours where summer time changes,
-- and whoever counts on from the answer would believe 24.
-- +goose StatementBegin
CREATE FUNCTION pglock.check_request(verb text, ttl interval, claim uuid, owner text, metadata jsonb) RETURNS interval
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM pglock.check_level(verb);
    END IF;
    IF ttl IS NULL OR ttl < interval '100 ms' OR ttl > interval '24 h' THEN
        RAISE EXCEPTION 'TTL % is out of range', ttl
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A TTL is between 100 ms and 24 h.';
    ELSIF octet_length(owner) > 1024 OR octet_length(metadata::text) > 8192 THEN
        RAISE EXCEPTION 'owner or metadata is too long: % and % bytes', octet_length(owner), octet_length(metadata::text)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'An owner has at most 1024 bytes, metadata 8192.';
    ELSIF claim IS NULL THEN
        RAISE EXCEPTION 'claim is NULL'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave it out, or give each acquire a uuid of its own.';
    END IF;
    RETURN date_part('epoch', ttl) * interval '1 s';
END
$$;
-- +goose StatementEnd

-- Takes each lease that is free or has expired and that nobody waits for; never
-- waits for a holder. One that somebody waits for goes to the head of its
-- queue. For one that was not granted the answer says who holds it and for how
-- long yet (a NULL token: nobody yet, but another transaction is creating the
-- name or has its row; a time left of zero or less: it has expired, likewise). A
-- repeat with the same claim while its grant lasts is granted the same token
-- again and extends nothing. With whole it takes all of the names or none.
--   SELECT * FROM pglock.acquire('{accounts/42}', '30 s');
-- +goose StatementBegin
CREATE FUNCTION pglock.acquire(
    names    text[],
    ttl      interval,
    claim    uuid  DEFAULT gen_random_uuid(),
    owner    text  DEFAULT NULL,
    metadata jsonb DEFAULT NULL,
    whole    boolean DEFAULT false
) RETURNS TABLE (name text, granted boolean, token bigint, holder text, remaining interval, expires_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
DECLARE
    free    text[];
    taken   text[] := '{}';
    passed  integer;                                          -- of the free ones: to those who wait for them
    lease   text;
    missing text[];
    created boolean := false;
    known   boolean;                                          -- this may be a repeat
    moment  timestamptz;
BEGIN
    acquire.ttl := pglock.check_request('acquire', acquire.ttl, acquire.claim, acquire.owner, acquire.metadata);
    IF cardinality(acquire.names) > 1
       AND cardinality(acquire.names) > (SELECT count(DISTINCT n.name) FROM unnest(acquire.names) AS n (name)) THEN
        RAISE EXCEPTION 'a lease name stands twice or is NULL in %', acquire.names USING ERRCODE = 'invalid_parameter_value';
    END IF;
    granted := true;
    holder := acquire.owner;
    remaining := acquire.ttl;
    LOOP
        -- One that is held dooms the whole: look before any row is locked.
        IF acquire.whole THEN
            known := EXISTS (
                SELECT FROM pglock.leases l WHERE l.name = ANY (acquire.names) AND l.expires_at > clock_timestamp());
            EXIT WHEN known;
        END IF;
        SELECT array_agg(f.name) INTO free FROM (
            SELECT l.name FROM pglock.leases l
            WHERE l.name = ANY (acquire.names) AND l.expires_at <= clock_timestamp()
              AND l.name <> ALL (taken)                       -- a wait may outlast a short TTL
            ORDER BY l.name
            FOR UPDATE SKIP LOCKED) f;
        IF free IS NOT NULL THEN
            moment := clock_timestamp();
            -- A statement of its own: it sees every ticket drawn before the rows were locked.
            FOR name, token, expires_at IN
                UPDATE pglock.leases AS l
                SET token = pglock.draw(l.token), holder = acquire.owner, role = session_user,
                    claim = acquire.claim, acquired_at = moment, expires_at = moment + acquire.ttl,
                    ttl = acquire.ttl, metadata = acquire.metadata, timeline = pglock.timeline(), awaited = false
                WHERE l.name = ANY (free)
                  AND NOT EXISTS (SELECT FROM pglock.waiters w WHERE w.name = l.name)
                  AND (SELECT e.timeline = pglock.timeline() FROM pglock.epoch e WHERE e.singleton)
                  AND (NOT acquire.whole OR cardinality(free) = cardinality(acquire.names)
                       AND NOT EXISTS (SELECT FROM pglock.waiters w WHERE w.name = ANY (free)))
                RETURNING l.name, l.token, l.expires_at
            LOOP
                taken := taken || name;
                RETURN NEXT;
            END LOOP;
            IF cardinality(taken) = cardinality(acquire.names) THEN
                RETURN;
            END IF;
            PERFORM pglock.follow_timeline();
            passed := 0;
            FOREACH lease IN ARRAY free LOOP
                IF lease <> ALL (taken) AND coalesce(pglock.hand_on(lease), true) THEN
                    passed := passed + 1;
                END IF;
            END LOOP;
            -- Whoever waited for the others has gone, or the timeline was in their way.
            CONTINUE WHEN cardinality(taken) + passed < cardinality(free)
                AND (NOT acquire.whole OR passed = 0 AND cardinality(free) = cardinality(acquire.names));
        END IF;
        SELECT coalesce(array_agg(n.name) FILTER (WHERE l.name IS NULL), '{}'), bool_or(l.claim = acquire.claim)
        INTO missing, known
        FROM unnest(acquire.names) AS n (name) LEFT JOIN pglock.leases l ON l.name = n.name;
        EXIT WHEN created OR cardinality(missing) = 0 OR NOT pglock.create_names(missing);
        created := true;
    END LOOP;

    moment := clock_timestamp();
    IF known THEN
        -- A repeat locks the row again, so that its commit too waits for a synchronous
        -- standby: with a lock that passes a renewal's and an enqueue's, or it would be skipped.
        PERFORM FROM pglock.leases l
        WHERE l.name = ANY (acquire.names) AND l.claim = acquire.claim AND l.role = session_user AND l.expires_at > moment
        FOR KEY SHARE SKIP LOCKED;
    END IF;
    RETURN QUERY
    SELECT n.name, coalesce(l.claim = acquire.claim AND l.role = session_user AND l.expires_at > moment, false),
           l.token, l.holder, l.expires_at - moment, l.expires_at
    FROM unnest(acquire.names) AS n (name)
    LEFT JOIN pglock.leases l ON l.name = n.name AND l.claim IS NOT NULL
    WHERE n.name <> ALL (taken);
END
$$;
-- +goose StatementEnd

-- An answer of acquire about one name. PostgreSQL works out the columns of a function
-- that names them itself, or of one with OUT parameters, anew at each call.
CREATE TYPE pglock.bid AS (granted boolean, token bigint, holder text, remaining interval, expires_at timestamptz);

-- acquire for one name, as the client calls it: quick where the answer is simple.
-- +goose StatementBegin
CREATE FUNCTION pglock.acquire_one(name text, ttl interval, claim uuid, owner text, metadata jsonb) RETURNS pglock.bid
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
DECLARE
    quick interval := CASE WHEN current_setting('synchronous_commit') <> 'off'
        THEN pglock.plain_ttl(acquire_one.ttl, acquire_one.claim, acquire_one.owner, acquire_one.metadata) END;
    bid   pglock.bid;
BEGIN
    IF quick IS NOT NULL THEN
        -- The row is locked before the rest of the statement looks at it. One that was
        -- written meanwhile, or that draw would refuse, or whose epoch has to be looked
        -- at, or that somebody may be waiting for: of these acquire has the last word.
        UPDATE pglock.leases AS l
        SET token = nextval('pglock.leases_token_seq'), holder = acquire_one.owner, role = session_user,
            claim = acquire_one.claim, acquired_at = clock_timestamp(), expires_at = clock_timestamp() + quick,
            ttl = quick, metadata = acquire_one.metadata
        WHERE l.ctid = (
            SELECT f.ctid FROM pglock.leases f
            WHERE f.name = acquire_one.name AND f.expires_at <= clock_timestamp() AND NOT f.awaited
              AND f.timeline = pglock.timeline()
              AND f.token <= coalesce(pg_sequence_last_value('pglock.leases_token_seq'), 0)
            FOR UPDATE SKIP LOCKED)
        RETURNING true, l.token, l.holder, l.ttl, l.expires_at INTO bid;
        IF FOUND THEN
            RETURN bid;
        END IF;
        SELECT false, l.token, l.holder, l.expires_at - clock_timestamp(), l.expires_at INTO bid
        FROM pglock.leases l
        WHERE l.name = acquire_one.name AND l.expires_at > clock_timestamp() AND l.claim <> acquire_one.claim;
        IF FOUND THEN
            RETURN bid;
        END IF;
    END IF;
    SELECT a.granted, a.token, a.holder, a.remaining, a.expires_at INTO bid
    FROM pglock.acquire(ARRAY[acquire_one.name], acquire_one.ttl, acquire_one.claim, acquire_one.owner, acquire_one.metadata) a;
    RETURN bid;
END
$$;
-- +goose StatementEnd

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock FROM PUBLIC;

-- +goose Down
DROP FUNCTION pglock.acquire_one(text, interval, uuid, text, jsonb);
DROP TYPE pglock.bid;
DROP FUNCTION pglock.acquire(text[], interval, uuid, text, jsonb, boolean);
DROP FUNCTION pglock.check_request(text, interval, uuid, text, jsonb);
DROP FUNCTION pglock.plain_ttl(interval, uuid, text, jsonb);
DROP FUNCTION pglock.create_names(text[]);
DROP FUNCTION pglock.check_level(text);
