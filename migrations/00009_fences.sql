-- The resource's side: the highest token that each resource has accepted.

-- +goose Up

-- Accepts a token for a resource in the transaction of the write that it
-- protects, or raises PW001 when a higher one was accepted before, so that
-- nothing of the transaction can commit. The first and any higher token is
-- written; an equal one takes FOR SHARE and writes nothing. Either lock is held
-- until the transaction ends: who comes later sees what this one did. A token
-- may come from any lock service, as long as it only goes up, and is believed:
-- whoever may call this can shut a resource out with a huge one, until
-- reset_fence. Where the token refused is that of the lease of the resource's
-- name, and held, it is no stale one: that is PW003, token regression. To go
-- back to a savepoint undoes a refusal and an acceptance.
--   SELECT pglock.fence('accounts/42', 17);
-- +goose StatementBegin
CREATE FUNCTION pglock.fence(resource text, token bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
DECLARE
    accepted bigint;
BEGIN
    PERFORM pglock.check_name('resource', fence.resource);
    IF fence.token IS NULL OR fence.token <= 0 THEN
        RAISE EXCEPTION 'token % was never granted', coalesce(fence.token::text, 'NULL')
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A token is the positive number that came with the lock.';
    END IF;
    LOOP
        -- Looks before it locks: who has a higher token must not take FOR SHARE
        -- first, because two that then want to write would deadlock.
        SELECT f.token INTO accepted FROM pglock.fences f WHERE f.resource = fence.resource;
        IF NOT FOUND THEN
            INSERT INTO pglock.fences AS f (resource, token) VALUES (fence.resource, fence.token)
            ON CONFLICT DO NOTHING;
        ELSIF accepted < fence.token THEN
            UPDATE pglock.fences AS f SET token = fence.token
            WHERE f.resource = fence.resource AND f.token < fence.token;
        ELSE
            SELECT f.token INTO accepted FROM pglock.fences f WHERE f.resource = fence.resource FOR SHARE;
            CONTINUE WHEN accepted < fence.token;             -- an administrator has reset it meanwhile
            IF accepted > fence.token THEN
                IF EXISTS (SELECT FROM pglock.leases l WHERE l.name = fence.resource AND l.token = fence.token
                           AND l.claim IS NOT NULL AND l.role = session_user AND l.expires_at > clock_timestamp()) THEN
                    RAISE EXCEPTION 'token regression: resource "%" has accepted token %, and token % of the lease of that name is held',
                                    fence.resource, accepted, fence.token
                        USING ERRCODE = 'PW003',
                              DETAIL = 'The fence has seen a token that this lease never had: the tokens began again lower, or somebody gave it one of another lock.',
                              HINT = 'Roll back. An administrator sets it back: SELECT pglock.reset_fence(resource, token).';
                END IF;
                RAISE EXCEPTION 'resource "%" is fenced', fence.resource
                    USING ERRCODE = 'PW001',
                          DETAIL = format('presented %s, accepted %s', fence.token, accepted),
                          HINT = 'Roll back: a later holder has written. Acquire the lock again and start over.';
            END IF;
        END IF;
        EXIT WHEN FOUND;                                      -- else another transaction was first: look again
    END LOOP;
    PERFORM pglock.bound_pause(interval '30 s');
END
$$;
-- +goose StatementEnd

-- What each resource has accepted. An administrator's: not for a role that
-- only writes.
--   SELECT * FROM pglock.list_fences() WHERE resource LIKE 'accounts/%';
-- +goose StatementBegin
CREATE FUNCTION pglock.list_fences() RETURNS TABLE (resource text, token bigint)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT f.resource, f.token FROM pglock.fences f ORDER BY f.resource $$;
-- +goose StatementEnd

-- Sets a fence back to a token that was rightly accepted, or without one
-- forgets the resource, so that the next token of all is its first: then a
-- stale one may be. It says what had been accepted, and waits for transactions
-- that are fenced here. An administrator's, as it undoes what fences are for.
--   SELECT pglock.reset_fence('accounts/42', 17);
-- +goose StatementBegin
CREATE FUNCTION pglock.reset_fence(resource text, token bigint DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    accepted bigint;
BEGIN
    PERFORM pglock.check_name('resource', reset_fence.resource);
    IF reset_fence.token <= 0 THEN
        RAISE EXCEPTION 'token % was never granted', reset_fence.token
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Leave it out to forget the resource.';
    END IF;
    SELECT f.token INTO accepted FROM pglock.fences f WHERE f.resource = reset_fence.resource FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'resource "%" has accepted no token', reset_fence.resource
            USING ERRCODE = 'no_data_found', HINT = 'SELECT * FROM pglock.list_fences() shows those that have.';
    ELSIF reset_fence.token IS NULL THEN
        DELETE FROM pglock.fences f WHERE f.resource = reset_fence.resource;
    ELSE
        UPDATE pglock.fences AS f SET token = reset_fence.token WHERE f.resource = reset_fence.resource;
    END IF;
    RETURN accepted;
END
$$;
-- +goose StatementEnd

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock FROM PUBLIC;

-- +goose Down
DROP FUNCTION pglock.reset_fence(text, bigint);
DROP FUNCTION pglock.list_fences();
DROP FUNCTION pglock.fence(text, bigint);
