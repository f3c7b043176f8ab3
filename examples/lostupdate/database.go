package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgserver"
	"github.com/pawl-go/pawl/migrations"
)

// database is where the program works, and what it has to put back there.
type database struct {
	server  *pgserver.Server // nil: the user's
	dsn     string
	pool    *pgxpool.Pool
	version string // of PostgreSQL
	schema  string
	made    bool // the schema is there
	applied bool // the migrations are, and were not before
	account account
}

// open starts a server or connects to the one that -dsn names, and makes the
// schema there. After an error everything is as it was.
func open(ctx context.Context, o options) (_ *database, err error) {
	db := &database{dsn: o.dsn}
	defer func() {
		if err != nil {
			err = errors.Join(err, db.close(false, func(string) {}))
		}
	}()
	if db.dsn == "" {
		if db.server, err = pgserver.Start(ctx); err != nil {
			return nil, err
		}
		db.dsn = db.server.DSN()
	}
	// One for each worker and one for what the workers don't do.
	if db.pool, err = connect(ctx, db.dsn, int32(o.workers)+1); err != nil {
		return nil, err
	}
	if err := db.pool.QueryRow(ctx, "SELECT split_part(current_setting('server_version'), ' ', 1)").Scan(&db.version); err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	if err := db.prepare(ctx); err != nil {
		return nil, err
	}
	return db, nil
}

// connect returns a pool whose transactions are READ COMMITTED whatever the
// database's default: above it PostgreSQL itself refuses the lost update.
func connect(ctx context.Context, dsn string, conns int32) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	config.MaxConns, config.MinConns, config.MinIdleConns = conns, 0, 0
	config.ConnConfig.RuntimeParams["default_transaction_isolation"] = "read committed"
	config.ConnConfig.RuntimeParams["application_name"] = "lostupdate"
	return pgxpool.NewWithConfig(ctx, config)
}

func (db *database) prepare(ctx context.Context) error {
	states, err := migrations.Status(ctx, db.pool)
	if err != nil && !forbidden(err) { // a role that may use the schema and not look into it
		return err
	}
	pending := slices.ContainsFunc(states, func(s migrations.State) bool { return s.AppliedAt.IsZero() })
	present := slices.ContainsFunc(states, func(s migrations.State) bool { return !s.AppliedAt.IsZero() })
	if pending && present {
		return errors.New("schema pglock is there in an older version, and is not this program's to change: run pglock migrate up (migrations.Up), or name another database")
	}
	var id [4]byte
	rand.Read(id[:]) // never fails
	db.schema = "lostupdate_" + hex.EncodeToString(id[:])
	db.account = accountIn(db.schema)
	if _, err := db.pool.Exec(ctx, "CREATE SCHEMA "+db.schema); err != nil {
		if forbidden(err) {
			return fmt.Errorf("create schema %s: GRANT CREATE ON DATABASE to the role, or name another database: %w", db.schema, err)
		}
		return fmt.Errorf("create schema %s: %w", db.schema, err)
	}
	db.made = true
	if pending {
		db.applied = true
		if err := migrations.Up(ctx, db.pool); err != nil {
			return err
		}
	}
	if err := db.account.create(ctx, db.pool); err != nil {
		return fmt.Errorf("create table %s: %w", db.account.table, err)
	}
	return nil
}

// place says where this is, for people to read.
func (db *database) place() string {
	if db.server != nil {
		return "PostgreSQL " + db.version + ", started for this"
	}
	c := db.pool.Config().ConnConfig
	return fmt.Sprintf("PostgreSQL %s on %s, database %s, schema %s", db.version,
		net.JoinHostPort(c.Host, strconv.Itoa(int(c.Port))), c.Database, db.schema)
}

// kept says how to look at what -keep leaves.
func (db *database) kept() string {
	look := fmt.Sprintf("SELECT * FROM %s; SELECT * FROM pglock.leases; SELECT * FROM pglock.fences;", db.account.table)
	if db.server != nil {
		return fmt.Sprintf("Kept until Ctrl-C:\n  psql '%s'\n  %s", db.dsn, look)
	}
	drop := fmt.Sprintf("DROP SCHEMA %s CASCADE;", db.schema)
	if db.applied {
		drop += " and for schema pglock, which was not there before, migrations.Down."
	}
	return fmt.Sprintf("Kept:\n  %s\nTo remove it:\n  %s", look, drop)
}

// close puts everything back, also when the run was broken off. What it may
// not or must not remove it notes.
func (db *database) close(keep bool, note func(string)) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var errs []error
	if db.made && db.server == nil && !keep {
		errs = append(errs, db.clean(ctx, note))
	}
	if db.pool != nil {
		db.pool.Close()
	}
	if db.server != nil {
		errs = append(errs, db.server.Stop())
	}
	return errors.Join(errs...)
}

func (db *database) clean(ctx context.Context, note func(string)) error {
	_, err := db.pool.Exec(ctx, "DROP SCHEMA "+db.schema+" CASCADE")
	if err != nil {
		return fmt.Errorf("drop schema %s: %w", db.schema, err)
	}
	others, err := db.forget(ctx)
	switch {
	case forbidden(err):
		note("The role may use leases and not delete them: rows named " + db.account.name + " stay in pglock.leases and pglock.fences.")
		return nil
	case code(err) == "42P01": // undefined_table: the migrations were not applied
		return nil
	case err != nil:
		return fmt.Errorf("delete the leases and fences of %s: %w", db.account.name, err)
	case db.applied && others:
		// Whoever began to use it meanwhile, another run of this program
		// perhaps, would lose the order of its tokens.
		note("Schema pglock stays: others have begun to use it.")
		return nil
	case db.applied:
		return migrations.Down(ctx, db.pool)
	}
	return nil
}

// forget deletes the rows of this run's own names from pglock's tables, and
// says whether there are any others. No name is used again after it: that the
// tokens of a name only go up is not at stake.
func (db *database) forget(ctx context.Context) (others bool, err error) {
	err = pgx.BeginFunc(ctx, db.pool, func(tx pgx.Tx) error {
		for _, sql := range []string{
			"DELETE FROM pglock.waiters WHERE name = $1",
			"DELETE FROM pglock.leases WHERE name = $1",
			"DELETE FROM pglock.fences WHERE resource = $1",
		} {
			if _, err := tx.Exec(ctx, sql, db.account.name); err != nil {
				return err
			}
		}
		return tx.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pglock.leases) OR EXISTS (SELECT FROM pglock.fences)").Scan(&others)
	})
	return others, err
}

func forbidden(err error) bool { return code(err) == "42501" } // insufficient_privilege

// code is the SQLSTATE of an error, empty if it isn't the server's.
func code(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}
