package migrations_test

import (
	"context"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
)

// Who could take leases before this migration can compute keys after it, and
// nobody else.
func TestUp_AdvisoryKeyIsGranted(t *testing.T) {
	t.Parallel()
	pool := pgtest.PoolOn(t, pgtest.EmptyDSN(t))
	before := fstest.MapFS{}
	files, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if text, err := fs.ReadFile(migrations.FS, file); err != nil {
			t.Fatal(err)
		} else if file < "00011" {
			before[file] = &fstest.MapFile{Data: text}
		}
	}
	if err := migrations.UpFiles(t.Context(), pool, before); err != nil {
		t.Fatal(err)
	}
	suffix := strings.TrimPrefix(pool.Config().ConnConfig.Database, "pawl_") // roles are all the server's
	may, mayNot := "May "+suffix, "may_not_"+suffix
	do(t, pool, `CREATE ROLE "`+may+`"; CREATE ROLE `+mayNot)
	t.Cleanup(func() {
		if _, err := pool.Exec(context.Background(), `DROP OWNED BY "`+may+`", `+mayNot+`; DROP ROLE "`+may+`", `+mayNot); err != nil {
			t.Error(err)
		}
	})
	do(t, pool, `GRANT EXECUTE ON FUNCTION pglock.acquire TO "`+may+`"; GRANT EXECUTE ON FUNCTION pglock.release TO `+mayNot)
	if err := migrations.Up(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	for role, want := range map[string]bool{may: true, mayNot: false, "public": false} {
		if got := query[bool](t, pool, `SELECT has_function_privilege($1, 'pglock.advisory_key(text)', 'EXECUTE')`, role); got != want {
			t.Errorf("%s may: %t, want %t", role, got, want)
		}
	}
}
