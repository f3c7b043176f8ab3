-- Where tokens come from. A token is drawn from leases_token_seq in the SET
-- list of an UPDATE of a lease row that is locked, and the sequence is moved
-- ahead where this server may have lost what it handed out:
--
--   * after a failover to a standby that had not received the last grants. Each
--     promotion changes the timeline of the WAL, whose number stands in the
--     first eight digits of a WAL file's name.
--   * in a dump or a copy of the cluster, which the system identifier shows.
--   * in a disk snapshot put back, which nothing shows: new_epoch() by hand.
--
-- It moves to seconds since 2020 times 2^22 if that is higher. A fixed step
-- would not do: two standbys promoted one after the other, each from the same
-- old primary, can both be on timeline 2.

-- +goose Up

-- The timeline that this server writes; fails on a standby.
-- +goose StatementBegin
CREATE FUNCTION pglock.timeline() RETURNS text
LANGUAGE sql VOLATILE
AS $$ SELECT pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 1, 8) $$;
-- +goose StatementEnd

-- Moves the sequence above every token that can have been granted anywhere, and
-- notes on which branch of history it now is. Who comes second finds it done,
-- unless told to do it in any case.
-- +goose StatementBegin
CREATE FUNCTION pglock.turn_epoch(always boolean) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    here_system   bigint := (SELECT system_identifier FROM pg_control_system());
    here_timeline text := pglock.timeline();
    known         pglock.epoch;
BEGIN
    INSERT INTO pglock.epoch DEFAULT VALUES ON CONFLICT DO NOTHING;   -- a restore may have left it out
    SELECT e.* INTO known FROM pglock.epoch e FOR UPDATE;
    IF NOT always AND known.system_identifier = here_system AND known.timeline = here_timeline THEN
        RETURN;
    END IF;
    PERFORM setval('pglock.leases_token_seq', greatest(
        (SELECT s.last_value FROM pglock.leases_token_seq s) + 4194304, -- some may be drawn between this and setval
        (SELECT coalesce(max(l.token), 0) FROM pglock.leases l) + 1,
        (extract(epoch FROM clock_timestamp() - timestamptz '2020-01-01 00:00:00+00') * 4194304)::bigint));
    UPDATE pglock.epoch SET system_identifier = here_system, timeline = here_timeline, since = clock_timestamp();
END
$$;
-- +goose StatementEnd

-- Moves the tokens ahead if this server is on another branch than they were
-- drawn on last. A grant compares the timelines itself, and calls this only
-- where it did not come about.
-- +goose StatementBegin
CREATE FUNCTION pglock.follow_timeline() RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF (SELECT e.timeline FROM pglock.epoch e) IS DISTINCT FROM pglock.timeline() THEN
        PERFORM pglock.turn_epoch(false);
    END IF;
END
$$;
-- +goose StatementEnd

-- Moves the tokens ahead by hand: after a snapshot of the disk was put back, or
-- when "token regression" is reported.
--   SELECT pglock.new_epoch();
-- +goose StatementBegin
CREATE FUNCTION pglock.new_epoch() RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$ SELECT pglock.turn_epoch(true) $$;
-- +goose StatementEnd

-- A client calls this once for each connection: the system identifier is read
-- from a file, too slow for every grant.
-- +goose StatementBegin
CREATE FUNCTION pglock.check_epoch() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF (SELECT e.system_identifier FROM pglock.epoch e) IS DISTINCT FROM
       (SELECT c.system_identifier FROM pg_control_system() c) THEN
        PERFORM pglock.turn_epoch(false);
    END IF;
END
$$;
-- +goose StatementEnd

-- A token that was answered must not be lost in a crash, or it would come back,
-- and a renewal neither: where commits are set not to wait for the disk, those
-- of the protocol do. The setting is the transaction's, and outlives the function.
-- +goose StatementBegin
CREATE FUNCTION pglock.insist_on_commit() RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'local', true);
    END IF;
END
$$;
-- +goose StatementEnd

-- The next token, for the SET list of an UPDATE that takes a lease.
-- +goose StatementBegin
CREATE FUNCTION pglock.draw(before bigint) RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    drawn bigint := nextval('pglock.leases_token_seq');
BEGIN
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM pglock.insist_on_commit();
    END IF;
    IF drawn <= before THEN
        RAISE EXCEPTION 'token regression: % was drawn after %', drawn, before
            USING ERRCODE = 'PW003',
                  DETAIL = 'The sequence pglock.leases_token_seq is behind the leases: it was reset, or restored from elsewhere.',
                  HINT = 'SELECT pglock.new_epoch() moves it ahead.';
    END IF;
    RETURN drawn;
END
$$;
-- +goose StatementEnd

UPDATE pglock.epoch SET timeline = pglock.timeline(), system_identifier = (SELECT system_identifier FROM pg_control_system());

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock FROM PUBLIC;

-- +goose Down
DROP FUNCTION pglock.draw(bigint);
DROP FUNCTION pglock.insist_on_commit();
DROP FUNCTION pglock.check_epoch();
DROP FUNCTION pglock.new_epoch();
DROP FUNCTION pglock.follow_timeline();
DROP FUNCTION pglock.turn_epoch(boolean);
DROP FUNCTION pglock.timeline();
