// Package migrations brings Pawl's schema, pglock, into a database and out of
// it again.
//
// The files are plain goose migrations, so that goose's own command can apply
// them too. Their version table is pglock.goose_db_version: a database with a
// goose history of its own keeps it untouched.
package migrations

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pressly/goose/v3"
)

// FS holds the migrations, for goose and for whoever wants to read them.
//
//go:embed *.sql
var FS embed.FS

// Up applies what is missing of the migrations. Where nothing is missing, or a
// newer program has applied more, it reads one table and takes no lock. Any number of processes may call it at
// once; the others wait for the one that is at work, for five minutes at most.
//
// It works on a connection of its own with the settings of the pool, so that
// neither a pool of one nor a busy one can block it, and leaves the pool open.
//
// Each migration is a transaction: after an error those before the failed one
// are applied, and Up goes on from there when called again. A transaction
// pooler, a standby and a server older than PostgreSQL 14 are refused before
// anything is changed.
func Up(ctx context.Context, pool *pgxpool.Pool) error {
	return up(ctx, pool, FS)
}

func up(ctx context.Context, pool *pgxpool.Pool, files fs.FS) error {
	err := run(ctx, pool, files, func(db *sql.DB, p *goose.Provider) error {
		if err := checkServer(ctx, db); err != nil {
			return err
		}
		exists, err := versionTableExists(ctx, db)
		if err != nil {
			return err
		}
		if !exists {
			// Provider.Up makes the version table before it takes the lock;
			// this makes it under the lock.
			if _, err := p.GetDBVersion(ctx); err != nil {
				return explain(ctx, db, err)
			}
		}
		_, err = p.Up(ctx)
		return explain(ctx, db, err)
	})
	if err != nil {
		return fmt.Errorf("apply pglock's migrations: %w", err)
	}
	return nil
}

// Down takes back all migrations and then removes the version table and the
// schema: all leases and fences are gone, and with them the order of tokens.
// Where there is nothing to take back it does nothing.
//
// It refuses before anything is changed what Up refuses, a database that a
// newer program has migrated, and while something that is not Pawl's stands in
// the schema or depends on what does; the error lists it. After any other error some migrations may be taken back; Down goes
// on from there when called again, and Up restores what is missing.
func Down(ctx context.Context, pool *pgxpool.Pool) error {
	err := run(ctx, pool, FS, func(db *sql.DB, p *goose.Provider) error {
		if err := checkServer(ctx, db); err != nil {
			return err
		}
		exists, err := versionTableExists(ctx, db)
		if err != nil || !exists {
			return err
		}
		if err := checkForeign(ctx, db); err != nil {
			return err
		}
		current, known, err := p.GetVersions(ctx)
		if err != nil {
			return err
		}
		if current > known {
			return fmt.Errorf("the database is at version %d, this program knows the way back from %d: use one that is as new as the database", current, known)
		}
		if _, err := p.DownTo(ctx, 0); err != nil {
			return explain(ctx, db, err)
		}
		return explain(ctx, db, removeSchema(ctx, db))
	})
	if err != nil {
		return fmt.Errorf("take back pglock's migrations: %w", err)
	}
	return nil
}

// State is what became of one migration.
type State struct {
	Version   int64
	File      string
	AppliedAt time.Time // zero if it is not applied
}

func (s State) String() string {
	if s.AppliedAt.IsZero() {
		return s.File + " pending"
	}
	return s.File + " applied at " + s.AppliedAt.UTC().Format(time.DateTime) + " UTC"
}

// Status says of each migration, in their order, whether it is applied. It
// changes nothing and works on a standby too.
func Status(ctx context.Context, pool *pgxpool.Pool) ([]State, error) {
	var states []State
	err := run(ctx, pool, FS, func(db *sql.DB, p *goose.Provider) error {
		exists, err := versionTableExists(ctx, db)
		if err != nil {
			return err
		}
		if !exists { // Provider.Status would make it
			for _, source := range p.ListSources() {
				states = append(states, State{Version: source.Version, File: source.Path})
			}
			return nil
		}
		found, err := p.Status(ctx)
		for _, status := range found {
			states = append(states, State{
				Version:   status.Source.Version,
				File:      status.Source.Path,
				AppliedAt: status.AppliedAt,
			})
		}
		return explain(ctx, db, err)
	})
	if err != nil {
		return nil, fmt.Errorf("read the state of pglock's migrations: %w", err)
	}
	return states, nil
}

// explain adds to an error of the server what its text leaves out: what depends
// on the object that it would not drop, who holds the lock it waited for.
func explain(ctx context.Context, db *sql.DB, err error) error {
	var refused *pgconn.PgError
	if !errors.As(err, &refused) {
		return err
	}
	switch refused.Code {
	case "42501": // insufficient_privilege
		role := refused.Message // by itself it says what, and of whom nothing
		_ = db.QueryRowContext(ctx, "SELECT current_user").Scan(&role)
		return fmt.Errorf("%w: role %q needs CREATE on the database, or to be the owner of schema pglock and of what stands in it", err, role)
	case "2BP01": // dependent_objects_still_exist
		return fmt.Errorf("%w: %s", err, refused.Detail)
	case "55P03": // lock_not_available
		holders, lookErr := lockHolders(ctx, db)
		if lookErr != nil {
			return errors.Join(err, lookErr)
		}
		return fmt.Errorf("%w: a table of pglock is in use by %s; let these end, or end them with pg_terminate_backend, and try again", err, holders)
	}
	return err
}
