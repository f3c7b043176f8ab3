-- The second session of story.sql.
DO $$
DECLARE
    answer record;
BEGIN
    LOOP
        SELECT * INTO answer FROM pglock.acquire('{accounts/42}', '1 h');
        EXIT WHEN answer.granted;
        PERFORM pg_sleep(greatest(0.01, extract(epoch FROM answer.remaining)));
    END LOOP;
END
$$;
SELECT token FROM pglock.list_leases('accounts/42') \gset
BEGIN;
SELECT pglock.present('accounts/42', :token);
UPDATE accounts SET balance = balance - 20 WHERE id = 42;
COMMIT;
SELECT 'token ' || :token || ', balance ' || balance FROM accounts;
