//go:build unix

package pglock_test

import (
	"context"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgserver"
	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/migrations"
	"github.com/pawl-go/pawl/pglock"
)

// standby is a streaming copy of a server.
type standby struct {
	dsn  string // of the database postgres
	stop func() error
}

// newStandby copies a server and has the copy follow it.
func newStandby(t *testing.T, primary *pgserver.Server, name string) *standby {
	t.Helper()
	basebackup := pgtest.Client(t, "pg_basebackup", primary.DSN())
	home, remove, err := pgserver.Folder(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = remove() })
	dir := filepath.Join(home, name)
	out, err := osexec.CommandContext(t.Context(), basebackup, "-d", primary.DSN(), "-D", dir, "-R", "-X", "stream", "-c", "fast").CombinedOutput()
	if err != nil {
		t.Fatalf("pg_basebackup: %v\n%s", err, out)
	}
	owner, err := os.Stat(home)
	if err != nil {
		t.Fatal(err)
	}
	if err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if stat, ok := owner.Sys().(*syscall.Stat_t); ok && err == nil {
			err = os.Lchown(path, int(stat.Uid), int(stat.Gid))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	at, err := url.Parse(primary.DSN())
	if err != nil {
		t.Fatal(err)
	}
	port := freePort(t)
	at.Host = fmt.Sprintf("127.0.0.1:%d", port)
	cmd := osexec.Command(filepath.Join(primary.BinDir(), "postgres"), "-D", dir, "-p", fmt.Sprint(port), "-k", home)
	stop, err := pgserver.Companion(cmd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stop() })
	s := &standby{dsn: at.String(), stop: stop}
	connects(t, s.dsn)
	return s
}

// connects waits until a server lets somebody in.
func connects(t *testing.T, dsn string) {
	t.Helper()
	var err error
	for end := time.Now().Add(limit); time.Now().Before(end); {
		var pool *pgxpool.Pool
		if pool, err = pgxpool.New(t.Context(), dsn); err == nil {
			err = pool.Ping(t.Context())
			pool.Close()
			if err == nil {
				return
			}
		}
	}
	t.Fatalf("no connection to %s: %v", dsn, err)
}

// database is the DSN of another database of the same server.
func database(t *testing.T, dsn, name string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/" + name
	return u.String()
}

// cut ends the copying: what the primary does from now on is lost to it.
func (s *standby) cut(t *testing.T) {
	t.Helper()
	pool := pgtest.PoolOn(t, s.dsn)
	exec(t, pool, `ALTER SYSTEM SET primary_conninfo = ''`)
	exec(t, pool, `SELECT pg_reload_conf()`)
	until(t, pool, "the end of streaming", `SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)`)
}

func (s *standby) promote(t *testing.T) {
	t.Helper()
	pool := pgtest.PoolOn(t, s.dsn)
	exec(t, pool, `SELECT pg_promote()`)
	until(t, pool, "the promotion", `SELECT NOT pg_is_in_recovery()`)
}

// grants has a client acquire and release so many times, and returns the last
// token.
func grants(t *testing.T, dsn string, n int) pglock.Token {
	t.Helper()
	c := newClient(t, pgtest.PoolOn(t, dsn))
	var last pglock.Token
	for range n {
		l := acquire(t, c, "failover", time.Minute)
		if l.Token() <= last {
			t.Fatalf("token %d after %d on one server", l.Token(), last)
		}
		last = l.Token()
		if err := l.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	return last
}

// After an asynchronous failover the next token is above every one that was
// ever granted, by the old primary past the cut too; and so again when a second
// standby, which knows nothing of the first one's time, is promoted after it.
// Beside it the same with the timeline check removed.
func TestLease_L1_TokensRiseAcrossFailovers(t *testing.T) {
	t.Parallel()
	primary := pgtest.Server(t, pgserver.Fast(), pgserver.With("wal_level", "replica"), pgserver.With("max_wal_senders", "8"))
	admin := pgtest.PoolOn(t, primary.DSN())
	names := []string{"checked", "unchecked"}
	for _, name := range names {
		exec(t, admin, `CREATE DATABASE `+name)
		pool := pgtest.PoolOn(t, database(t, primary.DSN(), name))
		if err := migrations.Up(t.Context(), pool); err != nil {
			t.Fatal(err)
		}
		if name == "unchecked" {
			exec(t, pool, `CREATE OR REPLACE FUNCTION pglock.timeline() RETURNS text LANGUAGE sql AS $$ SELECT timeline FROM pglock.epoch $$`)
		}
		grants(t, database(t, primary.DSN(), name), 5)
		pool.Close()
	}
	first, second := newStandby(t, primary, "first"), newStandby(t, primary, "second")
	for _, s := range []*standby{first, second} {
		until(t, pgtest.PoolOn(t, s.dsn), "the standby catch up", `SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn`,
			one[string](t, admin, `SELECT pg_current_wal_lsn()::text`))
		s.cut(t)
	}
	highest := map[string]pglock.Token{}
	rose := map[string]bool{"checked": true, "unchecked": true}
	past := func(dsn string) {
		for _, name := range names {
			last := grants(t, database(t, dsn, name), 1)
			t.Logf("%s: %d after %d", name, last, highest[name])
			rose[name] = rose[name] && last > highest[name]
			highest[name] = max(highest[name], grants(t, database(t, dsn, name), 79))
		}
	}
	past(primary.DSN())
	if err := primary.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	first.promote(t)
	past(first.dsn)
	if err := first.stop(); err != nil && !strings.Contains(err.Error(), "signal") {
		t.Fatal(err)
	}
	second.promote(t)
	past(second.dsn)
	if !rose["checked"] {
		t.Error("a token came back after a failover")
	}
	if rose["unchecked"] {
		t.Error("without the timeline check no token came back: this test shows nothing")
	}
}

// A copy of the database elsewhere goes on above the original's tokens, and a
// sequence that was set back is noticed and can be moved ahead.
func TestLease_L1_TokenRegression(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `SELECT setval('pglock.leases_token_seq', 1000)`)
	c := newClient(t, pool)
	last := acquire(t, c, "set back", time.Minute)
	if err := last.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `SELECT setval('pglock.leases_token_seq', 1)`)
	if l, err := c.TryAcquire(context.Background(), "set back", time.Minute); sqlState(err) != "PW003" {
		t.Fatalf("with the sequence set back: %v, %v", l, err)
	}
	exec(t, pool, `SELECT pglock.new_epoch()`)
	if l := acquire(t, c, "set back", time.Minute); l.Token() <= last.Token() {
		t.Errorf("token %d after %d", l.Token(), last.Token())
	}

	highest := one[int64](t, pool, `SELECT last_value FROM pglock.leases_token_seq`)
	exec(t, pool, `SELECT setval('pglock.leases_token_seq', 1); UPDATE pglock.epoch SET system_identifier = 1`)
	if l := acquire(t, newClient(t, reopen(t, pool)), "copied", time.Minute); int64(l.Token()) <= highest {
		t.Errorf("token %d in a copy whose original had reached %d", l.Token(), highest)
	}
}

// freePort returns a port that was free a moment ago.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port
}
