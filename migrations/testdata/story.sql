-- The whole story in psql: two sessions, one lease, one table. A second psql
-- plays the second session, by $PSQL and $DSN; run this one as
--   psql -X -q -A -t -d "$DSN" < story.sql
\set ON_ERROR_STOP on
\set SHOW_CONTEXT never

CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL);
INSERT INTO accounts VALUES (42, 100);
SELECT pglock.protect('accounts', 'accounts/%');

\echo 'The first session acquires, presents and writes.'
SELECT token FROM pglock.acquire('{accounts/42}', '1 s') WHERE granted \gset
BEGIN;
SELECT pglock.present('accounts/42', :token);
UPDATE accounts SET balance = balance - 10 WHERE id = 42;
COMMIT;
SELECT 'token ' || :token || ', balance ' || balance FROM accounts;

\echo 'It pauses. The second session waits until the lease has expired, and takes over.'
\! "$PSQL" -X -q -A -t -v ON_ERROR_STOP=1 -d "$DSN" < testdata/takeover.sql

\echo 'The first session wakes up and goes on.'
\set ON_ERROR_STOP off
BEGIN;
SELECT pglock.present('accounts/42', :token);
UPDATE accounts SET balance = 0 WHERE id = 42;
COMMIT;

\echo 'It writes without presenting anything.'
UPDATE accounts SET balance = 0 WHERE id = 42;

\echo 'It forges what it has presented.'
BEGIN;
SELECT FROM set_config('pglock.presented', '[["accounts/42", 1]]', true);
UPDATE accounts SET balance = 0 WHERE id = 42;
COMMIT;

\echo 'It presents another lease.'
BEGIN;
SELECT FROM pglock.acquire('{reports/daily}', '1 h');
SELECT pglock.present('reports/daily', (SELECT token FROM pglock.list_leases('reports/daily')));
UPDATE accounts SET balance = 0 WHERE id = 42;
COMMIT;

\echo 'An administrator breaks the glass.'
\set ON_ERROR_STOP on
SELECT state FROM pglock.force_release('accounts/42', (SELECT token FROM pglock.list_leases('accounts/42')));
BEGIN;
SELECT token FROM pglock.acquire('{accounts/42}', '10 min') WHERE granted \gset
SELECT pglock.present('accounts/42', :token);
UPDATE accounts SET balance = balance + 1 WHERE id = 42;
COMMIT;
SELECT state FROM pglock.release('{accounts/42}', ARRAY[:token]);

SELECT 'token ' || :token || ', balance ' || balance FROM accounts;
SELECT target, pattern, enabled FROM pglock.protected_tables;
SELECT pglock.unprotect('accounts');
UPDATE accounts SET balance = 0 WHERE id = 42;
SELECT 'unprotected, balance ' || balance FROM accounts;
