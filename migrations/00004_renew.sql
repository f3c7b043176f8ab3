-- How tenures go on. A token that was not renewed has a state which says why, as it
-- has in the answers of release:
--   held      the tenure goes on
--   released  this call ended it
--   idle      the row is free: an earlier release, or one by force, ended it
--   expired   its time ran out, and nobody has taken it since
--   taken     somebody else has been granted the lease since
--   busy      another transaction has the row locked: not known, ask again
--   blocked   an open guard is in the way of the release

-- +goose Up

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

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock FROM PUBLIC;

-- +goose Down
DROP FUNCTION pglock.renew(text[], bigint[]);
DROP FUNCTION pglock.check_tenures(text, text[], bigint[]);
DROP FUNCTION pglock.fates(text[], bigint[], timestamptz);
