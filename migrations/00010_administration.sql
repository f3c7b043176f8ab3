-- For people who look at leases and, when it must be, end or clear them away.

-- +goose Up

-- Who holds what, and how many wait for it. Takes no row locks. Metadata is
-- shown to the role that stored it. A plan that doesn't know whether one is
-- wanted would read them all for it.
--   SELECT * FROM pglock.list_leases();
-- +goose StatementBegin
CREATE FUNCTION pglock.list_leases(wanted text DEFAULT NULL)
RETURNS TABLE (name text, token bigint, holder text, role name, acquired_at timestamptz, expires_at timestamptz,
               remaining interval, ttl interval, metadata jsonb, waiters bigint)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_custom_plan
AS $$
BEGIN
    RETURN QUERY
    SELECT l.name, l.token, l.holder, l.role, l.acquired_at, l.expires_at, l.expires_at - clock_timestamp(), l.ttl,
           CASE WHEN l.role = session_user THEN l.metadata END,
           (SELECT count(*) FROM pglock.waiters w WHERE w.name = l.name)
    FROM pglock.leases l
    WHERE l.claim IS NOT NULL AND (list_leases.wanted IS NULL OR l.name = list_leases.wanted)
    ORDER BY l.name;
END
$$;
-- +goose StatementEnd

-- Who waits, in the order in which they will be served.
--   SELECT * FROM pglock.list_waiters();
-- +goose StatementBegin
CREATE FUNCTION pglock.list_waiters()
RETURNS TABLE (name text, ticket bigint, holder text, role name, queued_at timestamptz, expires_at timestamptz)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT w.name, w.ticket, w.holder, w.role, w.queued_at, w.expires_at FROM pglock.waiters w ORDER BY w.name, w.ticket
$$;
-- +goose StatementEnd

-- Ends a tenure whosever it is, and hands the lease on. An open guard is waited
-- for, and is then in the way. The states are those of release.
--   SELECT * FROM pglock.force_release('accounts/42', 17);
-- +goose StatementBegin
CREATE FUNCTION pglock.force_release(name text, token bigint, patience interval DEFAULT '5 s')
RETURNS TABLE (state text, blockers integer[], since timestamptz)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pglock.check_level('force_release');
    PERFORM pglock.check_name('lease', force_release.name);
    IF NOT pglock.lock_within(force_release.name, force_release.token, force_release.patience) THEN
        IF EXISTS (SELECT FROM pglock.leases l WHERE l.name = force_release.name AND l.token = force_release.token AND l.claim IS NOT NULL) THEN
            RETURN QUERY SELECT 'blocked', b.pids, b.since FROM pglock.row_blockers(force_release.name) b;
        ELSE
            RETURN QUERY SELECT f.state, NULL::integer[], NULL::timestamptz
            FROM pglock.fates(ARRAY[force_release.name], ARRAY[force_release.token], clock_timestamp()) f;
        END IF;
        RETURN;
    END IF;
    PERFORM pglock.vacate(ARRAY[force_release.name], false);
    RETURN QUERY SELECT 'released', NULL::integer[], NULL::timestamptz;
END
$$;
-- +goose StatementEnd

-- Deletes the rows of names that nobody holds or waits for and that were last
-- acquired that long ago, and says how many. Tokens come from a sequence: none
-- comes back.
--   SELECT pglock.purge('30 days');
-- +goose StatementBegin
CREATE FUNCTION pglock.purge(idle interval) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    locked text[];
    purged bigint;
BEGIN
    PERFORM pglock.check_level('purge');
    IF purge.idle IS NULL OR purge.idle < interval '0' THEN
        RAISE EXCEPTION 'idle time % is negative', purge.idle
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Say for how long a name must not have been acquired.';
    END IF;
    SELECT coalesce(array_agg(l.name), '{}') INTO locked FROM (
        SELECT l.name FROM pglock.leases l
        WHERE l.expires_at <= clock_timestamp()
          AND (l.acquired_at IS NULL OR l.acquired_at <= clock_timestamp() - purge.idle)
        ORDER BY l.name
        FOR UPDATE SKIP LOCKED) l;
    -- A statement of its own: it sees every ticket drawn before the rows were locked.
    DELETE FROM pglock.leases l
    WHERE l.name = ANY (locked) AND NOT EXISTS (SELECT FROM pglock.waiters w WHERE w.name = l.name);
    GET DIAGNOSTICS purged = ROW_COUNT;
    RETURN purged;
END
$$;
-- +goose StatementEnd

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock FROM PUBLIC;

-- +goose Down
DROP FUNCTION pglock.purge(interval);
DROP FUNCTION pglock.force_release(text, bigint, interval);
DROP FUNCTION pglock.list_waiters();
DROP FUNCTION pglock.list_leases(text);
