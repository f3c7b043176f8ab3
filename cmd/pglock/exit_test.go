package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// Each code means one thing, whichever verb it comes from, and every error says
// what is wrong on standard error and nothing on standard output.
func TestExitCodes(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	wire := pgtest.Proxy(t, dsn)
	wire.Silence()
	client := pglock.New(pgtest.PoolOn(t, dsn), pglock.WithOwner("the holder"))
	t.Cleanup(func() { _ = client.Close(t.Context()) }) // the database goes anyway
	l, err := client.Acquire(t.Context(), "held", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	script := filepath.Join(t.TempDir(), "unstartable")
	if err := os.WriteFile(script, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		dsn  string
		args string
		code int
		says string
	}{
		{dsn, "run free -- true", 0, ""},
		{dsn, "run free -- sh -c exit\\ 3", 3, ""},
		{dsn, "run free -- false", 1, ""},
		{dsn, "run free -- sh -c kill\\ -9\\ $$", 128 + 9, ""},
		{dsn, "run held --try -- true", 75, `held by "the holder" with token`},
		{dsn, "run held -n -- true", 75, `held by "the holder" with token`},
		{dsn, "run held --wait 500ms -- true", 75, `pglock: gave up after 500ms: lease "held" is held by "the holder" with token`},
		{dsn, "run held --wait 1ns -- true", 69, "gave up after 1ns: "},
		{dsn, "run held -- no-such-command", 127, "no-such-command"}, // and doesn't wait
		{dsn, "run held -- ./no-such-command", 127, "no-such-command"},
		{dsn, "run held -- " + script, 126, "permission denied"},
		{dsn, "run held true", 64, "after --"},
		{dsn, "run -- true", 64, "one NAME"},
		{dsn, "run a b -- true", 64, "one NAME"},
		{dsn, "run held --", 64, "after --"},
		{dsn, "run held --try --wait 1s -- true", 64, "one of them"},
		{dsn, "run held --wait 0s -- true", 64, "--try"},
		{dsn, "run held --ttl 99ms -- true", 64, "100ms to 24h"},
		{dsn, "run held --ttl soon -- true", 64, "soon"},
		{dsn, "run held -o xml -- true", 64, "text or json"},
		{dsn, "release held", 64, fmt.Sprintf("--token %d", l.Token())},
		{dsn, "release held --token 999999", 76, "token 999999"},
		{dsn, "release free --force", 76, "nobody"},
		{dsn, "migrate", 64, "up, down, status, sql"},
		{dsn, "migrate sideways", 64, "sideways"},
		{dsn, "fly", 64, "fly"},
		{dsn, "key", 64, "1 arg"},
		{"postgres://%zz", "migrate status", 64, "postgres://user"},
		{pgtest.EmptyDSN(t), "run free -- true", 78, "migrate up"},
		{pgtest.EmptyDSN(t), "release free --force", 78, "migrate up"},
		{pgtest.EmptyDSN(t), "migrate status", 78, ""},
		{"postgres://nobody@127.0.0.1:1/nowhere", "run free -- true", 69, "connection refused"},
		{"postgres://nobody@127.0.0.1:1/nowhere", "migrate up", 69, "connection refused"},
		{pgtest.With(t, dsn, "dbname", "nowhere"), "release free --force", 69, "nowhere"},
		{wire.DSN(), "run free -- true", 69, "within 2s"},
		{wire.DSN(), "release held --force", 69, "within 2s"},
		{wire.DSN(), "migrate status", 69, "within 2s"},
	} {
		t.Run(tt.args, func(t *testing.T) {
			t.Parallel()
			args := strings.Fields(strings.ReplaceAll(tt.args, `\ `, "\x00"))
			for i := range args {
				args[i] = strings.ReplaceAll(args[i], "\x00", " ")
			}
			begun := time.Now()
			got := do(t, tt.dsn, args...)
			if got.code != tt.code || !strings.Contains(got.stderr, tt.says) || tt.says == "" && got.stderr != "" {
				t.Errorf("it exits with %d and says %q; want %d and %q", got.code, got.stderr, tt.code, tt.says)
			}
			if took := time.Since(begun); tt.code == exitUnreachable && took > 20*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
}
