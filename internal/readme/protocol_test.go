package readme

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// shell is a folder with the scripts of docs/protocol.md, and a database with a
// protected table.
type shell struct {
	t    *testing.T
	dir  string
	env  []string
	pool *pgxpool.Pool
}

// newShell takes the scripts from the page, with other words in the place of
// some of theirs.
func newShell(t *testing.T, replace ...string) *shell {
	t.Helper()
	if _, err := exec.LookPath("sh"); err != nil {
		pgtest.Require(t, "sh", err)
	}
	page, err := os.ReadFile(filepath.Join(root, "docs", "protocol.md"))
	if err != nil {
		t.Fatal(err)
	}
	dsn := pgtest.DSN(t)
	s := &shell{t: t, dir: t.TempDir(), pool: pgtest.PoolOn(t, dsn)}
	s.env = append(os.Environ(), "DSN="+dsn,
		"PATH="+filepath.Dir(pgtest.Client(t, "psql", dsn))+string(os.PathListSeparator)+os.Getenv("PATH"))
	code, _ := blocks(string(page))
	found := 0
	for _, b := range code {
		if name, ok := strings.CutPrefix(b.mark, "file "); ok {
			text := b.String()
			for i := 0; i < len(replace); i += 2 {
				text = strings.ReplaceAll(text, replace[i], replace[i+1])
			}
			s.write(name, text)
			found++
		}
	}
	if found != 2 {
		t.Fatalf("docs/protocol.md has %d scripts, want withlease and withdraw", found)
	}
	s.exec(`CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL)`)
	s.exec(`INSERT INTO accounts VALUES (42, 100)`)
	s.exec(`SELECT pglock.protect('accounts', 'accounts/%')`)
	return s
}

func (s *shell) write(name, text string) {
	s.t.Helper()
	if err := os.WriteFile(filepath.Join(s.dir, name), []byte(text+"\n"), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

func (s *shell) exec(sql string, args ...any) {
	s.t.Helper()
	if _, err := s.pool.Exec(s.t.Context(), sql, args...); err != nil {
		s.t.Fatalf("%s: %v", sql, err)
	}
}

// run runs a line of shell and returns its status and what it said.
func (s *shell) run(line string) (status int, said string) {
	s.t.Helper()
	cmd := exec.CommandContext(s.t.Context(), "sh", "-c", line)
	cmd.Dir, cmd.Env, cmd.WaitDelay = s.dir, s.env, time.Minute
	out, err := cmd.CombinedOutput()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		s.t.Errorf("%s: %v", line, err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

// state is the balance of the account, and how many leases are held.
func (s *shell) state() (balance, held int) {
	s.t.Helper()
	err := s.pool.QueryRow(s.t.Context(), `SELECT balance, (SELECT count(*) FROM pglock.list_leases()) FROM accounts`).Scan(&balance, &held)
	if err != nil {
		s.t.Fatal(err)
	}
	return balance, held
}

// A write under the lease is accepted, and one with a token that isn't held is
// not.
func TestProtocol_Write(t *testing.T) {
	t.Parallel()
	s := newShell(t)
	if status, said := s.run("sh withlease accounts/42 sh withdraw"); status != 0 {
		t.Fatalf("status %d: %s", status, said)
	}
	if balance, held := s.state(); balance != 90 || held != 0 {
		t.Errorf("the balance is %d, %d leases are held", balance, held)
	}
	if status, said := s.run("LEASE=accounts/42 TOKEN=1 sh withdraw"); status != 3 || !strings.Contains(said, "is not held") {
		t.Errorf("after the release: status %d: %s", status, said)
	}
	if status, said := s.run("sh withlease orders/1 sh withdraw"); status != 3 || !strings.Contains(said, "no lease presented matches") {
		t.Errorf("under another lease: status %d: %s", status, said)
	}
	if balance, _ := s.state(); balance != 90 {
		t.Errorf("the balance is %d", balance)
	}
}

// Those who run under the lease don't meet, and without it they do.
func TestProtocol_Exclusion(t *testing.T) {
	t.Parallel()
	s := newShell(t)
	s.write("count", `n=$(cat counter); sleep ${NAP:-0.3}; echo $((n + 1)) >counter`)
	for line, want := range map[string]bool{"sh withlease counter sh count": true, "NAP=2 sh count": false} {
		s.write("counter", "0")
		const runs = 3
		var wg sync.WaitGroup
		for range runs {
			wg.Go(func() {
				if status, said := s.run(line); status != 0 {
					t.Errorf("status %d: %s", status, said)
				}
			})
		}
		wg.Wait()
		text, err := os.ReadFile(filepath.Join(s.dir, "counter"))
		if err != nil {
			t.Fatal(err)
		}
		n, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil || (n == runs) != want {
			t.Errorf("%s: %d of %d counted, %v", line, n, runs, err)
		}
	}
}

// A lease outlasts its TTL while it is renewed, and no longer.
func TestProtocol_Renewal(t *testing.T) {
	t.Parallel()
	for third, want := range map[string]int{"1": 0, "60": 3} {
		t.Run("each "+third+" s", func(t *testing.T) {
			t.Parallel()
			s := newShell(t, "ttl=6 third=2", "ttl=3 third="+third)
			status, said := s.run(`sh withlease accounts/42 sh -c 'sleep 5; sh withdraw' 2>said; s=$?; cat said; exit $s`)
			if status != want || (want != 0) != strings.Contains(said, "is not held") {
				t.Errorf("status %d, want %d: %s", status, want, said)
			}
		})
	}
}

// A command whose lease is taken from it is ended.
func TestProtocol_Loss(t *testing.T) {
	t.Parallel()
	s := newShell(t, "ttl=6 third=2", "ttl=30 third=0.2")
	done := make(chan string, 1)
	go func() {
		status, said := s.run("sh withlease accounts/42 sleep 60")
		done <- fmt.Sprintf("status %d: %s", status, said)
	}()
	for _, held := s.state(); held == 0; _, held = s.state() {
		select {
		case got := <-done:
			t.Fatalf("the command ended before it had the lease, with %s", got)
		case <-time.After(20 * time.Millisecond):
		}
	}
	s.exec(`SELECT pglock.force_release(name, token) FROM pglock.list_leases()`)
	if got := <-done; !strings.HasPrefix(got, "status 143:") {
		t.Errorf("the command ended with %s", got)
	}
}

// What the page says that each call answers, one call after the other. Claim 1
// takes token 1, claim 2 waits for it.
func TestProtocol_Answers(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	const one, two = `'00000000-0000-0000-0000-000000000001'`, `'00000000-0000-0000-0000-000000000002'`
	for i, tt := range []struct{ sql, want string }{
		{`SELECT granted || ' ' || token FROM pglock.acquire('{a}', '1 h', ` + one + `)`, "true 1"},
		{`SELECT granted || ' ' || token FROM pglock.acquire('{a}', '1 h', ` + one + `)`, "true 1"}, // its answer was lost
		{`SELECT granted || ' ' || token FROM pglock.acquire('{a}', '1 h')`, "false 1"},
		{`SELECT granted || ' ' || (ticket IS NOT NULL) FROM pglock.enqueue('a', '1 h', ` + two + `, 'nobody')`, "false true"},
		{`SELECT state FROM pglock.refresh('{a}', ARRAY[` + two + `::uuid])`, "waiting"},
		{`SELECT state FROM pglock.refresh('{a}', ARRAY[gen_random_uuid()])`, "gone"},
		{`SELECT state FROM pglock.renew('{a}', '{1}')`, "held"},
		{`SELECT pglock.guard('a', 1)::text`, ""},
		{`SELECT pglock.guard('a', 2)::text`, "PW002 taken"},
		{`SELECT pglock.fence('r', 17)::text`, ""},
		{`SELECT pglock.fence('r', 16)::text`, "PW001 presented"},
		{`SELECT state FROM pglock.release('{a}', '{1}')`, "released"},
		{`SELECT state FROM pglock.release('{a}', '{1}')`, "taken"}, // handed on
		{`SELECT state || ' ' || token FROM pglock.refresh('{a}', ARRAY[` + two + `::uuid])`, "granted 2"},
		{`SELECT state FROM pglock.renew('{a}', '{1}')`, "taken"},
		{`SELECT pglock.cancel('a', ` + two + `)::text`, ""},
		{`SELECT state FROM pglock.release('{a}', '{2}')`, "idle"}, // its answer was lost
		{`SELECT pglock.guard('a', 2)::text`, "PW002 idle"},
		{`SELECT name FROM pglock.acquire('{""}', '1 h')`, "22023 "},
		{`SELECT name FROM pglock.acquire('{a}', '1 ms')`, "22023 "},
	} {
		if got := answer(t, pool, pgx.TxOptions{}, tt.sql); !strings.HasPrefix(got, tt.want) || tt.want == "" && got != "" {
			t.Errorf("%d: %s answers %q, want %q", i, tt.sql, got, tt.want)
		}
	}
	higher := pgx.TxOptions{IsoLevel: pgx.RepeatableRead}
	if got := answer(t, pool, higher, `SELECT name FROM pglock.acquire('{a}', '1 h')`); !strings.HasPrefix(got, "25000") {
		t.Errorf("at REPEATABLE READ acquire answers %q", got)
	}
}

// answer is what a query answers, or the SQLSTATE of its refusal with the detail.
func answer(t *testing.T, pool *pgxpool.Pool, options pgx.TxOptions, sql string) (said string) {
	t.Helper()
	err := pgx.BeginTxFunc(t.Context(), pool, options, func(tx pgx.Tx) error {
		return tx.QueryRow(t.Context(), sql).Scan(&said)
	})
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok {
		return refused.Code + " " + refused.Detail
	}
	if err != nil {
		t.Errorf("%s: %v", sql, err)
	}
	return said
}
