-- The lease protocol. What takes, renews or frees leases is set-based and
-- answers a row for each name it was asked about; every row lock is taken in
-- the order of the names, but for those that a release has to wait for, which
-- come last. A token stands for one tenure of one name, so that
-- arrays of names and tokens need not be joined: each is looked up in its own.
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
--
-- States in the answers:
--   held      the tenure goes on
--   released  this call ended it
--   idle      the row is free: an earlier release, or one by force, ended it
--   expired   its time ran out, and nobody has taken it since
--   taken     somebody else has been granted the lease since
--   busy      another transaction has the row locked: not known, ask again
--   blocked   an open guard is in the way of the release

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
                IF lease <> ALL (taken) AND pglock.hand_on(lease) THEN
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

-- What became of tenures that a renewal or a release could not touch.
-- +goose StatementBegin
CREATE FUNCTION pglock.fates(names text[], tokens bigint[], moment timestamptz)
RETURNS TABLE (name text, token bigint, state text)
LANGUAGE sql STABLE
AS $$
    SELECT w.name, w.token, CASE
        WHEN l.name IS NULL THEN 'expired'                    -- purged: only idle rows are
        WHEN l.token IS DISTINCT FROM w.token THEN 'taken'
        WHEN l.claim IS NULL THEN 'idle'
        WHEN l.role <> session_user THEN 'taken'
        WHEN l.expires_at <= moment THEN 'expired'
        ELSE 'busy' END
    FROM unnest(names, tokens) AS w (name, token) LEFT JOIN pglock.leases l ON l.name = w.name
$$;
-- +goose StatementEnd

-- Refuses arrays that don't pair up.
-- +goose StatementBegin
CREATE FUNCTION pglock.check_tenures(verb text, names text[], tokens bigint[]) RETURNS void
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM pglock.check_level(verb);
    END IF;
    IF names IS NULL OR tokens IS NULL OR cardinality(names) <> cardinality(tokens) THEN
        RAISE EXCEPTION '% names beside % tokens', coalesce(cardinality(names), 0), coalesce(cardinality(tokens), 0)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Give each name its token.';
    END IF;
END
$$;
-- +goose StatementEnd

-- Extends each tenure by its TTL, counted from now; never revives one that has
-- ended and never waits for a row: what is locked by another transaction is
-- busy. The rows are locked first and the time is taken after that.
--   SELECT * FROM pglock.renew('{accounts/42}', '{17}');
-- +goose StatementBegin
CREATE FUNCTION pglock.renew(names text[], tokens bigint[])
RETURNS TABLE (name text, token bigint, state text, remaining interval)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
DECLARE
    locked  text[];
    moment  timestamptz;
    renewed bigint;
BEGIN
    PERFORM pglock.check_tenures('renew', renew.names, renew.tokens);
    PERFORM pglock.insist_on_commit();
    SELECT array_agg(h.name) INTO locked FROM (
        SELECT l.name FROM pglock.leases l
        WHERE l.name = ANY (renew.names) AND l.token = ANY (renew.tokens)
          AND l.claim IS NOT NULL AND l.role = session_user
        ORDER BY l.name
        FOR NO KEY UPDATE SKIP LOCKED) h;
    moment := clock_timestamp();
    RETURN QUERY
    UPDATE pglock.leases AS l SET expires_at = moment + l.ttl
    WHERE l.name = ANY (locked) AND l.expires_at > moment
    RETURNING l.name, l.token, 'held', l.ttl;
    GET DIAGNOSTICS renewed = ROW_COUNT;
    IF renewed < cardinality(renew.names) THEN
        RETURN QUERY                                          -- a row that is locked and alive has just been renewed
        SELECT f.name, f.token, f.state, NULL::interval
        FROM pglock.fates(renew.names, renew.tokens, moment) f
        WHERE f.state <> 'busy' OR f.name <> ALL (coalesce(locked, '{}'));
    END IF;
END
$$;
-- +goose StatementEnd

-- Locks the row of a tenure FOR UPDATE, waiting no longer than told; says
-- whether it has it.
-- +goose StatementBegin
CREATE FUNCTION pglock.lock_within(name text, token bigint, patience interval) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = 0
AS $$
BEGIN
    PERFORM set_config('lock_timeout', greatest(1, ceil(extract(epoch FROM patience) * 1000))::bigint::text, true);
    PERFORM FROM pglock.leases l
    WHERE l.name = lock_within.name AND l.token = lock_within.token AND l.claim IS NOT NULL
    FOR UPDATE;
    RETURN FOUND;
EXCEPTION WHEN lock_not_available THEN
    RETURN false;
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
    freed text[];
    again text[];
    lease text;
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
            IF lease <> ALL (freed) AND NOT pglock.hand_on(lease) THEN
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
        DELETE FROM pglock.waiters w WHERE w.name = release_one.name AND w.ticket = first RETURNING w.* INTO head;
        IF head.expires_at > clock_timestamp() THEN
            UPDATE pglock.leases AS l
            SET token = nextval('pglock.leases_token_seq'), holder = head.holder, role = head.role, claim = head.claim,
                acquired_at = clock_timestamp(), expires_at = head.expires_at, ttl = head.ttl, metadata = head.metadata
            WHERE l.name = release_one.name
            RETURNING CASE WHEN current_setting('pglock.quiet', true) = 'on' THEN true
                           ELSE pg_notify(head.channel, head.claim || ' ' || l.token) IS NOT NULL END INTO told;
            RETURN ending;
        END IF;
    END IF;
    PERFORM pglock.vacate(ARRAY[release_one.name], first IS NOT NULL);
    RETURN ending;
END
$$;
-- +goose StatementEnd

-- What many calls of release and of acquire would do, in one transaction: first
-- ends tenures, as release does with a patience of 0, then takes leases for one
-- owner, each with a TTL and metadata of its own, or all with the same where those
-- arrays have one element. A lease that it frees it can take in the same call, unless
-- somebody waits for that. It answers a row for each name wanted, granted or refused,
-- and one for each token that was not simply released, with a state of release: a
-- token without a row was released. The wanted share the claim, which a repeat gives
-- again.
--   SELECT * FROM pglock.exchange('{accounts/42}', '{17}', '{accounts/43}', '{30 s}', '{null}');
-- +goose StatementBegin
CREATE FUNCTION pglock.exchange(
    ended     text[],
    tokens    bigint[],
    wanted    text[],
    ttls      interval[],
    metadatas jsonb[],
    claim     uuid DEFAULT gen_random_uuid(),
    owner     text DEFAULT NULL
) RETURNS TABLE (name text, token bigint, state text, blockers integer[], since timestamptz,
                 holder text, remaining interval, expires_at timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
DECLARE
    before  bigint := coalesce(pg_sequence_last_value('pglock.leases_token_seq'), 0);
    caller  name := session_user;
    size    integer := cardinality(exchange.wanted);
    alike   boolean := size > 0 AND cardinality(exchange.ttls) = 1 AND cardinality(exchange.metadatas) = 1;
    common  interval := CASE WHEN (alike OR size = 0 AND cardinality(exchange.ttls) = 0 AND cardinality(exchange.metadatas) = 0)
        AND cardinality(exchange.ended) = cardinality(exchange.tokens) AND current_setting('synchronous_commit') <> 'off'
        THEN pglock.plain_ttl(CASE WHEN size = 0 THEN '1 s' ELSE exchange.ttls[1] END, exchange.claim, exchange.owner, exchange.metadatas[1]) END;
    own     interval[];                                       -- the TTL of each name, where they have not all the same
    freed   bigint[];                                         -- tokens
    taken   integer := 0;
    twice   boolean;
    missing text[];
    rest    record;                                           -- of the names wanted: those with the same TTL and metadata
BEGIN
    IF common IS NULL THEN
        IF (alike OR size = cardinality(exchange.ttls) AND size = cardinality(exchange.metadatas)) IS NOT TRUE THEN
            RAISE EXCEPTION '% names beside % TTLs and % metadata', size, cardinality(exchange.ttls), cardinality(exchange.metadatas)
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Give each name its TTL and its metadata, NULL for none, or one of both for all.';
        END IF;
        PERFORM pglock.check_tenures('exchange', exchange.ended, exchange.tokens);
        PERFORM pglock.check_request('exchange', '1 s', exchange.claim, exchange.owner, NULL);
        own := ARRAY(
            SELECT pglock.check_request('exchange', w.ttl, exchange.claim, exchange.owner, w.metadata)
            FROM unnest(exchange.ttls, exchange.metadatas) AS w (ttl, metadata));
        IF alike THEN
            common := own[1];
        END IF;
        PERFORM pglock.insist_on_commit();
    END IF;
    -- One statement each, for what is as simple as most calls are, as in release_one and
    -- acquire_one; the rest goes through the functions that leave nothing out.
    IF cardinality(exchange.ended) > 0 THEN
        WITH done AS (
            UPDATE pglock.leases AS l
            SET claim = NULL, holder = NULL, role = NULL, expires_at = '-infinity', ttl = NULL, metadata = NULL
            WHERE l.ctid = ANY (ARRAY(
                SELECT f.ctid FROM pglock.leases f
                WHERE f.name = ANY (exchange.ended) AND f.token = ANY (exchange.tokens) AND f.claim IS NOT NULL AND f.role = caller
                  AND f.expires_at > clock_timestamp() AND NOT f.awaited
                ORDER BY f.name
                FOR UPDATE SKIP LOCKED))
            RETURNING l.token)
        SELECT coalesce(array_agg(d.token), '{}') INTO freed FROM done d;
        IF cardinality(freed) < cardinality(exchange.ended) THEN
            RETURN QUERY
            SELECT r.name, r.token, r.state, r.blockers, r.since, NULL::text, NULL::interval, NULL::timestamptz
            FROM (SELECT array_agg(e.name) AS names, array_agg(e.token) AS tokens
                  FROM unnest(exchange.ended, exchange.tokens) AS e (name, token)
                  WHERE (e.token = ANY (freed)) IS NOT TRUE
                  HAVING count(*) > 0) e,
                 LATERAL pglock.release(e.names, e.tokens, '0') r;
        END IF;
    END IF;
    IF size > 0 THEN
        RETURN QUERY
        UPDATE pglock.leases AS l
        SET token = nextval('pglock.leases_token_seq'), holder = exchange.owner, role = caller, claim = exchange.claim,
            acquired_at = clock_timestamp(),
            expires_at = clock_timestamp() + coalesce(common, own[array_position(exchange.wanted, l.name)]),
            ttl = coalesce(common, own[array_position(exchange.wanted, l.name)]),
            metadata = exchange.metadatas[CASE WHEN alike THEN 1 ELSE array_position(exchange.wanted, l.name) END]
        WHERE l.ctid = ANY (ARRAY(
            SELECT f.ctid FROM pglock.leases f
            WHERE f.name = ANY (exchange.wanted) AND f.expires_at <= clock_timestamp() AND NOT f.awaited
              AND f.timeline = (SELECT pglock.timeline()) AND f.token <= before
            ORDER BY f.name
            FOR UPDATE SKIP LOCKED))
        RETURNING l.name, l.token, 'granted', NULL::integer[], NULL::timestamptz, l.holder, l.ttl, l.expires_at;
        GET DIAGNOSTICS taken = ROW_COUNT;
    END IF;
    IF taken < size THEN
        SELECT array_agg(w.name) FILTER (WHERE l.name IS NULL), count(DISTINCT w.name) < count(*)
        INTO missing, twice
        FROM unnest(exchange.wanted) AS w (name) LEFT JOIN pglock.leases l ON l.name = w.name;
        IF twice THEN
            RAISE EXCEPTION 'a lease name stands twice or is NULL in %', exchange.wanted USING ERRCODE = 'invalid_parameter_value';
        ELSIF missing IS NOT NULL THEN
            PERFORM pglock.create_names(missing);             -- all of them in order, and acquire sees some at a time
        END IF;
        IF alike THEN
            ttls := array_fill(ttls[1], ARRAY[size]);
            metadatas := array_fill(metadatas[1], ARRAY[size]);
        END IF;
        FOR rest IN
            SELECT w.ttl, w.metadata, array_agg(w.name) AS names
            FROM unnest(exchange.wanted, exchange.ttls, exchange.metadatas) AS w (name, ttl, metadata)
            LEFT JOIN pglock.leases l ON l.name = w.name
            -- What was granted above needs no more; what an earlier call with this claim was
            -- granted, maybe while this one waited, has no answer yet.
            WHERE (l.token > before AND l.claim = exchange.claim AND l.xmin = pg_current_xact_id_if_assigned()::xid) IS NOT TRUE
            GROUP BY w.ttl, w.metadata
        LOOP
            RETURN QUERY
            SELECT a.name, a.token, CASE WHEN a.granted THEN 'granted' ELSE 'refused' END, NULL::integer[], NULL::timestamptz,
                   a.holder, a.remaining, a.expires_at
            FROM pglock.acquire(rest.names, rest.ttl, exchange.claim, exchange.owner, rest.metadata, false) a;
        END LOOP;
    END IF;
END
$$;
-- +goose StatementEnd

-- Above READ COMMITTED a tenure may be younger than the snapshot, which then
-- shows nothing of it. That is no loss: the transaction has to start over.
-- +goose StatementBegin
CREATE FUNCTION pglock.check_snapshot(name text, token bigint, seen bigint) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') AND coalesce(seen, 0) < token
       AND token <= (SELECT s.last_value FROM pglock.leases_token_seq s) THEN -- no token above it was granted to anybody
        RAISE EXCEPTION 'could not serialize access: token % of lease "%" is not in this transaction''s snapshot', token, name
            USING ERRCODE = 'serialization_failure', HINT = 'Begin the transaction when the lease is held.';
    END IF;
END
$$;
-- +goose StatementEnd

-- Proves in the caller's transaction that the lease is held, and lets nobody
-- take it before that transaction ends; raises PW002 when the tenure has
-- ended, so that nothing of the transaction can commit. FOR KEY SHARE lets
-- renewals pass. The row is locked first and the clock read after that. Above
-- READ COMMITTED the row's expires_at is as old as the snapshot and is not
-- looked at; there a tenure that ended since the snapshot fails with 40001.
--   SELECT pglock.guard('accounts/42', 17);
-- +goose StatementBegin
CREATE FUNCTION pglock.guard(name text, token bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
DECLARE
    ends   timestamptz;
    most   interval;
    lease  pglock.leases;
    reason text;
BEGIN
    SELECT l.expires_at, l.ttl INTO ends, most FROM pglock.leases l
    WHERE l.name = guard.name AND l.token = guard.token AND l.claim IS NOT NULL AND l.role = session_user
    FOR KEY SHARE;
    IF FOUND THEN
        IF ends > clock_timestamp() OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
            PERFORM pglock.bound_pause(most);
            RETURN;
        END IF;
        reason := 'expired: at ' || ends;
    ELSE
        PERFORM pglock.check_name('lease', guard.name);
        SELECT l.* INTO lease FROM pglock.leases l WHERE l.name = guard.name;
        PERFORM pglock.check_snapshot(guard.name, guard.token, lease.token);
        reason := CASE
            WHEN lease.name IS NULL THEN 'expired: no lease of that name is known'
            WHEN lease.token = guard.token AND lease.claim IS NULL THEN 'idle: it was released'
            WHEN lease.token = guard.token THEN 'taken: another role acquired it'
            ELSE 'taken: token ' || lease.token || ' was granted last' END;
    END IF;
    RAISE EXCEPTION 'lease "%" with token % is not held', guard.name, guard.token
        USING ERRCODE = 'PW002', DETAIL = reason,
              HINT = 'Roll back: somebody else may already have written. Acquire the lease again and start over.';
END
$$;
-- +goose StatementEnd

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock FROM PUBLIC;

-- +goose Down
DROP FUNCTION pglock.guard(text, bigint);
DROP FUNCTION pglock.check_snapshot(text, bigint, bigint);
DROP FUNCTION pglock.exchange(text[], bigint[], text[], interval[], jsonb[], uuid, text);
DROP FUNCTION pglock.release_one(text, bigint, interval, boolean);
DROP TYPE pglock.ending;
DROP FUNCTION pglock.release(text[], bigint[], interval);
DROP FUNCTION pglock.vacate(text[], boolean);
DROP FUNCTION pglock.row_blockers(text);
DROP FUNCTION pglock.lock_within(text, bigint, interval);
DROP FUNCTION pglock.renew(text[], bigint[]);
DROP FUNCTION pglock.check_tenures(text, text[], bigint[]);
DROP FUNCTION pglock.fates(text[], bigint[], timestamptz);
DROP FUNCTION pglock.acquire_one(text, interval, uuid, text, jsonb);
DROP TYPE pglock.bid;
DROP FUNCTION pglock.acquire(text[], interval, uuid, text, jsonb, boolean);
DROP FUNCTION pglock.check_request(text, interval, uuid, text, jsonb);
DROP FUNCTION pglock.plain_ttl(interval, uuid, text, jsonb);
DROP FUNCTION pglock.create_names(text[]);
DROP FUNCTION pglock.check_level(text);
