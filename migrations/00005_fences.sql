-- The resource's side: the highest token that each resource has accepted.

-- +goose Up

-- Accepts a token for a resource in the transaction of the write that it
-- protects, or raises PW001 when a higher one was accepted before, so that
-- nothing of the transaction can commit. The first and any higher token is
-- written; an equal one takes FOR SHARE and writes nothing. Either lock is held
-- until the transaction ends: who comes later sees what this one did. A token
-- may come from any lock service, as long as it only goes up.
--   SELECT pglock.fence('accounts/42', 17);
-- +goose StatementBegin
CREATE FUNCTION pglock.fence(resource text, token bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
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

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock FROM PUBLIC;

-- +goose Down
DROP FUNCTION pglock.fence(text, bigint);
