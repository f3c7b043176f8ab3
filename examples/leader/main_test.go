package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == nodeCommand {
		main()
	}
	pgtest.Main(m)
}

var told = regexp.MustCompile(`^\w leads with token \d+
\w was killed; \d+ ms later \w leads with token \d+
\w was asked to leave; \d+ ms later \w leads with token \d+
\d+ decisions, 0 of them by a leader who was none any more
$`)

// The election as it goes, and three that go wrong: the program says so.
func TestWatch(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		sabotage string
		kill     func(*node) error
		patience time.Duration
		want     string
	}{
		"killed": {"", (*node).kill, ttl + bound, ""},
		"a leader who lives": {
			"", func(*node) error { return nil }, 2 * ttl, "was killed: nobody took over",
		},
		"tokens that stay": {
			`CREATE OR REPLACE FUNCTION pglock.draw(before bigint) RETURNS bigint LANGUAGE sql AS 'SELECT 7::bigint'`,
			(*node).kill, ttl + bound, "with token 7 after",
		},
		"a late decision": {
			`CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
				NEW.token := 1000000 - NEW.id; RETURN NEW; END $$;
			CREATE FUNCTION spoil() RETURNS event_trigger LANGUAGE plpgsql AS $$ BEGIN
				CREATE TRIGGER late BEFORE INSERT ON decisions FOR EACH ROW EXECUTE FUNCTION late(); END $$;
			CREATE EVENT TRIGGER spoil ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION spoil()`,
			(*node).kill, ttl + bound, "came too late",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.DSN(t)
			if tt.sabotage != "" {
				if _, err := pgtest.PoolOn(t, dsn).Exec(t.Context(), tt.sabotage); err != nil {
					t.Fatal(err)
				}
			}
			var out bytes.Buffer
			err := watch(t.Context(), dsn, &out, tt.kill, tt.patience)
			switch {
			case tt.want == "" && (err != nil || !told.MatchString(out.String())):
				t.Errorf("%v\n%s", err, out.String())
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("%v, want %q\n%s", err, tt.want, out.String())
			}
		})
	}
}

// The program as a user runs it.
func TestRun(t *testing.T) {
	t.Parallel()
	var out, errs bytes.Buffer
	if code := run(context.Background(), nil, &out, &errs); code != 0 || !told.MatchString(out.String()) {
		t.Errorf("exit %d: %s%s", code, errs.String(), out.String())
	}
	if code := run(context.Background(), []string{"more"}, io.Discard, io.Discard); code != 2 {
		t.Errorf("with an argument: exit %d", code)
	}
}
