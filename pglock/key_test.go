package pglock_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// The numbers were computed outside Go, and the server computes them again by
// the SQL in KeyOf's documentation: any change of the hash breaks the exclusion
// between versions of this package.
func TestKeyOf_Golden(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	old := newConn(t, pool)
	exec(t, old, `SET standard_conforming_strings = off`)
	for name, want := range map[string]int64{
		"accounts/42":             -4014232167637206034,
		"a":                       -4875054071294220079,
		"ключ":                    8820773459545013544,
		"🔒":                       281161724523611624,
		" ":                       -1870731592609695472,
		strings.Repeat("x", 1024): -9064930190426860752,
	} {
		if got := pglock.KeyOf(name).Int64(); got != want {
			t.Errorf("KeyOf(%.20q) is %d, want %d", name, got, want)
		}
		const sql = `SELECT ('x' || encode(substr(sha256('pglock/v1\000'::bytea || convert_to($1, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint`
		if got := one[int64](t, pool, sql, name); got != want {
			t.Errorf("the server's key of %.20q is %d, want %d", name, got, want)
		}
		if got := one[int64](t, old, `SELECT pglock.advisory_key($1)`, name); got != want {
			t.Errorf("where backslashes escape, the server's key of %.20q is %d, want %d", name, got, want)
		}
		if got := one[int64](t, pool, `SELECT pglock.advisory_key($1)`, name); got != want {
			t.Errorf("the schema's key of %.20q is %d, want %d", name, got, want)
		}
	}
	for _, bad := range []string{`''`, `NULL`, `repeat('x', 1025)`} {
		if _, err := pool.Exec(t.Context(), `SELECT pglock.advisory_key(`+bad+`)`); sqlState(err) != "22023" {
			t.Errorf("the schema's key of %s: %v", bad, err)
		}
	}
	// A role with the grants that the README names may compute it, and one call
	// from SQL and one from Go lock the same.
	app := asRole(t, pool, `GRANT USAGE ON SCHEMA pglock TO ROLE; GRANT EXECUTE ON FUNCTION pglock.advisory_key TO ROLE`)
	exec(t, newConn(t, pool), `SELECT pg_advisory_lock($1)`, one[int64](t, app, `SELECT pglock.advisory_key('shared by all')`))
	if _, err := newClient(t, app).TryLock(t.Context(), pglock.KeyOf("shared by all")); !errors.Is(err, pglock.ErrLocked) {
		t.Errorf("beside a lock that SQL took: %v", err)
	}
}

func TestKey_String(t *testing.T) {
	t.Parallel()
	for want, key := range map[string]pglock.Key{
		"accounts/42":          pglock.KeyOf("accounts/42"),
		"accounts/42 (shared)": pglock.KeyOf("accounts/42").Shared(),
		"-7":                   pglock.KeyInt64(-7),
		"(-1, 2)":              pglock.KeyPair(-1, 2),
		"(1, -2) (shared)":     pglock.KeyPair(1, -2).Shared().Shared(),
		"invalid key":          {},
	} {
		if got := key.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	again := pglock.KeyOf("a")
	if pglock.KeyOf("a") != again || pglock.KeyOf("a") == pglock.KeyOf("b") {
		t.Error("keys don't compare by what they lock")
	}
}

// Every form of key is the one that PostgreSQL's own functions take, as pg_locks
// shows it, also in pgx's protocol modes without typed parameters.
func TestKey_InPgLocks(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	type row struct {
		Classid, Objid uint32
		Objsubid       int16
		Mode           string
	}
	high := uint32(1) << 31
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		config := pool.Config().ConnConfig.Copy()
		config.DefaultQueryExecMode = mode
		conn, err := pgx.ConnectConfig(t.Context(), config)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close(t.Context())
		for key, want := range map[pglock.Key]row{
			pglock.KeyInt64(math.MinInt64):            {high, 0, 1, "ExclusiveLock"},
			pglock.KeyInt64(-1).Shared():              {math.MaxUint32, math.MaxUint32, 1, "ShareLock"},
			pglock.KeyInt64(1<<32 + 5):                {1, 5, 1, "ExclusiveLock"},
			pglock.KeyPair(math.MinInt32, -1):         {high, math.MaxUint32, 2, "ExclusiveLock"},
			pglock.KeyPair(1, math.MaxInt32).Shared(): {1, math.MaxInt32, 2, "ShareLock"},
			pglock.KeyOf("a"):                         {3159905318, 3148851409, 1, "ExclusiveLock"},
		} {
			inTx(t, conn, pgx.ReadCommitted, func(tx pgx.Tx) {
				if err := pglock.LockTx(t.Context(), tx, key); err != nil {
					t.Fatal(err)
				}
				if err := pglock.TryLockTx(t.Context(), tx, key); err != nil {
					t.Errorf("again: %v", err)
				}
				rows, err := tx.Query(t.Context(), `SELECT DISTINCT classid, objid, objsubid, mode FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()`)
				if err != nil {
					t.Fatal(err)
				}
				got, err := pgx.CollectRows(rows, pgx.RowToStructByName[row])
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff([]row{want}, got); diff != "" {
					t.Errorf("%v in mode %v: %s", key, mode, diff)
				}
			})
		}
	}
}

// badKeys can't be locked, each for a reason that its error gives.
var badKeys = map[string]pglock.Key{
	"zero Key":   {},
	"empty":      pglock.KeyOf(""),
	"NUL":        pglock.KeyOf("a\x00b"),
	"UTF-8":      pglock.KeyOf("a\xff"),
	"1025 bytes": pglock.KeyOf(strings.Repeat("x", 1025)),
	`"a\xff"`:    pglock.KeyOf("a\xff").Shared(),
}

func TestKey_A20_Collisions(t *testing.T) {
	t.Parallel()
	numbers := make([]int64, scale(1_000_000, 100_000))
	for i := range numbers {
		numbers[i] = pglock.KeyOf(fmt.Sprintf("accounts/%d", i)).Int64()
	}
	names := len(numbers)
	slices.Sort(numbers)
	if distinct := len(slices.Compact(numbers)); distinct != names {
		t.Errorf("%d names have %d keys", names, distinct)
	}
}
