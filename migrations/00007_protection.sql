-- Tables that no writer can write to without a lease. What a transaction
-- presents stands in a setting that is local to it. Anybody can write a
-- setting, so it is no more than a claim: the triggers prove it against the
-- lease row at each statement, with a lock that keeps takers off until the
-- transaction ends. There is no registry of protected tables: a trigger and its
-- arguments are all there is, and a dump carries them.

-- +goose Up

-- Presents a lease to the protected tables that this transaction will write to,
-- after proving it as guard does. Several add up.
--   SELECT pglock.present('accounts/42', 17);
-- +goose StatementBegin
CREATE FUNCTION pglock.present(name text, token bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM pglock.guard(present.name, present.token);
    PERFORM set_config('pglock.presented',
        (coalesce(nullif(current_setting('pglock.presented', true), ''), '[]')::jsonb
         || jsonb_build_array(jsonb_build_array(present.name, present.token)))::text, true);
END
$$;
-- +goose StatementEnd

-- The trigger of a protected table; its argument is the pattern of lease names.
-- A setting that is no JSON is PostgreSQL's error: to catch it here would cost
-- every statement a subtransaction.
-- +goose StatementBegin
CREATE FUNCTION pglock.refuse_unpresented() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    claims  text := nullif(current_setting('pglock.presented', true), '');
    claim   record;
    matched record;
    lease   pglock.leases;
BEGIN
    IF claims IS NULL THEN
        RAISE EXCEPTION 'table % is protected: no lease was presented', TG_RELID::regclass
            USING ERRCODE = 'PW004', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
                  DETAIL = format('It wants a lease whose name matches %L.', TG_ARGV[0]),
                  HINT = 'Acquire one, then SELECT pglock.present(name, token) in this transaction before the write.';
    END IF;
    FOR claim IN
        SELECT c.value ->> 0 AS name, (c.value ->> 1)::bigint AS token
        FROM jsonb_array_elements(claims::jsonb) AS c (value)
    LOOP
        CONTINUE WHEN claim.name NOT LIKE TG_ARGV[0];
        matched := claim;
        SELECT l.* INTO lease FROM pglock.leases l
        WHERE l.name = claim.name AND l.token = claim.token AND l.claim IS NOT NULL AND l.role = session_user
        FOR KEY SHARE;
        IF FOUND AND (lease.expires_at > clock_timestamp()
                      OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable')) THEN
            RETURN CASE WHEN TG_LEVEL = 'STATEMENT' THEN NULL WHEN TG_OP = 'DELETE' THEN OLD ELSE NEW END;
        END IF;
    END LOOP;
    IF matched IS NULL THEN
        RAISE EXCEPTION 'table % is protected: no lease presented matches', TG_RELID::regclass
            USING ERRCODE = 'PW005', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
                  DETAIL = format('It wants a lease whose name matches %L; presented was %s.', TG_ARGV[0], claims),
                  HINT = 'Present the lease that stands for this table.';
    END IF;
    SELECT l.* INTO lease FROM pglock.leases l WHERE l.name = matched.name;
    IF lease.token > matched.token THEN
        RAISE EXCEPTION 'table % is fenced for lease "%"', TG_RELID::regclass, matched.name
            USING ERRCODE = 'PW001', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
                  DETAIL = format('presented %s, accepted %s', matched.token, lease.token),
                  HINT = 'Roll back: a later holder has been granted the lease. Acquire it again and start over.';
    END IF;
    RAISE EXCEPTION 'table % is protected: lease "%" with token % is not held', TG_RELID::regclass, matched.name, matched.token
        USING ERRCODE = 'PW002', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
              DETAIL = CASE
                  WHEN lease.token = matched.token AND lease.claim IS NULL THEN 'idle: it was released'
                  WHEN lease.token = matched.token AND lease.role <> session_user THEN 'taken: another role acquired it'
                  WHEN lease.token = matched.token THEN 'expired: at ' || lease.expires_at
                  ELSE 'expired: no such token was granted' END,
              HINT = 'Roll back. Acquire the lease again and start over.';
END
$$;
-- +goose StatementEnd

-- Has a table refuse every INSERT, UPDATE, DELETE and TRUNCATE of a transaction
-- that has not presented a lease whose name is LIKE the pattern. Again with
-- another pattern replaces the first. It is the table's owner's to call, and no
-- bar to the owner, a superuser or session_replication_role = replica.
--   SELECT pglock.protect('accounts', 'accounts/%');
-- +goose StatementBegin
CREATE FUNCTION pglock.protect(target regclass, pattern text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    kind  "char" := (SELECT c.relkind FROM pg_class c WHERE c.oid = target);
    part  regclass;
BEGIN
    IF pattern IS NULL OR pattern = '' THEN
        RAISE EXCEPTION 'empty pattern for table %', target
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Give the names of the leases that stand for it, for example accounts/%.';
    ELSIF kind NOT IN ('r', 'p') THEN
        RAISE EXCEPTION '% is no table', target
            USING ERRCODE = 'wrong_object_type', HINT = 'Protect the tables beneath it.';
    ELSIF EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = target) THEN
        RAISE EXCEPTION '% is a partition or an inheritance child, and can be written through its parent', target
            USING ERRCODE = 'wrong_object_type', HINT = 'Protect the root of a partitioned table. Inheritance can''t be protected.';
    ELSIF kind = 'r' AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = target) THEN
        RAISE EXCEPTION '% has inheritance children, which would stay open', target
            USING ERRCODE = 'wrong_object_type', HINT = 'Inheritance can''t be protected. Use partitions.';
    END IF;
    EXECUTE format('CREATE OR REPLACE TRIGGER pglock_protect BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s
        FOR EACH STATEMENT EXECUTE FUNCTION pglock.refuse_unpresented(%L)', target, pattern);
    IF kind = 'p' THEN
        -- Who writes to a partition fires no statement trigger of the root.
        EXECUTE format('CREATE OR REPLACE TRIGGER pglock_protect_row BEFORE INSERT OR UPDATE OR DELETE ON %s
            FOR EACH ROW EXECUTE FUNCTION pglock.refuse_unpresented(%L)', target, pattern);
        FOR part IN SELECT t.relid FROM pg_partition_tree(target) t WHERE t.relid <> target LOOP
            EXECUTE format('CREATE OR REPLACE TRIGGER pglock_protect_truncate BEFORE TRUNCATE ON %s
                FOR EACH STATEMENT EXECUTE FUNCTION pglock.refuse_unpresented(%L)', part, pattern);
        END LOOP;
    END IF;
END
$$;
-- +goose StatementEnd

-- Undoes protect.
-- +goose StatementBegin
CREATE FUNCTION pglock.unprotect(target regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    part regclass;
BEGIN
    EXECUTE format('DROP TRIGGER IF EXISTS pglock_protect ON %s', target);
    EXECUTE format('DROP TRIGGER IF EXISTS pglock_protect_row ON %s', target);
    FOR part IN SELECT t.relid FROM pg_partition_tree(target) t WHERE t.relid <> target LOOP
        EXECUTE format('DROP TRIGGER IF EXISTS pglock_protect_truncate ON %s', part);
    END LOOP;
END
$$;
-- +goose StatementEnd

-- The tables that are protected, read back from their triggers.
CREATE VIEW pglock.protected_tables AS
SELECT t.tgrelid::regclass AS target,
       convert_from(substring(t.tgargs FROM 1 FOR length(t.tgargs) - 1), getdatabaseencoding()) AS pattern,
       t.tgenabled <> 'D' AS enabled
FROM pg_catalog.pg_trigger t
WHERE t.tgfoid = 'pglock.refuse_unpresented'::regproc AND t.tgname = 'pglock_protect' AND NOT t.tgisinternal;

-- Bumps the version for a writer who didn't.
-- +goose StatementBegin
CREATE FUNCTION pglock.bump_version() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    NEW.version := OLD.version + 1;
    RETURN NEW;
END
$$;
-- +goose StatementEnd

-- Gives a table a version column for optimistic locking, where it has none, and
-- a trigger for writers who forget to bump it. The default is a constant, which
-- rewrites no row, and the trigger's condition keeps writers who bump from
-- paying for it. It waits for the table in short turns, so that nobody queues
-- behind it for long.
--   SELECT pglock.guard_version('accounts');
-- +goose StatementBegin
CREATE FUNCTION pglock.guard_version(target regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '200ms'
AS $$
DECLARE
    kind regtype := (SELECT a.atttypid FROM pg_attribute a
                     WHERE a.attrelid = target AND a.attname = 'version' AND NOT a.attisdropped);
BEGIN
    IF kind <> 'bigint'::regtype THEN
        RAISE EXCEPTION 'column version of % is a %', target, kind
            USING ERRCODE = 'datatype_mismatch', HINT = 'A version is a bigint: ALTER TABLE … ALTER COLUMN version TYPE bigint.';
    END IF;
    FOR turn IN 1..50 LOOP
        BEGIN
            EXECUTE format('ALTER TABLE %s ADD COLUMN IF NOT EXISTS version bigint NOT NULL DEFAULT 1', target);
            EXECUTE format('CREATE OR REPLACE TRIGGER pglock_guard_version BEFORE UPDATE ON %s FOR EACH ROW
                WHEN (NEW.version IS DISTINCT FROM OLD.version + 1) EXECUTE FUNCTION pglock.bump_version()', target);
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            PERFORM pg_sleep(0.02 * random());
        END;
    END LOOP;
    RAISE EXCEPTION 'table % was in use all the time', target
        USING ERRCODE = 'lock_not_available', HINT = 'Try again when no long transaction uses it.';
END
$$;
-- +goose StatementEnd

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock FROM PUBLIC;

-- +goose Down
-- +goose StatementBegin
DO $$
DECLARE
    users text := (SELECT string_agg(DISTINCT t.tgrelid::regclass::text, ', ')
                   FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
                   WHERE p.pronamespace = 'pglock'::regnamespace AND NOT t.tgisinternal AND t.tgparentid = 0);
BEGIN
    IF users IS NOT NULL THEN
        RAISE EXCEPTION 'tables are still protected or guarded: %', users
            USING ERRCODE = 'dependent_objects_still_exist',
                  HINT = 'SELECT pglock.unprotect(table), DROP TRIGGER pglock_guard_version ON table, then again.';
    END IF;
END
$$;
-- +goose StatementEnd
DROP FUNCTION pglock.guard_version(regclass);
DROP FUNCTION pglock.bump_version();
DROP VIEW pglock.protected_tables;
DROP FUNCTION pglock.unprotect(regclass);
DROP FUNCTION pglock.protect(regclass, text);
DROP FUNCTION pglock.refuse_unpresented();
DROP FUNCTION pglock.present(text, bigint);
