package optimistic_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/optimistic"
)

const clockDefault = `DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint`

// aspects lists what Verify found wrong, and what it advises.
func aspects(t *testing.T, err error) (wrong, advice []string) {
	t.Helper()
	var schema *optimistic.SchemaError
	if err != nil && !errors.As(err, &schema) {
		t.Fatal(err)
	}
	if schema != nil {
		for _, f := range schema.Findings {
			if f.Advice {
				advice = append(advice, f.Aspect)
			} else {
				wrong = append(wrong, f.Aspect)
			}
		}
	}
	if errors.Is(err, optimistic.ErrSchema) != (wrong != nil) {
		t.Errorf("wrong is %v, and the error is %v", wrong, err)
	}
	slices.Sort(wrong)
	slices.Sort(advice)
	return slices.Compact(wrong), slices.Compact(advice)
}

func TestVerify(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	for _, c := range []struct {
		name, sql     string
		opts          []optimistic.Option
		wrong, advice []string
	}{
		{"right", `CREATE TABLE t (id bigint PRIMARY KEY, balance bigint, version bigint NOT NULL ` + clockDefault + `);
			SELECT pglock.guard_version('t')`, nil, nil, nil},
		{"all wrong at once", `CREATE TABLE t (id bigint, balance bigint, version int DEFAULT 1);
			ALTER TABLE t ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY; CREATE TABLE child () INHERITS (t)`, nil,
			[]string{"inheritance", "null", "type", "unique key"}, []string{"default", "guard", "null", "row security"}},
		{"missing", `SELECT`, nil, []string{"table"}, nil},
		{"a view", `CREATE VIEW t AS SELECT 1::bigint AS id, 1::bigint AS balance, 1::bigint AS version`, nil, []string{"null", "table"}, []string{"default", "null"}},
		{"columns missing", `CREATE TABLE t (id int PRIMARY KEY)`, nil, []string{"column"}, []string{"guard"}},
		{"no default", `CREATE TABLE t (id bigint PRIMARY KEY, balance bigint, version bigint NOT NULL)`, nil, nil, []string{"default", "guard"}},
		{"guard disabled", `CREATE TABLE t (id bigint PRIMARY KEY, balance bigint, version bigint NOT NULL ` + clockDefault + `);
			SELECT pglock.guard_version('t'); ALTER TABLE t DISABLE TRIGGER pglock_guard_version`, nil, nil, []string{"guard"}},
		{"deferrable key", `CREATE TABLE t (id bigint PRIMARY KEY DEFERRABLE, balance bigint, version bigint NOT NULL ` + clockDefault + `);
			SELECT pglock.guard_version('t')`, nil, []string{"unique key"}, nil},
		{"partial key", `CREATE TABLE t (id bigint NOT NULL, balance bigint, gone bool, version bigint NOT NULL ` + clockDefault + `);
			CREATE UNIQUE INDEX ON t (id) WHERE NOT gone; SELECT pglock.guard_version('t')`, nil, []string{"unique key"}, nil},
		{"partial key for live rows", `CREATE TABLE t (id bigint NOT NULL, balance bigint, gone bool, version bigint NOT NULL ` + clockDefault + `);
			CREATE UNIQUE INDEX ON t (id) WHERE NOT gone; SELECT pglock.guard_version('t')`, []optimistic.Option{optimistic.WithLive("NOT gone")}, nil, nil},
		{"partitioned, key too short", `CREATE TABLE t (id bigint NOT NULL, balance bigint, day int NOT NULL, version bigint NOT NULL ` + clockDefault + `, PRIMARY KEY (day, id))
			PARTITION BY LIST (day); SELECT pglock.guard_version('t')`, nil, []string{"partitioned", "unique key"}, nil},
		{"partitioned", `CREATE TABLE t (id bigint NOT NULL, balance bigint, day int NOT NULL, version bigint NOT NULL ` + clockDefault + `, PRIMARY KEY (day, id))
			PARTITION BY LIST (day); SELECT pglock.guard_version('t')`, []optimistic.Option{optimistic.WithKey("id", "day")}, nil, nil},
		{"generated", `CREATE TABLE t (id bigint PRIMARY KEY, balance bigint GENERATED ALWAYS AS (id * 2) STORED, version bigint NOT NULL ` + clockDefault + `);
			SELECT pglock.guard_version('t')`, nil, []string{"column"}, nil},
	} {
		// A superuser is under no policy: a role that is.
		tx := begin(t, pool, "")
		exec(t, tx, `CREATE ROLE verify_owner; GRANT verify_owner TO CURRENT_USER; CREATE SCHEMA s AUTHORIZATION verify_owner;
			GRANT USAGE ON SCHEMA pglock TO verify_owner; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA pglock TO verify_owner;
			SET LOCAL ROLE verify_owner; SET LOCAL search_path = s`)
		exec(t, tx, c.sql)
		wrong, advice := aspects(t, optimistic.NewTable[account]("t", c.opts...).Verify(t.Context(), tx))
		if diff := cmp.Diff(c.wrong, wrong); diff != "" {
			t.Errorf("%s: wrong: %s", c.name, diff)
		}
		if diff := cmp.Diff(c.advice, advice); diff != "" {
			t.Errorf("%s: advice: %s", c.name, diff)
		}
		usable(t, tx)
		want(t, tx.Rollback(t.Context()), nil)
	}
}
