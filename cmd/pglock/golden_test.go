package main

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/pawl-go/pawl/internal/pgtest"
)

var updateGolden = flag.Bool("update", false, "write testdata/*.golden anew, to be looked at")

// golden compares what a terminal showed with what was looked at.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *updateGolden {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s: go test -update writes it anew\n%s", path, diff)
	}
}

// pane is a terminal of 80 columns and 24 lines, of tmux's, which is the rig of
// that name.
type pane struct {
	t      *testing.T
	socket string
	pglock string
	env    []string
}

func newPane(t *testing.T, dsn string) *pane {
	t.Helper()
	_, err := exec.LookPath("tmux")
	pgtest.Require(t, "tmux", err)
	p := &pane{t: t, socket: filepath.Join(t.TempDir(), "tmux"), pglock: onPath(t)}
	p.env = append(os.Environ(), "DATABASE_URL="+dsn, "NO_COLOR=", "LC_ALL=C.UTF-8", "PS1=$ ")
	p.tmux("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", "sh")
	t.Cleanup(func() { p.tmux("kill-server") })
	return p
}

func (p *pane) tmux(args ...string) string {
	p.t.Helper()
	cmd := exec.Command("tmux", append([]string{"-u", "-S", p.socket}, args...)...)
	cmd.Env = p.env
	out, err := cmd.CombinedOutput()
	if err != nil {
		p.t.Fatalf("tmux %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// start types pglock and its arguments; the shell says done when it has ended.
func (p *pane) start(args string) {
	p.t.Helper()
	p.tmux("send-keys", "clear; '"+p.pglock+"' "+args+"; echo exit $?", "Enter")
}

// shows waits until the terminal shows all that, and returns it.
func (p *pane) shows(patterns ...string) string {
	p.t.Helper()
	var text string
	for end := time.Now().Add(limit); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		text = p.tmux("capture-pane", "-p")
		all := true
		for _, pattern := range patterns {
			all = all && regexp.MustCompile(pattern).MatchString(text)
		}
		if all {
			return strings.TrimRight(text, "\n") + "\n"
		}
	}
	p.t.Fatalf("never showed %q:\n%s", patterns, text)
	return ""
}

// mask hides what differs from run to run, and keeps the columns. pid is that of
// the only backend shown, if there is one.
func mask(text string, pid uint32) string {
	masks := [][2]string{
		{`(?m)^[#$] *\n`, ""}, // the shell's prompt
		{`(?m)^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC`, "YYYY-MM-DD hh:mm:ss UTC"},
		{`PostgreSQL \d+\.\d+( \([^)]*\))?`, "PostgreSQL VERSION"},
		{`give or take \S+`, "give or take SOME"},
		{`(?m) +(\d+m)?\d+(\.\d)?m?s$`, "    AGE"}, // of advisory locks, which no test can set back
		{`(?m)HOST +FOR$`, "HOST         FOR"},
	}
	if pid != 0 {
		digits := len(fmt.Sprint(pid))
		masks = append(masks,
			[2]string{fmt.Sprintf(`\b%d\b`, pid), "PPPPPPP"},
			[2]string{`( +PID  )`, strings.Repeat(" ", 7-digits) + "$1"})
	}
	for _, m := range masks {
		text = regexp.MustCompile(m[0]).ReplaceAllString(text, m[1])
	}
	return text
}

// scene has a bit of everything, with ages that stay the same for half a minute.
func scene(t *testing.T, dsn string) (pid uint32) {
	t.Helper()
	apply(t, pgtest.PoolOn(t, dsn), `CREATE TABLE accounts (id int)`, `SELECT pglock.protect('accounts', 'accounts/%')`,
		`CREATE TABLE events (id int) PARTITION BY LIST (id)`, `SELECT pglock.protect('events', 'events/%')`, `CREATE TABLE events_1 PARTITION OF events FOR VALUES IN (1)`,
		`INSERT INTO pglock.leases (name, token, holder, role, claim, acquired_at, expires_at, ttl) VALUES
			('accounts/42', 17, 'web-3/4711/shop', 'shop', gen_random_uuid(), clock_timestamp() - interval '2 h 10 min', clock_timestamp() + interval '5 h 30 min 50 s', '6 h'),
			('backup', 9, 'a-host-with-a-long-name.eu-west-1.example.com/31337/pg_dumpall', 'backup', gen_random_uuid(), clock_timestamp() - interval '3 d 4 h', clock_timestamp() - interval '1 d 5 h', '1 h')`,
		`INSERT INTO pglock.waiters (name, claim, channel, holder, role, queued_at, expires_at, ttl) VALUES
			('accounts/42', gen_random_uuid(), 'c', 'web-1/99/shop', 'shop', clock_timestamp() - interval '1 h 20 min', clock_timestamp() + interval '1 h', '1 h'),
			('accounts/42', gen_random_uuid(), 'c', 'web-2/123/shop', 'shop', clock_timestamp() - interval '1 h 5 min', clock_timestamp() + interval '1 h', '1 h')`)
	return holder(t, dsn, "worker", fmt.Sprintf(`SELECT pg_advisory_lock(%d), pg_advisory_lock(-42), pg_advisory_lock_shared(7, -8)`, keyOf("backup").Bigint)).PgConn().PID()
}

func TestGolden_List(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pid := scene(t, dsn)
	p := newPane(t, dsn)
	p.start("ls")
	golden(t, "ls", mask(p.shows(`exit 0`), pid))
	if text := p.tmux("capture-pane", "-p", "-e"); !strings.Contains(text, "\x1b[1m") {
		t.Errorf("no colours on a terminal: %q", text)
	}
	p = newPane(t, dsn)
	p.start("ls | head -2; NO_COLOR=1 '" + p.pglock + "' ls")
	p.shows(`(?s)LEASES\nNAME.*LEASES\nNAME.*exit 0`)
	if text := p.tmux("capture-pane", "-p", "-e"); strings.Contains(text, "\x1b[1m") {
		t.Errorf("colours in spite of NO_COLOR: %q", text)
	}
}

// What has changed is marked, once the terminal shows it; Ctrl-C is no failure.
func TestGolden_Watch(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	pid := scene(t, dsn)
	p := newPane(t, dsn)
	p.start("ls --watch")
	golden(t, "watch", mask(p.shows(`(?m)^ +accounts +accounts/%`), pid))
	apply(t, pgtest.PoolOn(t, dsn), `BEGIN; DELETE FROM pglock.waiters WHERE holder = 'web-1/99/shop';
		UPDATE pglock.leases SET token = 18, holder = 'web-1/99/shop', acquired_at = clock_timestamp() - interval '1 h 1 s' WHERE name = 'accounts/42';
		UPDATE pglock.leases SET claim = NULL WHERE name = 'backup';
		INSERT INTO pglock.leases (name, token, holder, role, claim, acquired_at, expires_at, ttl) VALUES
			('mail', 19, 'web-7/1/mail', 'mail', gen_random_uuid(), clock_timestamp() - interval '1 h', clock_timestamp() + interval '1 h 30 s', '2 h'); COMMIT`)
	golden(t, "watch_changed", mask(p.shows(`(?m)^\+ +mail`), pid))
	p.shows(`(?m)^   mail`) // the marks go after a while
	p.tmux("send-keys", "C-c")
	p.shows(`(?m)^exit 0`)
	if shown := p.tmux("display-message", "-p", "#{cursor_flag}"); strings.TrimSpace(shown) != "1" {
		t.Error("the cursor stays hidden")
	}
}

func TestGolden_Doctor(t *testing.T) {
	t.Parallel()
	w := newWard(t)
	pool, dsn := w.admit(t)
	p := newPane(t, dsn)
	p.start("doctor")
	golden(t, "doctor", mask(p.shows(`exit 0`), 0))
	apply(t, pool, `ALTER SEQUENCE pglock.leases_token_seq CACHE 32`, `ALTER TABLE pglock.leases SET (fillfactor = 100)`)
	apply(t, pool, set("synchronous_commit", "off")...)
	p.start("doctor")
	p.tmux("resize-window", "-x", "80", "-y", "50")
	golden(t, "doctor_danger", mask(p.shows(`exit 1`), 0))
}

// Without a terminal, or with -o json, there is a listing whenever something has
// changed, and no command to a terminal in it.
func TestWatch_NoTerminal(t *testing.T) {
	t.Parallel()
	for _, output := range []string{"json", "text"} {
		dsn := pgtest.DSN(t)
		pool := pgtest.PoolOn(t, dsn)
		p := command(t, dsn, "ls", "--watch", "-o", output)
		p.Stdout = nil
		out, err := p.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		p.start(t)
		read := func(until string) (text string) {
			for !strings.Contains(text, until) {
				piece := make([]byte, 4096)
				n, err := out.Read(piece)
				if text += string(piece[:n]); err != nil {
					t.Fatalf("%v after %q", err, text)
				}
			}
			return text
		}
		first := read(map[string]string{"json": "\n", "text": "no protected tables\n"}[output])
		apply(t, pool, `SELECT pglock.acquire('{a}', '1 h', owner => 'somebody')`)
		second := read("somebody")
		if strings.Contains(first+second, "\x1b") || output == "json" && strings.Count(first, "\n") != 1 {
			t.Errorf("%q, %q", first, second)
		}
		if err := p.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		if code := p.end(t); code != 0 {
			t.Errorf("exit %d, %s", code, p.stderr.String())
		}
	}
}
