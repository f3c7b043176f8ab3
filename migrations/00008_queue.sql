-- The queue: who waits for a lease holds a numbered ticket, which its client
-- refreshes as it renews a lease. Whoever frees a lease, or finds it expired,
-- hands it on to the lowest ticket that has not expired, and notifies that
-- ticket's client. Three rules keep it whole:
--
--   * A ticket is drawn by a transaction that holds the lease row FOR NO KEY
--     UPDATE and then looks at the lease; a lease is handed on by one that holds
--     it FOR UPDATE and then, in a later statement with a snapshot of its own,
--     looks at the tickets. So neither can miss the other, and tickets are
--     committed in the order of their numbers.
--   * Who locks a ticket without its lease's row waits for nothing after that:
--     refresh skips those that are locked, and comes to them last; cancel locks
--     one and nothing else. So who hands on several may wait for each, for a second:
--     whose ticket is locked for longer, by a transaction left open, is passed over.
--   * A grant has the ticket's expiry, which the DELETE that consumes the ticket
--     returns: a refresh is either in it or finds the ticket gone. The winner's
--     own deadline, counted from its last refresh, is never later than that.

-- +goose Up

-- Grants a lease to the head of its queue; says whether there was one, and NULL where
-- all were passed over. The caller has the row locked FOR UPDATE, and it is free or
-- has expired.
-- +goose StatementBegin
CREATE FUNCTION pglock.hand_on(name text) RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    told    boolean;
    first   bigint;
    passed  bigint := 0;                                      -- over: the tickets up to this one
    give_up timestamptz := clock_timestamp() + interval '1 s';
BEGIN
    LOOP
        WITH head AS (
            DELETE FROM pglock.waiters w
            WHERE w.ctid = (
                SELECT f.ctid FROM pglock.waiters f
                WHERE f.name = hand_on.name
                  AND f.ticket = (SELECT min(m.ticket) FROM pglock.waiters m WHERE m.name = hand_on.name AND m.ticket > passed)
                FOR UPDATE SKIP LOCKED)
              AND (SELECT e.timeline = pglock.timeline() FROM pglock.epoch e WHERE e.singleton)
            RETURNING w.*)
        UPDATE pglock.leases AS l
        SET token = pglock.draw(l.token), holder = head.holder, role = head.role, claim = head.claim,
            acquired_at = clock_timestamp(), expires_at = head.expires_at, ttl = head.ttl, metadata = head.metadata,
            timeline = pglock.timeline(), awaited = true      -- also where the row was made anew
        FROM head
        WHERE l.name = hand_on.name AND head.expires_at > clock_timestamp()
        -- A full NOTIFY queue would roll the grant back: the client repeats it without.
        RETURNING CASE WHEN current_setting('pglock.quiet', true) = pg_current_xact_id()::text THEN true
                       ELSE pg_notify(head.channel, head.claim || ' ' || l.token) IS NOT NULL END INTO told;
        IF FOUND THEN
            RETURN true;
        END IF;
        -- It was cancelled just now or abandoned, or is locked, or the timeline is in its
        -- way, or there is none.
        PERFORM pglock.follow_timeline();
        SELECT min(w.ticket) INTO first FROM pglock.waiters w WHERE w.name = hand_on.name AND w.ticket > passed;
        IF first IS NULL THEN
            RETURN CASE WHEN passed = 0 THEN false END;
        END IF;
        PERFORM FROM pglock.waiters w WHERE w.name = hand_on.name AND w.ticket = first FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            IF clock_timestamp() < give_up THEN
                PERFORM pg_sleep(0.001);
            ELSE
                passed := first;
            END IF;
        END IF;
    END LOOP;
END
$$;
-- +goose StatementEnd

-- Acquires a lease as acquire does, and where it is not granted draws a ticket:
-- the grant is then announced on the channel as "claim token", and an answer of
-- refresh says it too. A NULL ticket without a grant: the row was locked by
-- another transaction all the time, ask again. A repeat with the same claim has
-- the effect of one.
-- +goose StatementBegin
CREATE FUNCTION pglock.enqueue(
    name     text,
    ttl      interval,
    claim    uuid,
    channel  text,
    owner    text  DEFAULT NULL,
    metadata jsonb DEFAULT NULL
) RETURNS TABLE (granted boolean, token bigint, holder text, remaining interval, expires_at timestamptz, ticket bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET lock_timeout = '1 s'
AS $$
DECLARE
    lease pglock.leases;
    mine  boolean := false;                                   -- the try below has left the row locked
BEGIN
    enqueue.ttl := coalesce(
        pglock.plain_ttl(enqueue.ttl, enqueue.claim, enqueue.owner, enqueue.metadata),
        pglock.check_request('enqueue', enqueue.ttl, enqueue.claim, enqueue.owner, enqueue.metadata));
    PERFORM FROM pglock.leases l WHERE l.name = enqueue.name AND l.expires_at > clock_timestamp();
    IF NOT FOUND THEN
        -- Where somebody waits there is nothing to take, and the wait for the ticket of
        -- the first is better bounded below.
        PERFORM FROM pglock.waiters w WHERE w.name = enqueue.name LIMIT 1;
        IF NOT FOUND THEN
            SELECT a.granted, a.token, a.holder, a.remaining, a.expires_at
            INTO granted, token, holder, remaining, expires_at
            FROM pglock.acquire_one(enqueue.name, enqueue.ttl, enqueue.claim, enqueue.owner, enqueue.metadata) a;
            IF granted THEN
                RETURN NEXT;
                RETURN;
            END IF;
            mine := EXISTS (
                SELECT FROM pglock.leases l WHERE l.name = enqueue.name AND l.xmax = pg_current_xact_id_if_assigned()::xid);
        END IF;
    END IF;
    IF enqueue.channel IS NULL OR enqueue.channel = '' OR octet_length(enqueue.channel) > 63 THEN
        RAISE EXCEPTION 'channel "%" can''t be listened to', enqueue.channel
            USING ERRCODE = 'invalid_parameter_value', HINT = 'LISTEN on a channel of your own, with a name of at most 63 bytes, and give that.';
    END IF;
    BEGIN
        SELECT l.* INTO lease FROM pglock.leases l WHERE l.name = enqueue.name FOR NO KEY UPDATE;
        -- While a repeat waited for the row its first ticket may have been granted.
        IF FOUND AND (lease.claim = enqueue.claim AND lease.role = session_user
                      AND lease.expires_at > clock_timestamp()) IS NOT TRUE THEN
            INSERT INTO pglock.waiters AS w (name, claim, channel, holder, role, expires_at, ttl, metadata)
            VALUES (enqueue.name, enqueue.claim, enqueue.channel, enqueue.owner, session_user,
                    clock_timestamp() + enqueue.ttl, enqueue.ttl, enqueue.metadata)
            -- A repeat extends the ticket, since its answer is what the client counts from.
            ON CONFLICT ON CONSTRAINT waiters_claim_key DO UPDATE SET expires_at = excluded.expires_at
            WHERE w.role = session_user AND w.name = excluded.name
            RETURNING w.ticket INTO ticket;
            IF ticket IS NULL AND EXISTS (
                SELECT FROM pglock.waiters w WHERE w.claim = enqueue.claim AND w.role = session_user) THEN
                RAISE EXCEPTION 'claim % waits for another lease', enqueue.claim
                    USING ERRCODE = 'invalid_parameter_value', HINT = 'Give each ticket a claim of its own.';
            END IF;
            IF NOT lease.awaited THEN
                UPDATE pglock.leases AS l SET awaited = true WHERE l.name = enqueue.name;
            END IF;
            -- Under a lock from outside of this block an UPDATE in it would not be one of the
            -- key for every guard, see lock_within: then this is left to refresh.
            IF NOT mine AND lease.expires_at <= clock_timestamp() THEN
                PERFORM FROM pglock.leases l WHERE l.name = enqueue.name FOR UPDATE SKIP LOCKED;
                IF FOUND THEN
                    PERFORM pglock.hand_on(enqueue.name);
                    SELECT l.* INTO lease FROM pglock.leases l WHERE l.name = enqueue.name;
                END IF;
            END IF;
        END IF;
    EXCEPTION WHEN lock_not_available THEN
        ticket := NULL;                                       -- it went with the subtransaction
        SELECT l.* INTO lease FROM pglock.leases l WHERE l.name = enqueue.name;
    END;
    IF lease.claim IS NULL THEN                               -- nobody's, but another transaction has its row
        granted := false; token := NULL; holder := NULL; remaining := NULL; expires_at := NULL;
    ELSE
        token := lease.token; holder := lease.holder; expires_at := lease.expires_at;
        remaining := expires_at - clock_timestamp();
        granted := lease.claim = enqueue.claim AND lease.role = session_user AND remaining > interval '0';
    END IF;
    RETURN NEXT;
END
$$;
-- +goose StatementEnd

-- Hands on what it finds expired, extends tickets by their TTL, and answers for
-- each claim: granted (with token and time left), waiting (with the time that
-- the holder has left), busy (the ticket was locked and not extended, ask
-- again) or gone (it ran out: enqueue again).
--   SELECT * FROM pglock.refresh('{accounts/42}', ARRAY['6f9619ff-8b86-4011-b42d-00c04fc964ff']::uuid[]);
-- +goose StatementBegin
CREATE FUNCTION pglock.refresh(names text[], claims uuid[])
RETURNS TABLE (claim uuid, state text, token bigint, remaining interval)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
AS $$
DECLARE
    extended uuid[];
    expired  text[];
    lease    text;
    moment   timestamptz;
BEGIN
    PERFORM pglock.check_level('refresh');
    IF names IS NULL OR claims IS NULL OR cardinality(names) <> cardinality(claims) THEN
        RAISE EXCEPTION '% names beside % claims', coalesce(cardinality(names), 0), coalesce(cardinality(claims), 0)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Give each claim the name that it waits for.';
    END IF;
    -- Before any ticket is locked: hand_on waits for tickets, and two refreshes
    -- that each hold what the other waits for would deadlock.
    SELECT coalesce(array_agg(e.name), '{}') INTO expired FROM (
        SELECT l.name FROM pglock.leases l
        WHERE l.name = ANY (refresh.names) AND l.expires_at <= clock_timestamp()
        ORDER BY l.name
        FOR UPDATE SKIP LOCKED) e;
    FOREACH lease IN ARRAY expired LOOP
        PERFORM pglock.hand_on(lease);
    END LOOP;

    SELECT coalesce(array_agg(t.claim), '{}') INTO extended FROM (
        SELECT w.claim
        FROM unnest(refresh.claims) AS c (claim) JOIN pglock.waiters w ON w.claim = c.claim
        WHERE w.role = session_user
        ORDER BY w.ticket
        FOR UPDATE OF w SKIP LOCKED) t;
    UPDATE pglock.waiters AS w SET expires_at = clock_timestamp() + w.ttl WHERE w.claim = ANY (extended);

    moment := clock_timestamp();
    RETURN QUERY
    SELECT c.claim,
           CASE WHEN l.claim = c.claim AND l.role = session_user AND l.expires_at > moment THEN 'granted'
                WHEN w.claim = ANY (extended) THEN 'waiting'
                WHEN w.ticket IS NOT NULL THEN 'busy'
                ELSE 'gone' END,
           CASE WHEN l.claim = c.claim AND l.role = session_user THEN l.token END,
           l.expires_at - moment
    FROM unnest(refresh.names, refresh.claims) AS c (name, claim)
    LEFT JOIN pglock.leases l ON l.name = c.name AND l.claim IS NOT NULL
    LEFT JOIN pglock.waiters w ON w.claim = c.claim AND w.role = session_user;
END
$$;
-- +goose StatementEnd

-- Takes a ticket back, or frees the lease that it was granted meanwhile.
-- +goose StatementBegin
CREATE FUNCTION pglock.cancel(name text, claim uuid) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pglock.check_level('cancel');
    DELETE FROM pglock.waiters w WHERE w.claim = cancel.claim AND w.role = session_user;
    IF NOT FOUND THEN
        -- Somebody's enqueue may have the row for a moment.
        PERFORM pglock.release(ARRAY[l.name], ARRAY[l.token], interval '1 s')
        FROM pglock.leases l WHERE l.name = cancel.name AND l.claim = cancel.claim;
    END IF;
END
$$;
-- +goose StatementEnd

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock FROM PUBLIC;

-- +goose Down
DROP FUNCTION pglock.cancel(text, uuid);
DROP FUNCTION pglock.refresh(text[], uuid[]);
DROP FUNCTION pglock.enqueue(text, interval, uuid, text, text, jsonb);
DROP FUNCTION pglock.hand_on(text);
