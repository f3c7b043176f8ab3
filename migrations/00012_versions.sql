-- Row versions, which package optimistic compares. They have nothing to do with
-- leases.

-- +goose Up

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
-- paying for the function. It waits for the table in short turns with longer
-- breaks, so that nobody queues behind it for long, some 12 s in all.
--   SELECT pglock.guard_version('accounts');
-- +goose StatementBegin
CREATE FUNCTION pglock.guard_version(target regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '100ms'
AS $$
DECLARE
    had record;
BEGIN
    IF target IS NULL THEN
        RAISE EXCEPTION 'NULL is no table' USING ERRCODE = 'wrong_object_type';
    ELSIF EXISTS (SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhparent
                  WHERE i.inhparent = target AND c.relkind = 'r') THEN
        RAISE EXCEPTION '% has inheritance children, which would have no trigger', target
            USING ERRCODE = 'wrong_object_type', HINT = 'Guard tables without children, or use partitions.';
    END IF;
    FOR turn IN 1..40 LOOP
        BEGIN
            SELECT a.atttypid::regtype AS kind, a.attnotnull INTO had FROM pg_attribute a
            WHERE a.attrelid = target AND a.attname = 'version' AND NOT a.attisdropped;
            IF NOT FOUND THEN
                EXECUTE format('ALTER TABLE %s ADD COLUMN version bigint NOT NULL DEFAULT 1', target);
            ELSIF had.kind <> 'bigint'::regtype THEN
                RAISE EXCEPTION 'column version of % is a %', target, had.kind
                    USING ERRCODE = 'datatype_mismatch', HINT = 'A version is a bigint: ALTER TABLE ... ALTER COLUMN version TYPE bigint.';
            ELSIF NOT had.attnotnull THEN
                RAISE EXCEPTION 'column version of % may be NULL, which counts nothing', target
                    USING ERRCODE = 'datatype_mismatch',
                          HINT = 'Fill it, then ALTER TABLE ... ALTER COLUMN version SET DEFAULT 1, ALTER COLUMN version SET NOT NULL.';
            END IF;
            EXECUTE format('CREATE OR REPLACE TRIGGER pglock_guard_version BEFORE UPDATE ON %s FOR EACH ROW
                WHEN (NEW.version IS DISTINCT FROM OLD.version + 1) EXECUTE FUNCTION pglock.bump_version()', target);
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            PERFORM pg_sleep(0.1 + 0.2 * random());
        END;
    END LOOP;
    RAISE EXCEPTION 'table % was in use all the time', target
        USING ERRCODE = 'lock_not_available', HINT = 'Try again when no long transaction uses it.';
END
$$;
-- +goose StatementEnd

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock FROM PUBLIC;

-- +goose Down
DROP FUNCTION pglock.guard_version(regclass);
DROP FUNCTION pglock.bump_version();
