package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// programCommand, first, makes the test binary the whole program: for tests
// that need a process of its own, to be signalled and killed.
const programCommand = "program"

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == childCommand {
		main()
	}
	if len(os.Args) > 1 && os.Args[1] == programCommand {
		os.Exit(run(context.Background(), os.Args[2:], os.Stdout, os.Stderr))
	}
	pgtest.Main(m)
}

// demo runs the program with few withdrawals, and a TTL that a busy machine
// keeps up with.
func demo(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	args = append([]string{"-workers=4", "-ops=10", "-think=5ms", "-ttl=1s"}, args...)
	code = run(t.Context(), args, &out, &err)
	return code, out.String(), err.String()
}

// objects decodes what -json printed: one object a line and nothing else.
func objects(t *testing.T, stdout string) []map[string]any {
	t.Helper()
	var all []map[string]any
	for line := range strings.Lines(stdout) {
		var o map[string]any
		if err := json.Unmarshal([]byte(line), &o); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		all = append(all, o)
	}
	return all
}

func TestJSON(t *testing.T) {
	t.Parallel()
	code, stdout, stderr := demo(t, "-json", "-dsn="+pgtest.EmptyDSN(t))
	if code != 0 || stderr != "" {
		t.Fatalf("exit %d, standard error %q", code, stderr)
	}
	got := objects(t, stdout)
	if len(got) != len(names()) {
		t.Fatalf("%d objects, want one for each of %v:\n%s", len(got), names(), stdout)
	}
	for i, name := range []string{"none", "row", "advisory", "lease", "optimistic"} {
		o := got[i]
		wantKeys(t, o, "strategy", "expected", "actual", "lost", "retries", "elapsed_ms")
		lost := o["actual"].(float64) - o["expected"].(float64)
		if o["strategy"] != name || o["expected"] != 960.0 || o["lost"] != lost || (lost > 0) != (name == "none") {
			t.Errorf("%v", o)
		}
	}
	a, b := got[5], got[6]
	for _, o := range []map[string]any{a, b} {
		wantKeys(t, o, "story", "tokens", "stale_write_accepted", "balance", "expected", "began", "events")
		if tokens := o["tokens"].([]any); len(tokens) != 2 || tokens[0].(float64) >= tokens[1].(float64) {
			t.Errorf("tokens %v don't go up", tokens)
		}
	}
	if a["story"] != "unfenced" || a["stale_write_accepted"] != true || a["balance"] != 900.0 || a["expected"] != 700.0 {
		t.Errorf("%v", a)
	}
	if b["story"] != "fenced" || b["stale_write_accepted"] != false || b["balance"] != 800.0 || b["expected"] != 800.0 {
		t.Errorf("%v", b)
	}
}

func wantKeys(t *testing.T, o map[string]any, keys ...string) {
	t.Helper()
	for _, key := range keys {
		if _, ok := o[key]; !ok {
			t.Errorf("%v has no %q", o, key)
		}
	}
	if len(o) != len(keys) {
		t.Errorf("%v has other keys than %v", o, keys)
	}
}

// The strategies and the stories say of themselves that they fail, in a
// database in which they must.
func TestExit(t *testing.T) {
	t.Parallel()
	// A trigger that lets no withdrawal through, on the table that the program
	// is about to make.
	const vanish = `
		CREATE FUNCTION public.vanish() RETURNS trigger LANGUAGE plpgsql AS
			'BEGIN IF NEW.balance % 1000 <> 0 THEN NEW.balance := OLD.balance; END IF; RETURN NEW; END';
		CREATE FUNCTION public.spoil() RETURNS event_trigger LANGUAGE plpgsql AS $$
		DECLARE made record;
		BEGIN
			FOR made IN SELECT object_identity FROM pg_event_trigger_ddl_commands()
				WHERE object_identity LIKE 'lostupdate%.accounts' AND object_type = 'table'
			LOOP
				EXECUTE 'CREATE TRIGGER vanish BEFORE UPDATE ON ' || made.object_identity
					|| ' FOR EACH ROW EXECUTE FUNCTION public.vanish()';
			END LOOP;
		END $$;
		CREATE EVENT TRIGGER spoil ON ddl_command_end WHEN TAG IN ('CREATE TABLE') EXECUTE FUNCTION public.spoil()`
	// A fence that refuses nobody.
	const open = `CREATE OR REPLACE FUNCTION pglock.fence(resource text, token bigint) RETURNS void LANGUAGE sql AS ''`
	tests := []struct {
		name, sabotage string
		args           []string
		code           int
		stderr         string
	}{
		{"a lock that loses", vanish, []string{"-only=row"}, 1, "row: 40 of 40 withdrawals were lost"},
		{"a lock that loses among others", vanish, []string{"-only=none,optimistic"}, 1, "optimistic: 40 of 40 withdrawals were lost"},
		{"a fence that lets pass", open, []string{"-only=fenced"}, 1, "fenced: the stale write was accepted in spite of the fence"},
		{"without that story", open, []string{"-only=unfenced"}, 0, ""},
		{"nobody to lose to", "", []string{"-only=none", "-workers=1"}, 0, ""},
		{"a single withdrawal", "", []string{"-only=row,lease", "-workers=1", "-ops=1"}, 0, ""},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.DSN(t)
			if test.sabotage != "" {
				execute(t, dsn, test.sabotage)
			}
			code, stdout, stderr := demo(t, append(test.args, "-dsn="+dsn)...)
			if code != test.code || !strings.Contains(stderr, test.stderr) || (stderr == "") != (test.stderr == "") {
				t.Errorf("exit %d, want %d with %q\n%s%s", code, test.code, test.stderr, stdout, stderr)
			}
		})
	}
}
