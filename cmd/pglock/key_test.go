package main

import (
	"encoding/json"
	"testing"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// What key shows is what pg_locks has, of negative numbers too (V04).
func TestKey_V04(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }() // frees them
	signs := map[bool]int{}
	for _, name := range []string{"accounts/42", "accounts/43", "accounts/44", "accounts/45", "\x1b[31mred\n", "ünï"} {
		var k advisoryKey
		got := do(t, "", "key", name, "-o", "json")
		if err := json.Unmarshal([]byte(got.stdout), &k); err != nil || got.code != 0 || k.Name != name {
			t.Fatalf("%v %+v", err, got)
		}
		if err := pglock.LockTx(t.Context(), tx, pglock.KeyOf(name)); err != nil {
			t.Fatal(err)
		}
		var n int
		err := tx.QueryRow(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()
			AND classid = $1::oid AND objid = $2::oid AND objsubid = $3 AND (classid::bigint << 32 | objid::bigint) = $4`,
			k.Class, k.Object, k.Sub, k.Bigint).Scan(&n)
		if err != nil || n != 1 {
			t.Errorf("%q: pg_locks has %d of %+v (%v)", name, n, k, err)
		}
		signs[k.Bigint < 0]++
	}
	if len(signs) != 2 {
		t.Error("all numbers have one sign: choose other names")
	}
	if got := do(t, "", "key", ""); got.code != exitUsage {
		t.Errorf("%+v", got)
	}
}

func TestKey_Text(t *testing.T) {
	t.Parallel()
	const want = "" +
		"NAME                      BIGINT    CLASSID       OBJID  OBJSUBID\n" +
		"a\\x1b[0m\\tb  1783191993314093710  415181739  2412685966         1\n"
	if got := do(t, "", "key", "a\x1b[0m\tb"); got.stdout != want {
		t.Errorf("%s, want\n%s", got.stdout, want)
	}
}
