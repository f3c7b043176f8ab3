-- The key of an advisory lock, for psql and for programs in other languages.
-- The locks themselves are PostgreSQL's own and need nothing of this schema:
--   SELECT pg_advisory_xact_lock(pglock.advisory_key('accounts/42'));

-- +goose Up

-- The first 64 bits of the SHA-256 of 'pglock/v1', a zero byte and the name in
-- UTF-8, as a big-endian signed integer.
--   SELECT pglock.advisory_key('accounts/42');
-- +goose StatementBegin
CREATE FUNCTION pglock.advisory_key(name text) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pglock.check_name('key', advisory_key.name);
    RETURN ('x' || encode(substr(sha256('pglock/v1'::bytea || decode('00', 'hex') || convert_to(advisory_key.name, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint;
END
$$;
-- +goose StatementEnd

REVOKE EXECUTE ON FUNCTION pglock.advisory_key(text) FROM PUBLIC;

-- Whoever may take leases may compute keys.
-- +goose StatementBegin
DO $$
DECLARE
    grantee regrole;
BEGIN
    FOR grantee IN
        SELECT DISTINCT a.grantee FROM pg_proc p, aclexplode(p.proacl) a
        WHERE p.pronamespace = 'pglock'::regnamespace AND p.proname = 'acquire'
          AND a.privilege_type = 'EXECUTE' AND a.grantee NOT IN (0, p.proowner)
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION pglock.advisory_key(text) TO %s', grantee);
    END LOOP;
END
$$;
-- +goose StatementEnd

-- +goose Down
DROP FUNCTION pglock.advisory_key(text);
