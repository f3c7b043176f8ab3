-- The lease's side of a write in this database: the proof that it is held, in the
-- transaction of the write.

-- +goose Up

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
