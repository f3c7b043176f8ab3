package main

import (
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// The database is that of --dsn, else of DATABASE_URL, else of PGHOST and so on.
func TestConnect(t *testing.T) {
	t.Parallel()
	migrated, empty := pgtest.DSN(t), pgtest.EmptyDSN(t)
	config, err := pgx.ParseConfig(migrated)
	if err != nil {
		t.Fatal(err)
	}
	keywords := fmt.Sprintf("host=%s port=%d user=%s password=%s dbname=%s", config.Host, config.Port, config.User, config.Password, config.Database)
	variables := []string{"PGHOST=" + config.Host, fmt.Sprint("PGPORT=", config.Port), "PGUSER=" + config.User,
		"PGPASSWORD=" + config.Password, "PGDATABASE=" + config.Database}
	for _, tt := range []struct {
		what string
		url  string
		env  []string
		args []string
		code int // of migrate status, which tells the two apart
	}{
		{"--dsn before all", empty, nil, []string{"--dsn", migrated}, 0},
		{"--dsn of keywords", empty, nil, []string{"--dsn", keywords}, 0},
		{"DATABASE_URL", migrated, []string{"PGHOST=nowhere.invalid"}, nil, 0},
		{"PGHOST and so on", "", variables, nil, 0},
		{"DATABASE_URL before PGHOST", empty, variables, nil, exitNoSchema},
		{"--dsn before DATABASE_URL", migrated, nil, []string{"--dsn", empty}, exitNoSchema},
	} {
		t.Run(tt.what, func(t *testing.T) {
			t.Parallel()
			p := command(t, tt.url, append([]string{"migrate", "status"}, tt.args...)...)
			p.Env = append(p.Env, tt.env...)
			if code := p.start(t).end(t); code != tt.code {
				t.Errorf("it exits with %d, want %d: %s", code, tt.code, p.stderr.String())
			}
		})
	}
}
