package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pawl-go/pawl/migrations"
)

func (a *app) migrate() *cobra.Command {
	return verbs(&cobra.Command{
		Use:   "migrate",
		Short: "Bring the schema pglock into a database and out of it",
		Example: `  pglock migrate up
  pglock migrate status
  pglock migrate sql | psql "$DSN"`,
	}, a.migrateUp(), a.migrateDown(), a.migrateStatus(), a.migrateSQL())
}

func (a *app) migrateUp() *cobra.Command {
	return &cobra.Command{
		Use:   "up",
		Short: "Apply what is missing of the migrations",
		Long: `up applies what is missing of the migrations, and shows them all. Any number
may run at once. The role needs CREATE on the database, or a schema pglock that
it owns.`,
		Args: cobra.NoArgs,
		RunE: a.verb(func(ctx context.Context, _ []string) error { return a.migrated(ctx, migrations.Up) }),
	}
}

func (a *app) migrateDown() *cobra.Command {
	return &cobra.Command{
		Use:   "down",
		Short: "Take back all migrations, with all leases, fences and tokens",
		Long: `down takes back all migrations and drops the schema: leases and fences are
gone, and tokens begin again with 1. It refuses while a table is protected, or
anything else of yours stands in the schema or depends on it, and says what.`,
		Args: cobra.NoArgs,
		RunE: a.verb(func(ctx context.Context, _ []string) error { return a.migrated(ctx, migrations.Down) }),
	}
}

func (a *app) migrateStatus() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Show which migrations are applied",
		Long:  "status shows which migrations are applied, and exits with 78 where one is not.",
		Args:  cobra.NoArgs,
		RunE: a.verb(func(ctx context.Context, _ []string) error {
			pool, err := a.connect(ctx)
			if err != nil {
				return err
			}
			defer pool.Close()
			states, err := a.migrations(ctx, pool)
			if err != nil {
				return err
			}
			for _, s := range states {
				if s.AppliedAt.IsZero() {
					return status(exitNoSchema)
				}
			}
			return nil
		}),
	}
}

// migrated changes what is applied, and shows it.
func (a *app) migrated(ctx context.Context, change func(context.Context, *pgxpool.Pool) error) error {
	pool, err := a.connect(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := change(ctx, pool); err != nil {
		return err
	}
	_, err = a.migrations(ctx, pool)
	return err
}

// migration is one, as it is printed.
type migration struct {
	Version   int64      `json:"version"`
	File      string     `json:"file"`
	AppliedAt *time.Time `json:"applied_at"`
}

// migrations prints which are applied.
func (a *app) migrations(ctx context.Context, pool *pgxpool.Pool) ([]migrations.State, error) {
	states, err := migrations.Status(ctx, pool)
	if err != nil {
		return nil, err
	}
	found := make([]migration, len(states))
	for i, s := range states {
		found[i] = migration{Version: s.Version, File: s.File}
		if !s.AppliedAt.IsZero() {
			found[i].AppliedAt = new(s.AppliedAt.UTC())
		}
	}
	return states, a.print(found, func() *table {
		t := newTable(">VERSION", "FILE", "APPLIED AT")
		for _, m := range found {
			when := cell{"pending", yellow}
			if m.AppliedAt != nil {
				when = text(m.AppliedAt.Format(time.DateTime) + " UTC")
			}
			t.add(text(m.Version), text(m.File), when)
		}
		return t
	})
}

func (a *app) migrateSQL() *cobra.Command {
	var down bool
	cmd := &cobra.Command{
		Use:   "sql",
		Short: "Print all migrations as one script for psql",
		Long: `sql prints all migrations as one script for psql, which is one transaction: for
databases that only an administrator may change. A later pglock migrate up finds
them applied. It needs no server.`,
		Example: `  pglock migrate sql > pglock.sql
  psql "$DSN" -f pglock.sql`,
		Args: cobra.NoArgs,
		RunE: a.verb(func(context.Context, []string) error {
			script, err := script(migrations.FS, down)
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.print(map[string]string{"sql": script}, nil)
			}
			_, err = io.WriteString(a.stdout, script)
			if err != nil {
				err = fmt.Errorf("print: %w", err)
			}
			return err
		}),
	}
	cmd.Flags().BoolVar(&down, "down", false, "print how to take them all back")
	return cmd
}
