package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pawl-go/pawl/internal/pgserver"
	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// holder is a session of another program that keeps what the statements lock.
func holder(t testing.TB, dsn, program string, statements ...string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), pgtest.With(t, dsn, "application_name", program))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.Background()) }) // the test may have ended it
	for _, sql := range statements {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	return conn
}

// background sends a statement that will wait for the rest of the test.
func background(t testing.TB, conn *pgx.Conn, sql string) {
	t.Helper()
	done := make(chan struct{})
	t.Cleanup(func() { <-done }) // by then the test's context has ended
	go func() {
		defer close(done)
		_, _ = conn.Exec(t.Context(), sql)
	}()
}

// listed is what ls -o json prints.
func listed(t *testing.T, dsn string, args ...string) (found struct {
	Leases    []map[string]any
	Locks     []map[string]any `json:"advisory_locks"`
	Protected []map[string]any `json:"protected_tables"`
	Unseen    []string
}) {
	t.Helper()
	o := do(t, dsn, append([]string{"ls", "-o", "json"}, args...)...)
	if err := json.Unmarshal([]byte(o.stdout), &found); err != nil || o.code != 0 {
		t.Fatalf("exit %d, %v\n%s\n%s", o.code, err, o.stdout, o.stderr)
	}
	return found
}

// TestList_V06_EachFieldOnce: no two fields are shown from one.
func TestList_V06_EachFieldOnce(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	apply(t, pool,
		`INSERT INTO pglock.leases (name, token, holder, role, claim, acquired_at, expires_at, ttl)
		 VALUES ('the name', 1234567, 'the owner', 'v06_lease', gen_random_uuid(), '2020-01-02 03:04:05Z', clock_timestamp() + interval '1000 s', '2000 s')`,
		`INSERT INTO pglock.waiters (ticket, name, claim, channel, holder, role, queued_at, expires_at, ttl)
		 VALUES (7654321, 'the name', gen_random_uuid(), 'c', 'the waiter', 'v06_waiter', '2020-02-03 04:05:06Z', '2020-03-04 05:06:07Z', '1 s')`,
		`CREATE TABLE parts (id int) PARTITION BY LIST (id)`, `SELECT pglock.protect('parts', 'the pattern/%')`, `CREATE TABLE gap PARTITION OF parts FOR VALUES IN (1)`)
	conn := holder(t, dsn, "the-program", `SELECT pg_advisory_lock_shared(70000, 80000)`)
	found := listed(t, dsn)
	if len(found.Leases) != 1 || len(found.Locks) != 1 || len(found.Protected) != 1 {
		t.Fatalf("%+v", found)
	}
	l, a, p := found.Leases[0], found.Locks[0], found.Protected[0]
	waiters, _ := l["waiters"].([]any)
	if len(waiters) != 1 {
		t.Fatalf("waiters: %v", l["waiters"])
	}
	w := waiters[0].(map[string]any)
	instant := func(v any) string {
		at, err := time.Parse(time.RFC3339Nano, fmt.Sprint(v))
		if err != nil {
			t.Errorf("%v", err)
		}
		return at.UTC().Format(time.DateTime)
	}
	for what, tt := range map[string]struct{ got, want any }{
		"lease name": {l["name"], "the name"}, "lease token": {l["token"], 1234567.0}, "lease owner": {l["owner"], "the owner"}, "lease role": {l["role"], "v06_lease"},
		"lease acquired": {instant(l["acquired_at"]), "2020-01-02 03:04:05"}, "lease ttl": {l["ttl_seconds"], 2000.0},
		"ticket": {w["ticket"], 7654321.0}, "waiter": {w["owner"], "the waiter"}, "waiter role": {w["role"], "v06_waiter"},
		"queued": {instant(w["queued_at"]), "2020-02-03 04:05:06"}, "ticket expires": {instant(w["expires_at"]), "2020-03-04 05:06:07"},
		"key": {a["key"], "(70000, 80000)"}, "classid": {a["classid"], 70000.0}, "objid": {a["objid"], 80000.0}, "objsubid": {a["objsubid"], 2.0},
		"shared": {a["shared"], true}, "granted": {a["granted"], true}, "pid": {a["pid"], float64(conn.PgConn().PID())}, "program": {a["program"], "the-program"},
		"lock role": {a["role"], "postgres"}, "host": {a["host"], "127.0.0.1"}, "state": {a["state"], "idle"},
		"table": {p["table"], "parts"}, "pattern": {p["pattern"], "the pattern/%"}, "enabled": {p["enabled"], true}, "gaps": {fmt.Sprint(p["gaps"]), "[gap]"},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: %v, want %v", what, tt.got, tt.want)
		}
	}
	if left, _ := l["remaining_seconds"].(float64); left > 1000 || left < 900 {
		t.Errorf("%v s left of 1000", left)
	}
	expires, _ := time.Parse(time.RFC3339Nano, fmt.Sprint(l["expires_at"]))
	if until := time.Until(expires); until > 1001*time.Second || until < 900*time.Second {
		t.Errorf("expires at %v", expires)
	}
	since, _ := time.Parse(time.RFC3339Nano, fmt.Sprint(a["since"]))
	if ago := time.Since(since); ago < 0 || ago > limit {
		t.Errorf("locked since %v", since)
	}
	text := do(t, dsn, "ls").stdout
	for _, once := range []string{"the name", "1234567", "the owner", "v06_lease", "the waiter", "v06_waiter", "(70000, 80000)", "shared", "the-program", "parts", "the pattern/%", "open: gap",
		fmt.Sprint(conn.PgConn().PID())} {
		if n := strings.Count(text, once); n != 1 {
			t.Errorf("%q stands there %d times\n%s", once, n, text)
		}
	}
}

// TestList_V04_KeysArePgLocks: what ls shows are the numbers in pg_locks, what key
// prints is what they were locked by, and negative keys are negative.
func TestList_V04_KeysArePgLocks(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	names := map[bool]string{}
	for i := 0; len(names) < 2; i++ {
		name := fmt.Sprint("accounts/", i)
		names[pglock.KeyOf(name).Int64() < 0] = name
	}
	conn := holder(t, dsn, "other")
	var want []string
	for _, name := range names {
		var key advisoryKey
		if err := json.Unmarshal([]byte(do(t, dsn, "key", name, "-o", "json").stdout), &key); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Exec(t.Context(), `SELECT pg_advisory_lock($1)`, key.Bigint); err != nil {
			t.Fatal(err)
		}
		want = append(want, fmt.Sprintf("%d %d %d %d %s", key.Class, key.Object, key.Sub, key.Bigint, name))
	}
	for _, sql := range []string{`SELECT pg_advisory_lock(-1)`, `SELECT pg_advisory_lock(-9223372036854775808)`, `SELECT pg_advisory_xact_lock(-3, -4)`} {
		if sql == `SELECT pg_advisory_xact_lock(-3, -4)` {
			sql = `BEGIN; ` + sql
		}
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	want = append(want, "4294967295 4294967295 1 -1 ", "2147483648 0 1 -9223372036854775808 ", "4294967293 4294967292 2 (-3, -4) ")
	rows, _ := conn.Query(t.Context(), `SELECT format('%s %s %s', classid, objid, objsubid) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()`)
	shown, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, l := range listed(t, dsn, names[true], names[false]).Locks { // named, and none of the others
		got = append(got, fmt.Sprintf("%.0f %.0f %.0f %v %v", l["classid"], l["objid"], l["objsubid"], l["key"], l["name"]))
	}
	if len(got) != 2 {
		t.Errorf("by their names: %v", got)
	}
	for _, l := range listed(t, dsn).Locks {
		if l["name"] == nil { // nobody said the names
			line := fmt.Sprintf("%.0f %.0f %.0f %v ", l["classid"], l["objid"], l["objsubid"], l["key"])
			if i := slices.IndexFunc(want, func(w string) bool { return strings.HasPrefix(w, line) }); i < 0 {
				t.Errorf("%s was locked by nobody", line)
			} else if !slices.Contains(got, want[i]) {
				got = append(got, line)
			}
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("ls shows\n%v, want\n%v", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for _, line := range shown {
		if !slices.ContainsFunc(got, func(g string) bool { return strings.HasPrefix(g, line+" ") }) {
			t.Errorf("pg_locks has %s, and ls does not", line)
		}
	}
}

// TestList_C07_WhoHoldsIt: of a lease, a session lock and a transaction's lock one
// sees which process or backend has it, where from and for how long, and of the
// latter two what ends them, which it does.
func TestList_C07_WhoHoldsIt(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	client := pglock.New(pool)
	defer client.Close(t.Context())
	if _, err := client.TryAcquire(t.Context(), "job", time.Hour); err != nil {
		t.Fatal(err)
	}
	session := holder(t, dsn, "sessions", `SELECT pg_advisory_lock(`+fmt.Sprint(pglock.KeyOf("job").Int64())+`)`)
	transaction := holder(t, dsn, "transactions", `BEGIN`, `SELECT pg_advisory_xact_lock(42)`)
	if o := do(t, dsn, "ls", "nothing of that name"); o.code != 0 || o.stdout != "no leases\nno advisory locks\n" {
		t.Errorf("of another name: %+v", o)
	}
	text := do(t, dsn, "ls").stdout
	for _, want := range []string{
		`(?m)^job +\d+ +\S+/\d+/\S+ +postgres +\d\S*s +(59m\d+s|1h0m)$`,
		fmt.Sprintf(`(?m)^%d +job +exclusive +%d +sessions +127\.0\.0\.1 +\d\S*s$`, pglock.KeyOf("job").Int64(), session.PgConn().PID()),
		fmt.Sprintf(`(?m)^42 +exclusive +%d +transactions +127\.0\.0\.1 +\d\S*s$`, transaction.PgConn().PID()),
		`SELECT pg_terminate_backend\(PID\)`,
	} {
		if !regexp.MustCompile(want).MatchString(text) {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
	apply(t, pool, fmt.Sprintf(`SELECT pg_terminate_backend(%d), pg_terminate_backend(%d)`, session.PgConn().PID(), transaction.PgConn().PID()))
	until(t, pool, "the locks gone", `SELECT NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory'
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))`)
	if left := listed(t, dsn); len(left.Locks) != 0 || len(left.Leases) != 1 {
		t.Errorf("%+v", left)
	}
}

// TestLook_C08_SomebodyHoldsEverything: what looks answers although a session has
// locked all there is, and says which.
func TestLook_C08_SomebodyHoldsEverything(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	apply(t, pool, `CREATE TABLE accounts (id int)`, `SELECT pglock.protect('accounts', 'accounts/%')`)
	conn := holder(t, dsn, "greedy", `BEGIN`, `LOCK TABLE pglock.leases, pglock.waiters, pglock.fences, pglock.epoch, pglock.goose_db_version, accounts`,
		`SELECT pg_advisory_lock(1)`)
	pid := conn.PgConn().PID()
	background(t, holder(t, dsn, "reader"), `SELECT pglock.list_leases()`) // the control: it waits
	until(t, pool, "a reader wait", `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid)))`, int32(pid))
	for _, tt := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"ls"}, exitBusy, fmt.Sprintf("locked by backend %d (greedy, for ", pid)},
		{[]string{"ls", "-o", "json"}, exitBusy, fmt.Sprintf("locked by backend %d (greedy, for ", pid)},
		{[]string{"doctor"}, exitDanger, fmt.Sprintf("backend %d", pid)},
		{[]string{"blocked"}, 0, fmt.Sprint(pid)},
		{[]string{"blocked", "-o", "json"}, 0, fmt.Sprintf(`"pid": %d`, pid)},
	} {
		began := time.Now()
		o := do(t, dsn, tt.args...)
		took := time.Since(began)
		if o.code != tt.code || !strings.Contains(strings.Join(strings.Fields(o.stdout), " "), tt.says) || took > 5*answerBound {
			t.Errorf("%v took %v, exit %d, want %d and %q\n%s%s", tt.args, took, o.code, tt.code, tt.says, o.stdout, o.stderr)
		}
		t.Logf("%v took %v", tt.args, took)
	}
	if text := do(t, dsn, "ls").stdout; !strings.Contains(text, "leases: not seen") || !regexp.MustCompile(`(?m)^1 +exclusive`).MatchString(text) {
		t.Errorf("beside the locked tables:\n%s", text)
	}
}

func TestList_Nothing(t *testing.T) {
	t.Parallel()
	if o := do(t, pgtest.DSN(t), "ls"); o.code != 0 || o.stdout != "no leases\nno advisory locks\nno protected tables\n" {
		t.Errorf("%+v", o)
	}
	if o := do(t, pgtest.DSN(t), "blocked"); o.code != 0 || o.stdout != "nobody waits for a lock\n" {
		t.Errorf("%+v", o)
	}
	empty := pgtest.EmptyDSN(t)
	holder(t, empty, "other", `SELECT pg_advisory_lock(7)`)
	if o := do(t, empty, "ls"); o.code != exitNoSchema || !strings.Contains(o.stdout, "migrate up") || !regexp.MustCompile(`(?m)^7 +exclusive`).MatchString(o.stdout) {
		t.Errorf("without the schema: %+v", o)
	}
}

// The tree has each waiter below the one in its way, with query and age.
func TestBlocked_Tree(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	apply(t, pool, `CREATE TABLE accounts AS SELECT 1 AS id`)
	pids := []uint32{holder(t, dsn, "first", `BEGIN`, `UPDATE accounts SET id = 2`).PgConn().PID()}
	for _, program := range []string{"second", "third"} {
		conn := holder(t, dsn, program)
		background(t, conn, `DELETE FROM accounts -- by `+program)
		until(t, pool, program, `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid)))`, int32(pids[len(pids)-1]))
		pids = append(pids, conn.PgConn().PID())
	}
	text := do(t, dsn, "blocked").stdout
	want := fmt.Sprintf(`(?s)^PID[^\n]+QUERY
%d +\S+ +idle in transaction +first +UPDATE accounts SET id = 2
└ %d +row \(0,1\) of accounts +\d\S*s +\d\S*s +active +second +DELETE FROM accounts -- by second
  └ %d +row \(0,1\) of accounts +\d\S*s +\d\S*s +active +third +DELETE FROM accounts -- by third
$`, pids[0], pids[1], pids[2])
	if !regexp.MustCompile(want).MatchString(text) {
		t.Errorf("%s\nwant %s", text, want)
	}
	var found []blockedBackend
	if err := json.Unmarshal([]byte(do(t, dsn, "blocked", "-o", "json").stdout), &found); err != nil || len(found) != 3 {
		t.Fatalf("%v, %+v", err, found)
	}
	if b := found[1]; b.Pid != int32(pids[2]) || !slices.Equal(b.BlockedBy, []int32{int32(pids[1])}) || b.Relation != "accounts" || b.Since == nil || b.TxSince == nil {
		t.Errorf("%+v", b)
	}
}

// TestLook_R04_TakesNoRowLocks: where transactions are read-only, in which the
// server refuses every row lock, what looks shows the same.
func TestLook_R04_TakesNoRowLocks(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	apply(t, pgtest.PoolOn(t, dsn), `SELECT pglock.acquire('{a}', '1 h')`)
	readOnly := pgtest.With(t, dsn, "default_transaction_read_only", "on")
	_, err := pgtest.PoolOn(t, readOnly).Exec(t.Context(), `SELECT FROM pglock.leases FOR KEY SHARE`)
	if pg, ok := errors.AsType[*pgconn.PgError](err); !ok || pg.Code != "25006" {
		t.Fatalf("a row lock says %v, so that the test shows nothing", err)
	}
	if found := listed(t, readOnly); len(found.Leases) != 1 || len(found.Unseen) != 0 {
		t.Errorf("%+v", found)
	}
	if o := do(t, readOnly, "blocked"); o.code != 0 {
		t.Errorf("%+v", o)
	}
	var found []finding
	o := do(t, readOnly, "doctor", "-o", "json")
	if err := json.Unmarshal([]byte(o.stdout), &found); err != nil || slices.ContainsFunc(found, func(f finding) bool { return f.Level == unseen }) {
		t.Errorf("%v %+v", err, o)
	}
}

// Behind a transaction that was prepared there is no backend, and it is shown all
// the same.
func TestBlocked_Prepared(t *testing.T) {
	t.Parallel()
	dsn := pgtest.Server(t, pgserver.With("max_prepared_transactions", "2")).DSN()
	pool := pgtest.PoolOn(t, dsn)
	apply(t, pool, `CREATE TABLE accounts AS SELECT 1 AS id`, `BEGIN; UPDATE accounts SET id = 2; PREPARE TRANSACTION 'forgotten'`)
	waiter := holder(t, dsn, "waiter")
	background(t, waiter, `DELETE FROM accounts`)
	until(t, pool, "the waiter", `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE 0 = ANY (pg_blocking_pids(pid)))`)
	text := do(t, dsn, "blocked").stdout
	if want := fmt.Sprintf(`(?m)^prepared\n└ %d +row \(0,1\) of accounts `, waiter.PgConn().PID()); !regexp.MustCompile(want).MatchString(text) {
		t.Errorf("%s\nwant %s", text, want)
	}
}
