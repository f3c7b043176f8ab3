-- Tables that no writer can write to without a lease. What a transaction
-- presents stands in a setting that is local to it. Anybody can write a
-- setting, so it is no more than a claim: the triggers prove it against the
-- lease row at each statement, with a lock that keeps takers off until the
-- transaction ends. A lease whose time has run out passes where nobody has taken it. There is no registry of protected tables: a trigger and its
-- arguments are all there is, and a dump carries them.
--
-- A dump of the whole database restores as it is. One of the tables alone
-- (pg_dump -n public) wants this schema to be there: apply the migrations, then
-- restore. Data alone goes into a protected table by --disable-triggers.
--
-- An administrator who has to write takes the lease as everybody does:
--   SELECT * FROM pglock.acquire('{accounts/42}', '10 min');
--   BEGIN; SELECT pglock.present('accounts/42', 17); UPDATE ...; COMMIT;
--   SELECT * FROM pglock.release('{accounts/42}', '{17}');

-- +goose Up

-- Presents a lease to the protected tables that this transaction will write to,
-- after proving it as guard does. Several add up; one presented again counts
-- once.
--   SELECT pglock.present('accounts/42', 17);
-- +goose StatementBegin
CREATE FUNCTION pglock.present(name text, token bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    claims text := current_setting('pglock.presented', true);
    claim  text := format('[[%s, %s]]', to_json(present.name), present.token);
BEGIN
    PERFORM pglock.guard(present.name, present.token);
    IF coalesce(claims, '') = '' THEN
        claims := set_config('pglock.presented', claim, true);
    ELSIF NOT claims::jsonb @> claim::jsonb THEN
        claims := set_config('pglock.presented', (claims::jsonb || claim::jsonb)::text, true);
    END IF;
END
$$;
-- +goose StatementEnd

-- The trigger of a protected table; its argument is the pattern of lease names.
-- It asks whether the tenure goes on, not whether its time is up: the lock
-- keeps takers off from here to the end of the transaction, as a guard's does,
-- and what was presented in time may expire meanwhile.
--
-- Every statement on the table pays for this: one query, which finds, proves and
-- locks the row, and hardly an expression beside it. A setting that is no JSON
-- is PostgreSQL's error, because to catch it would take a subtransaction.
-- +goose StatementBegin
CREATE FUNCTION pglock.refuse_unpresented() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off
AS $$
DECLARE
    claims  jsonb := nullif(current_setting('pglock.presented', true), '');
    wanted  text;
    shown   bigint;
    matched text;                                             -- the name presented last that matches
    lease   pglock.leases;
BEGIN
    FOR i IN 0 .. coalesce(jsonb_array_length(claims), 0) - 1 LOOP
        PERFORM FROM pglock.leases l
        WHERE l.name = claims -> i ->> 0 AND l.token = (claims -> i ->> 1)::bigint AND l.name LIKE TG_ARGV[0]
          AND l.claim IS NOT NULL AND l.role = session_user
        FOR KEY SHARE;
        IF FOUND THEN
            IF TG_LEVEL = 'STATEMENT' THEN
                RETURN NULL;
            ELSIF TG_OP = 'DELETE' THEN
                RETURN OLD;
            END IF;
            RETURN NEW;
        END IF;
    END LOOP;
    IF claims IS NULL THEN
        RAISE EXCEPTION 'table % is protected: no lease was presented', TG_RELID::regclass
            USING ERRCODE = 'PW004', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
                  DETAIL = format('It wants a lease whose name matches %L.', TG_ARGV[0]),
                  HINT = 'Acquire one, then SELECT pglock.present(name, token) in this transaction before the write.';
    END IF;
    FOR i IN 0 .. jsonb_array_length(claims) - 1 LOOP
        wanted := claims -> i ->> 0;
        CONTINUE WHEN wanted IS NULL OR wanted NOT LIKE TG_ARGV[0];
        matched := wanted;
        shown := claims -> i ->> 1;
    END LOOP;
    IF matched IS NULL THEN
        RAISE EXCEPTION 'table % is protected: no lease presented matches', TG_RELID::regclass
            USING ERRCODE = 'PW005', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
                  DETAIL = format('It wants a lease whose name matches %L; presented was %s.', TG_ARGV[0], claims),
                  HINT = 'Present the lease that stands for this table.';
    END IF;
    SELECT l.* INTO lease FROM pglock.leases l WHERE l.name = matched;
    PERFORM pglock.check_snapshot(matched, shown, lease.token);
    IF lease.token > shown THEN
        RAISE EXCEPTION 'table % is fenced: lease "%" was presented with token %, and token % was granted since',
                        TG_RELID::regclass, matched, shown, lease.token
            USING ERRCODE = 'PW001', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
                  DETAIL = format('presented %s, accepted %s', shown, lease.token),
                  HINT = 'Roll back: a later holder has been granted the lease. Acquire it again and start over.';
    END IF;
    RAISE EXCEPTION 'table % is protected: lease "%" with token % is not held', TG_RELID::regclass, matched, shown
        USING ERRCODE = 'PW002', SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME,
              DETAIL = CASE
                  WHEN lease.token = shown AND lease.claim IS NULL THEN 'idle: it was released'
                  WHEN lease.token = shown THEN 'taken: another role acquired it'
                  ELSE 'expired: no such token was granted' END,
              HINT = 'Roll back. Acquire the lease again and start over.';
END
$$;
-- +goose StatementEnd

-- Has a table refuse every INSERT, UPDATE, DELETE and TRUNCATE of a transaction
-- that has not presented a lease whose name is LIKE the pattern. Again with
-- another pattern replaces the first. It is the table's owner's to call.
--
-- It is no bar to the owner, a superuser, session_replication_role = replica (so
-- that what logical replication brings is not refused) nor to a role with the
-- privilege TRIGGER on the table, which GRANT ALL includes and which is enough
-- to replace a trigger. It ties a table to names of leases, not a row to its
-- lease, and whoever may call acquire can acquire any name that is free. A
-- cascade from another table wants a lease even if it hits no row.
--
-- A partition attached later has the row triggers at once, but can be truncated
-- straight until protect is called again: protected_tables lists it as a gap.
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
    ELSIF pattern ~ E'(^|[^\\\\])(\\\\\\\\)*\\\\$' THEN
        RAISE EXCEPTION 'pattern % for table % ends with half an escape', pattern, target
            USING ERRCODE = 'invalid_escape_sequence', HINT = 'A backslash takes the next character literally: double it to mean itself.';
    ELSIF kind IS NULL OR kind NOT IN ('r', 'p') THEN
        RAISE EXCEPTION '% is no table', coalesce(target::text, 'NULL')
            USING ERRCODE = 'wrong_object_type', HINT = 'Protect the tables beneath it.';
    ELSIF EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = target) THEN
        RAISE EXCEPTION '% is a partition or an inheritance child, and can be written through its parent', target
            USING ERRCODE = 'wrong_object_type', HINT = 'Protect the root of a partitioned table. Inheritance can''t be protected.';
    ELSIF kind = 'r' AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = target) THEN
        RAISE EXCEPTION '% has inheritance children, which would stay open', target
            USING ERRCODE = 'wrong_object_type', HINT = 'Inheritance can''t be protected. Use partitions.';
    END IF;
    IF NOT pg_has_role(current_user, (SELECT c.relowner FROM pg_class c WHERE c.oid = target), 'USAGE') THEN
        RAISE EXCEPTION 'must be owner of table %', target USING ERRCODE = 'insufficient_privilege';
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

-- Undoes protect. On a table that is not protected it does nothing, and on one
-- that was a partition it removes what protect left there.
--   SELECT pglock.unprotect('accounts');
-- +goose StatementBegin
CREATE FUNCTION pglock.unprotect(target regclass) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    stands record;
BEGIN
    IF target IS NULL THEN
        RAISE EXCEPTION 'NULL is no table' USING ERRCODE = 'wrong_object_type';
    END IF;
    FOR stands IN
        SELECT t.tgname, t.tgrelid::regclass AS place, t.tgparentid <> 0 AS cloned
        FROM pg_trigger t
        WHERE t.tgfoid = 'pglock.refuse_unpresented'::regproc
          AND (t.tgrelid = target
               OR t.tgname = 'pglock_protect_truncate' AND t.tgrelid IN (SELECT p.relid FROM pg_partition_tree(target) p))
        ORDER BY cloned DESC
    LOOP
        IF stands.cloned THEN
            RAISE EXCEPTION '% is protected as a partition', target
                USING ERRCODE = 'wrong_object_type', HINT = 'SELECT pglock.unprotect(root), the root of the partitioned table.';
        END IF;
        EXECUTE format('DROP TRIGGER %I ON %s', stands.tgname, stands.place);
    END LOOP;
END
$$;
-- +goose StatementEnd

-- The tables that are protected, read back from their triggers. gaps are
-- partitions that can be truncated straight, since they were attached after
-- protect was called last, or whose triggers were disabled; inheritance
-- children that the table was given since; and a parent, of either kind, that it
-- was put under since, through which it can be written.
CREATE VIEW pglock.protected_tables AS
SELECT t.tgrelid::regclass AS target,
       convert_from(substring(t.tgargs FROM 1 FOR length(t.tgargs) - 1), getdatabaseencoding()) AS pattern,
       NOT EXISTS (SELECT FROM pg_catalog.pg_trigger d
                   WHERE d.tgrelid = t.tgrelid AND d.tgfoid = t.tgfoid AND d.tgenabled NOT IN ('O', 'A')) AS enabled,
       ARRAY(SELECT p.relid FROM pg_catalog.pg_partition_tree(t.tgrelid) p
             WHERE p.relid <> t.tgrelid
               AND (NOT EXISTS (SELECT FROM pg_catalog.pg_trigger g
                                WHERE g.tgrelid = p.relid AND g.tgfoid = t.tgfoid AND g.tgname = 'pglock_protect_truncate')
                    OR EXISTS (SELECT FROM pg_catalog.pg_trigger g
                               WHERE g.tgrelid = p.relid AND g.tgfoid = t.tgfoid AND g.tgenabled NOT IN ('O', 'A')))
             UNION
             SELECT i.inhparent FROM pg_catalog.pg_inherits i WHERE i.inhrelid = t.tgrelid
             UNION
             SELECT i.inhrelid FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhparent
             WHERE i.inhparent = t.tgrelid AND c.relkind = 'r'
             ORDER BY 1)::regclass[] AS gaps
FROM pg_catalog.pg_trigger t
WHERE t.tgfoid = 'pglock.refuse_unpresented'::regproc AND t.tgname = 'pglock_protect' AND NOT t.tgisinternal;

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock FROM PUBLIC;

-- +goose Down
-- What is taken back first refuses for the guarded tables too, before anything has
-- changed.
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
DROP VIEW pglock.protected_tables;
DROP FUNCTION pglock.unprotect(regclass);
DROP FUNCTION pglock.protect(regclass, text);
DROP FUNCTION pglock.refuse_unpresented();
DROP FUNCTION pglock.present(text, bigint);
