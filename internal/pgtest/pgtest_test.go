package pgtest_test

import (
	"testing"

	"github.com/pawl-go/pawl/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestPool(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	var n int
	if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM pglock.leases").Scan(&n); err != nil || n != 0 {
		t.Fatal(n, err)
	}
}
