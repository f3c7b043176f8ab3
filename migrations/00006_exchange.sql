-- What a client with many goroutines sends instead of a call for each of them.

-- +goose Up

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
    alike   boolean := size > 0 AND array_dims(exchange.ttls) = '[1:1]' AND array_dims(exchange.metadatas) = '[1:1]';
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
        IF (alike OR size = cardinality(exchange.ttls) AND coalesce(array_lower(exchange.wanted, 1), 1) = 1
            AND array_dims(exchange.wanted) IS NOT DISTINCT FROM array_dims(exchange.metadatas)) IS NOT TRUE THEN
            RAISE EXCEPTION '% names beside % TTLs and % metadata', size, cardinality(exchange.ttls), cardinality(exchange.metadatas)
                USING ERRCODE = 'invalid_parameter_value', HINT = 'Give each name its TTL and its metadata, NULL for none, or one of both for all, in arrays that begin at 1.';
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

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock FROM PUBLIC;

-- +goose Down
DROP FUNCTION pglock.exchange(text[], bigint[], text[], interval[], jsonb[], uuid, text);
