package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// A lease ends by its token or by force, and who held it is shown whatever becomes
// of it (C07).
func TestRelease_C07_Lease(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	client := pglock.New(pgtest.PoolOn(t, dsn), pglock.WithOwner("stuck/1/worker"))
	t.Cleanup(func() { _ = client.Close(t.Context()) }) // the database goes too
	acquire := func(name string) *pglock.Lease {
		t.Helper()
		l, err := client.Acquire(t.Context(), name, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	l := acquire("stuck")
	for _, tt := range []struct {
		args     []string
		code     int
		released bool
	}{
		{nil, exitUsage, false},
		{[]string{"--token", fmt.Sprint(l.Token() + 1)}, exitLost, false},
		{[]string{"--token", "-1"}, exitUsage, false},
		{[]string{"--token", fmt.Sprint(l.Token()), "--force"}, exitUsage, false},
		{[]string{"--token", fmt.Sprint(l.Token())}, 0, true},
		{[]string{"--token", fmt.Sprint(l.Token())}, exitLost, false},
	} {
		got := do(t, dsn, append([]string{"release", "stuck", "-o", "json"}, tt.args...)...)
		if got.code != tt.code || got.code != 0 && got.stderr == "" {
			t.Errorf("%v: %+v, want %d", tt.args, got, tt.code)
		}
		var h held
		if got.stdout != "" {
			if err := json.Unmarshal([]byte(got.stdout), &h); err != nil || h.Owner != "stuck/1/worker" || h.Token != l.Token() {
				t.Errorf("%v: it shows %q (%v)", tt.args, got.stdout, err)
			}
		}
		if h.Released != tt.released {
			t.Errorf("%v: %+v", tt.args, got)
		}
	}
	if err := l.Release(t.Context()); !errors.Is(err, pglock.ErrLost) {
		t.Errorf("its holder is told %v", err)
	}
	acquire("any")
	if got := do(t, dsn, "release", "any", "--force"); got.code != 0 || !strings.Contains(got.stdout, "stuck/1/worker") || !strings.Contains(got.stdout, "released") {
		t.Errorf("%+v", got)
	}
}

// A lease whose holder is writing is waited for, which it says, and then who is in
// the way (C08).
func TestRelease_C08_Guarded(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, dsn)
	client := pglock.New(pool)
	t.Cleanup(func() { _ = client.Close(t.Context()) }) // the database goes too
	l, err := client.Acquire(t.Context(), "guarded", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }() // ends the guard
	if err := l.Guard(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	got := do(t, dsn, "release", "guarded", "--force")
	if got.code != exitBusy || !strings.Contains(got.stderr, "waiting up to 5s") ||
		!strings.Contains(got.stderr, fmt.Sprint(tx.Conn().PgConn().PID())) {
		t.Errorf("%+v", got)
	}
}

// For an advisory lock of that name, of a session and of a transaction, it says
// which backend to end (C07).
func TestRelease_C07_Advisory(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pool := pgtest.PoolOn(t, pgtest.With(t, dsn, "application_name", "advisor"))
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }() // frees it
	if err := pglock.LockTx(t.Context(), tx, pglock.KeyOf("of a transaction")); err != nil {
		t.Fatal(err)
	}
	session, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer session.Release()
	if _, err := session.Exec(t.Context(), `SELECT pg_advisory_lock($1)`, pglock.KeyOf("of a session").Int64()); err != nil {
		t.Fatal(err)
	}
	for name, pid := range map[string]uint32{"of a transaction": tx.Conn().PgConn().PID(), "of a session": session.Conn().PgConn().PID()} {
		got := do(t, dsn, "release", name, "--force")
		if got.code != exitBusy || !strings.Contains(got.stderr, fmt.Sprintf("pg_terminate_backend(%d)", pid)) || !strings.Contains(got.stderr, "advisor") {
			t.Errorf("%s: %+v, want backend %d", name, got, pid)
		}
	}
}
