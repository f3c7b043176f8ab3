package migrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/jackc/puddle/v2"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/database"
)

const (
	// lockKey is the session advisory lock that a run of migrations holds, the
	// bytes of "pglock\0m". goose's own is one for all of its users.
	lockKey int64 = 0x70676c6f636b006d
	// lockWait is how long a run waits for another, lockPoll how often it looks.
	lockWait = 5 * time.Minute
	lockPoll = 50 * time.Millisecond
)

// lockTimeout is how long a statement waits for a table. Whoever waits to
// change a table makes all later users of it wait too. Tests make it shorter.
var lockTimeout = 10 * time.Second

// run calls do with a provider on a connection that is this run's alone and is
// closed at its end, so that whatever happens no lock and no setting gets back
// into the caller's pool.
func run(ctx context.Context, pool *pgxpool.Pool, files fs.FS, do func(*sql.DB, *goose.Provider) error) error {
	if err := open(ctx, pool); err != nil {
		return err
	}
	config := pool.Config()
	options := []stdlib.OptionOpenDB{}
	if config.BeforeConnect != nil {
		options = append(options, stdlib.OptionBeforeConnect(config.BeforeConnect))
	}
	if config.AfterConnect != nil {
		options = append(options, stdlib.OptionAfterConnect(config.AfterConnect))
	}
	versions, err := newStore()
	if err != nil {
		return err
	}
	db := stdlib.OpenDB(*config.ConnConfig, options...)
	db.SetMaxOpenConns(1)
	provider, err := goose.NewProvider("", db, files,
		goose.WithStore(versions),
		goose.WithSessionLocker(sessionLock{}),
		goose.WithDisableGlobalRegistry(true), // the caller's own Go migrations
	)
	if err == nil {
		err = do(db, provider)
	}
	return errors.Join(err, db.Close())
}

// open returns an error if the caller has closed the pool. That the pool is
// busy is none.
func open(ctx context.Context, pool *pgxpool.Pool) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	brief, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	conn, err := pool.Acquire(brief)
	if errors.Is(err, puddle.ErrClosedPool) {
		return err
	}
	if err == nil {
		conn.Release()
	}
	return nil
}

// versionTable is where goose keeps which migrations are applied.
const versionTable = "pglock.goose_db_version"

// store is goose's for PostgreSQL, which makes the schema too.
type store struct{ database.StoreExtender }

func newStore() (store, error) {
	plain, err := database.NewStore(database.DialectPostgres, versionTable)
	if err != nil {
		return store{}, err
	}
	extended, ok := plain.(database.StoreExtender)
	if !ok {
		return store{}, errors.New("goose's store for PostgreSQL can't tell whether its table exists")
	}
	return store{extended}, nil
}

// CreateVersionTable makes the schema only if it is missing. CREATE SCHEMA IF
// NOT EXISTS wants the right to make schemas even where there is nothing to
// make, and a DBA may have made this one just so that we needn't have it.
func (s store) CreateVersionTable(ctx context.Context, db database.DBTxConn) error {
	var exists bool
	if err := db.QueryRowContext(ctx, "SELECT to_regnamespace('pglock') IS NOT NULL").Scan(&exists); err != nil {
		return err
	}
	if !exists {
		if _, err := db.ExecContext(ctx, "CREATE SCHEMA pglock"); err != nil {
			return err
		}
	}
	return s.StoreExtender.CreateVersionTable(ctx, db)
}

func versionTableExists(ctx context.Context, db *sql.DB) (exists bool, err error) {
	err = db.QueryRowContext(ctx, "SELECT to_regclass('"+versionTable+"') IS NOT NULL").Scan(&exists)
	return exists, err
}

// sessionLock keeps runs apart. Unlike goose's own it looks often, says who
// holds the lock when it gives up, and does not spend a minute on an unlock
// that was refused.
//
// It asks again and again and never waits in the server: a statement that
// waits for an advisory lock holds a snapshot, CREATE INDEX CONCURRENTLY waits
// for that snapshot, and if it runs in the one that holds the lock both wait
// for ever.
type sessionLock struct{}

func (sessionLock) SessionLock(ctx context.Context, conn *sql.Conn) error {
	// goose records times of day without a zone.
	if _, err := conn.ExecContext(ctx, fmt.Sprintf("SET lock_timeout = %d; SET TimeZone = 'UTC'", lockTimeout.Milliseconds())); err != nil {
		return err
	}
	return pollLock(ctx, func() (locked bool, err error) {
		err = conn.QueryRowContext(ctx, "SELECT pg_try_advisory_lock($1)", lockKey).Scan(&locked)
		return locked, err
	}, conn)
}

func (sessionLock) SessionUnlock(ctx context.Context, conn *sql.Conn) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var unlocked bool
	if err := conn.QueryRowContext(ctx, "SELECT pg_advisory_unlock($1)", lockKey).Scan(&unlocked); err != nil {
		return fmt.Errorf("unlock migrations: %w", err)
	}
	if !unlocked {
		return errors.New("unlock migrations: the lock was not held any more, another run may have worked at the same time; check with Status")
	}
	return nil
}

type querier interface {
	QueryContext(ctx context.Context, sql string, args ...any) (*sql.Rows, error)
}

// pollLock tries until it has the lock. It looks now and then who holds it, and
// not when it gives up: its last statement may have ended with the context, and
// the connection with it.
func pollLock(ctx context.Context, try func() (bool, error), db querier) error {
	bounded, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	holder := "a session not looked for yet"
	for n := 0; ; n++ {
		locked, err := try()
		if locked {
			return nil
		}
		if err == nil && n%20 == 0 {
			var found string
			found, err = sessions(ctx, db, `locktype = 'advisory' AND objsubid = 1
				AND (classid::bigint << 32) | objid::bigint = $1`, lockKey)
			if err == nil {
				holder = found
			}
		}
		if err != nil && bounded.Err() == nil {
			return fmt.Errorf("lock migrations: %w", err)
		}
		select {
		case <-bounded.Done():
			return fmt.Errorf("wait for another run of migrations, that of %s: %w", holder, bounded.Err())
		case <-time.After(lockPoll):
		}
	}
}

// lockHolders describes who holds a lock on something of ours.
func lockHolders(ctx context.Context, db querier) (string, error) {
	return sessions(ctx, db, `relation IN (SELECT oid FROM pg_class WHERE relnamespace = to_regnamespace('pglock'))`)
}

// sessions describes the other sessions that were granted a lock in this
// database, of those which where picks.
func sessions(ctx context.Context, db querier, where string, args ...any) (string, error) {
	rows, err := db.QueryContext(ctx, `
		SELECT DISTINCT format('pid %s (%s, %s, %s since %s)',
			a.pid, a.usename, coalesce(nullif(a.application_name, ''), 'no application_name'), a.state, a.state_change)
		FROM pg_locks l JOIN pg_stat_activity a USING (pid)
		WHERE l.granted AND l.pid <> pg_backend_pid()
		  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
		  AND l.`+where, args...)
	if err != nil {
		return "", err
	}
	defer rows.Close()
	var found []string
	for rows.Next() {
		var session string
		if err := rows.Scan(&session); err != nil {
			return "", err
		}
		found = append(found, session)
	}
	if len(found) == 0 {
		return "a session that has ended since", rows.Err()
	}
	return strings.Join(found, ", "), rows.Err()
}
