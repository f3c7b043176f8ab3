-- The tables of Pawl, all in the schema pglock, and what several of its
-- functions share. The schema itself is not created here: migrations.Up makes
-- it, a DBA may have made it already, and the stock goose command needs it
-- for its version table before it reads this file.

-- +goose Up

-- One row a lease name, held or not. A row is never deleted to release it:
-- the heap would grow with every tenure.
--
-- token is the number granted last under this name; 0 says never. It is drawn
-- from the sequence only in the SET list of an UPDATE of a row that the same
-- transaction holds locked, because a number drawn before that can be lower
-- than one granted meanwhile.
--
-- timeline was the server's at a grant of this name that found the epoch to be that
-- timeline's. Where it is the server's still, the epoch is too, and a grant need not
-- read it: no timeline comes back in the history that this row is in. Not every grant
-- notes it: one that finds an older one here reads the epoch.
--
-- awaited is set by whoever draws a ticket for the lease, who has its row locked, and
-- cleared by whoever has it locked and then sees that there is none. So false says
-- that nobody waits, to a statement that reads it as it locks the row, and most calls
-- need not look for tickets in a second one. True says no more than look.
--
-- No index stands on a column that changes and half of each page stays free,
-- so that every take, renewal and release is a heap-only update.
CREATE TABLE pglock.leases (
    name        text COLLATE "C" PRIMARY KEY,
    token       bigserial NOT NULL,
    holder      text,                                        -- who says to hold it, for people to read
    role        name,                                        -- the session_user that acquired
    claim       uuid,                                        -- one for each acquire; NULL: not held
    acquired_at timestamptz,
    expires_at  timestamptz NOT NULL DEFAULT '-infinity',
    ttl         interval,                                    -- as granted; a renewal grants it again
    metadata    jsonb,
    timeline    text,
    awaited     boolean NOT NULL DEFAULT false
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.2
);

-- Those who wait for a lease, in the order of their tickets.
CREATE TABLE pglock.waiters (
    ticket     bigserial,
    name       text COLLATE "C",
    claim      uuid NOT NULL UNIQUE,
    channel    text NOT NULL,                                -- where its client listens
    holder     text,
    role       name NOT NULL,
    queued_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    ttl        interval NOT NULL,
    metadata   jsonb,
    PRIMARY KEY (name, ticket)
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_cost_delay = 0
);

-- The highest token that each resource has accepted.
CREATE TABLE pglock.fences (
    resource text COLLATE "C" PRIMARY KEY,
    token    bigint NOT NULL CHECK (token > 0)
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.05,
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_cost_delay = 0
);

-- The branch of history that tokens were last drawn on: one row.
CREATE TABLE pglock.epoch (
    singleton         boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    system_identifier bigint,
    timeline          text,
    since             timestamptz NOT NULL DEFAULT clock_timestamp()
);
INSERT INTO pglock.epoch DEFAULT VALUES;

-- The version of this schema, which a client compares with what it needs.
-- +goose StatementBegin
CREATE FUNCTION pglock.schema_version() RETURNS bigint
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(max(version_id), 0) FROM pglock.goose_db_version WHERE is_applied
$$;
-- +goose StatementEnd

-- Functions that only other functions call have no search_path of their own: they
-- run under the one that their caller pins, which saves setting it once more.

-- Refuses what can't be a name of a lease or of a resource.
-- +goose StatementBegin
CREATE FUNCTION pglock.check_name(kind text, name text) RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF name IS NULL OR name = '' THEN
        RAISE EXCEPTION 'empty % name', kind
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Name what the lock protects, for example accounts/42.';
    ELSIF octet_length(name) > 1024 THEN
        RAISE EXCEPTION '% name "%..." is % bytes long', kind, left(name, 40), octet_length(name)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'A name has at most 1024 bytes: hash a longer one.';
    END IF;
END
$$;
-- +goose StatementEnd

-- Lowers how long this transaction may sit idle before the server ends it, so
-- that a writer paused inside its transaction holds nobody up for longer and
-- its late COMMIT fails. Never raises what the caller had, and leaves alone
-- what pglock.SetHoldTimeout chose (it leaves its mark in pglock.hold_timeout).
-- A set_config that is local to the transaction outlives this function.
-- +goose StatementBegin
CREATE FUNCTION pglock.bound_pause(most interval) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    present text := current_setting('idle_in_transaction_session_timeout');
BEGIN
    IF coalesce(current_setting('pglock.hold_timeout', true), '') = ''
       AND (present = '0' OR present::interval > most) THEN
        present := set_config('idle_in_transaction_session_timeout',
                              greatest(1, ceil(extract(epoch FROM most) * 1000))::bigint::text, true);
    END IF;
END
$$;
-- +goose StatementEnd

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock FROM PUBLIC;

-- +goose Down
DROP FUNCTION pglock.bound_pause(interval);
DROP FUNCTION pglock.check_name(text, text);
DROP FUNCTION pglock.schema_version();
DROP TABLE pglock.epoch;
DROP TABLE pglock.fences;
DROP TABLE pglock.waiters;
DROP TABLE pglock.leases;
