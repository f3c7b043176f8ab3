-- What a client of v0.1.0 sends, with the types of what it gives and of what it
-- reads. It is frozen: whatever the schema becomes, these statements go on to
-- work as they did. Later statements go into a file of their own release.

-- greet() = boolean, bigint
SELECT pg_is_in_recovery(), pglock.schema_version();

-- check_epoch() = void
SELECT pglock.check_epoch();

-- acquire_one(text, interval, uuid, text, jsonb) = granted boolean, token bigint, holder text, remaining interval, expires_at timestamp with time zone
SELECT granted, token, holder, remaining, expires_at
FROM pglock.acquire_one($1::text, $2::interval, $3::uuid, $4::text, $5::jsonb);

-- acquire_by_hand() = name text, granted boolean, token bigint, holder text, remaining interval, expires_at timestamp with time zone
SELECT * FROM pglock.acquire('{by hand}', '30 s');

-- acquire_all(text[], interval, uuid, text, jsonb) = name text, granted boolean, token bigint, holder text, remaining interval, expires_at timestamp with time zone
SELECT name, granted, token, holder, remaining, expires_at
FROM pglock.acquire($1::text[], $2::interval, $3::uuid, $4::text, $5::jsonb, whole => true);

-- enqueue(text, interval, uuid, text, text, jsonb) = granted boolean, token bigint, holder text, remaining interval, expires_at timestamp with time zone, ticket bigint
SELECT granted, token, holder, remaining, expires_at, ticket
FROM pglock.enqueue($1::text, $2::interval, $3::uuid, $4::text, $5::text, $6::jsonb);

-- refresh(text[], uuid[]) = token bigint, state text, remaining interval, claim text
SELECT token, state, remaining, claim::text FROM pglock.refresh($1::text[], $2::uuid[]);

-- cancel(text, uuid) = void
SELECT pglock.cancel($1::text, $2::uuid);

-- renew(text[], bigint[]) = token bigint, state text, remaining interval
SELECT token, state, remaining FROM pglock.renew($1::text[], $2::bigint[]);

-- renew_by_hand() = name text, token bigint, state text, remaining interval
SELECT * FROM pglock.renew('{by hand}', '{17}');

-- release(text[], bigint[], interval) = token bigint, state text, blockers integer[], since timestamp with time zone
SELECT token, state, blockers, since FROM pglock.release($1::text[], $2::bigint[], $3::interval);

-- release_one(text, bigint, interval, boolean) = token bigint, state text, blockers integer[], since timestamp with time zone
SELECT $2::bigint AS token, state, blockers, since FROM pglock.release_one($1::text, $2::bigint, $3::interval, $4::boolean);

-- release_by_hand() = name text, token bigint, state text, blockers integer[], since timestamp with time zone
SELECT * FROM pglock.release('{by hand}', '{17}');

-- exchange(text[], bigint[], text[], interval[], jsonb[], uuid, text) = name text, token bigint, state text, blockers integer[], since timestamp with time zone, holder text, remaining interval, expires_at timestamp with time zone
SELECT name, token, state, blockers, since, holder, remaining, expires_at
FROM pglock.exchange($1::text[], $2::bigint[], $3::text[], $4::interval[], $5::jsonb[], $6::uuid, $7::text);

-- guard(text, bigint) = void
SELECT pglock.guard($1::text, $2::bigint);

-- present(text, bigint) = void
SELECT pglock.present($1::text, $2::bigint);

-- fence(text, bigint) = void
SELECT pglock.fence($1::text, $2::bigint);

-- list_leases(text) = name text, token bigint, holder text, role text, acquired_at timestamp with time zone, expires_at timestamp with time zone, remaining interval, ttl interval, metadata jsonb, waiters bigint
SELECT name, token, holder, role::text, acquired_at, expires_at, remaining, ttl, metadata, waiters
FROM pglock.list_leases($1::text);

-- list_leases_by_hand() = name text, token bigint, holder text, role name, acquired_at timestamp with time zone, expires_at timestamp with time zone, remaining interval, ttl interval, metadata jsonb, waiters bigint
SELECT * FROM pglock.list_leases();

-- list_waiters() = name text, ticket bigint, holder text, role text, queued_at timestamp with time zone, expires_at timestamp with time zone
SELECT name, ticket, holder, role::text, queued_at, expires_at FROM pglock.list_waiters();

-- force_release(text, bigint) = state text, blockers integer[], since timestamp with time zone
SELECT state, blockers, since FROM pglock.force_release($1::text, $2::bigint);

-- purge(interval) = bigint
SELECT pglock.purge($1::interval);

-- new_epoch() = void
SELECT pglock.new_epoch();

-- list_fences() = resource text, token bigint
SELECT resource, token FROM pglock.list_fences();

-- reset_fence(text, bigint) = bigint
SELECT pglock.reset_fence($1::text, $2::bigint);

-- forget_fence(text) = bigint
SELECT pglock.reset_fence($1::text);

-- protect(text, text) = void
SELECT pglock.protect($1::text::regclass, $2::text);

-- unprotect(text) = void
SELECT pglock.unprotect($1::text::regclass);

-- guard_version(text) = void
SELECT pglock.guard_version($1::text::regclass);

-- protected_tables() = target regclass, pattern text, enabled boolean, gaps regclass[]
SELECT target, pattern, enabled, gaps FROM pglock.protected_tables;
