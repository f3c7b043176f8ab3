package migrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5/stdlib"
)

// checkServer returns an error if migrations can't or must not run on this
// connection.
func checkServer(ctx context.Context, db *sql.DB) error {
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := checkPooler(ctx, conn); err != nil {
		return err
	}
	var number int
	var version, readOnly string
	var standby bool
	err = conn.QueryRowContext(ctx, `
		SELECT current_setting('server_version_num')::int, current_setting('server_version'),
		       pg_is_in_recovery(), current_setting('transaction_read_only')`,
	).Scan(&number, &version, &standby, &readOnly)
	switch {
	case err != nil:
		return err
	case number < 140000:
		return fmt.Errorf("the server is PostgreSQL %s: use 14 or newer", version)
	case standby:
		return errors.New("the server is a standby: connect to the primary, with several hosts in the DSN by target_session_attrs=read-write")
	case readOnly == "on":
		return errors.New("transactions are read-only here: connect as a role, and to a database, without default_transaction_read_only")
	}
	return nil
}

// checkPooler returns an error if what answers is not the server itself.
//
// A server names, when it accepts a connection, the process that serves it; a
// pooler makes that number up, or hands out that of one server connection and
// then uses several. There the session lock would be taken in one session and
// unlocked in another. A pooler in session mode would do, but looks the same.
func checkPooler(ctx context.Context, conn *sql.Conn) error {
	var promised int64
	err := conn.Raw(func(driver any) error {
		promised = int64(driver.(*stdlib.Conn).Conn().PgConn().PID())
		return nil
	})
	if err != nil {
		return err
	}
	for range 3 {
		var pid int64
		if err := conn.QueryRowContext(ctx, "SELECT pg_backend_pid()").Scan(&pid); err != nil {
			return err
		}
		if pid != promised {
			return fmt.Errorf("the connection goes through a pooler (backend %d serves what %d accepted), which would lose the lock that keeps runs of migrations apart: use a DSN that leads to the server itself", pid, promised)
		}
	}
	return nil
}

var created = regexp.MustCompile(`(?im)^\s*CREATE\s+(?:OR\s+REPLACE\s+)?(?:UNLOGGED\s+)?(?:TABLE|VIEW|SEQUENCE|TYPE|DOMAIN|FUNCTION|PROCEDURE|AGGREGATE)\s+pglock\.(\w+)`)

// ourNames are the names that the migrations create in the schema, read from
// their text so that no list of them can go stale.
func ourNames() ([]string, error) {
	names := []string{strings.TrimPrefix(versionTable, "pglock.")}
	files, err := fs.Glob(FS, "*.sql")
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		text, err := fs.ReadFile(FS, file)
		if err != nil {
			return nil, err
		}
		for _, match := range created.FindAllSubmatch(text, -1) {
			names = append(names, string(match[1]))
		}
	}
	return names, nil
}

// checkForeign returns an error if somebody else's object stands in the schema
// or depends on what does.
func checkForeign(ctx context.Context, db *sql.DB) error {
	names, err := ourNames()
	if err != nil {
		return err
	}
	rows, err := db.QueryContext(ctx, `
		WITH inside AS (
			SELECT classid, objid FROM pg_depend
			WHERE refclassid = 'pg_namespace'::regclass AND refobjid = to_regnamespace('pglock') AND deptype = 'n'
			UNION
			-- rows of a table as a type, which depend on the table and not on the schema
			SELECT 'pg_type'::regclass, oid FROM pg_type WHERE typnamespace = to_regnamespace('pglock')
		)
		-- in the schema, not by a name of ours and not a part of such
		SELECT pg_describe_object(i.classid, i.objid, 0)
		FROM inside i, pg_identify_object_as_address(i.classid, i.objid, 0) a
		WHERE regexp_replace(a.object_names[array_upper(a.object_names, 1)], '^pglock\.', '') <> ALL ($1::text[])
		  AND NOT EXISTS (SELECT FROM pg_depend p WHERE p.classid = i.classid AND p.objid = i.objid AND p.deptype IN ('a', 'i'))
		UNION
		-- outside, but leaning on something inside
		SELECT pg_describe_object(d.classid, d.objid, d.objsubid)
		FROM pg_depend d JOIN inside i ON (d.refclassid, d.refobjid) = (i.classid, i.objid),
		     pg_identify_object(d.classid, d.objid, d.objsubid) o
		WHERE d.deptype = 'n' AND o.identity !~ '^(.*\m(on|for) )?pglock\.'
		ORDER BY 1`, names)
	if err != nil {
		return err
	}
	defer rows.Close()
	var found []string
	for rows.Next() {
		var object string
		if err := rows.Scan(&object); err != nil {
			return err
		}
		found = append(found, object)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	if len(found) > 0 {
		return fmt.Errorf("schema pglock is in use: %s; drop these or move them, and try again (a trigger pglock_protect: SELECT pglock.unprotect(table); pglock_guard_version: DROP TRIGGER)", strings.Join(found, ", "))
	}
	return nil
}

// removeSchema drops what goose leaves. It holds the lock of a run, and looks
// under it whether another has begun anew meanwhile.
func removeSchema(ctx context.Context, db *sql.DB) error {
	conn, err := db.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := (sessionLock{}).SessionLock(ctx, conn); err != nil {
		return err
	}
	_, err = conn.ExecContext(ctx, `
		DO $$
		BEGIN
			IF to_regclass('pglock.goose_db_version') IS NULL THEN
				RETURN;
			END IF;
			IF EXISTS (SELECT FROM pglock.goose_db_version WHERE version_id > 0) THEN
				RAISE EXCEPTION 'the migrations were applied again while they were taken back';
			END IF;
			DROP TABLE pglock.goose_db_version;
			DROP SCHEMA pglock;
		END
		$$`)
	return errors.Join(err, sessionLock{}.SessionUnlock(context.WithoutCancel(ctx), conn))
}
