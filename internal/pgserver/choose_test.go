//go:build unix

package pgserver_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pawl-go/pawl/internal/pgtest"
)

func TestStart_UnknownWay(t *testing.T) {
	t.Parallel()
	_, err := audition(t, "kernel", "PGLOCK_PG=cloud")
	if err == nil || !strings.Contains(err.Error(), `PGLOCK_PG="cloud": want local, docker or download`) {
		t.Error(err)
	}
}

// Forced to one way, Start says what is wrong with that one and what to do, and
// tries no other.
func TestStart_ForcedWayThatFails(t *testing.T) {
	t.Parallel()
	empty := t.TempDir()
	// Root's server runs as somebody else, who has to get in there.
	if err := os.Chmod(filepath.Dir(empty), 0o755); err != nil {
		t.Fatal(err)
	}
	for way, test := range map[string]struct {
		env  []string
		want []string
	}{
		"local": {
			[]string{"PGLOCK_PG_BIN=" + empty},
			[]string{"PGLOCK_PG_BIN=" + empty, "no initdb", "apt-get install postgresql"},
		},
		"docker": {
			[]string{"DOCKER_HOST=unix://" + empty + "/docker.sock"},
			[]string{empty + "/docker.sock", "start Docker"},
		},
		"download": {
			[]string{"PGLOCK_PG_CACHE=" + empty, "HTTPS_PROXY=http://127.0.0.1:1", "https_proxy=http://127.0.0.1:1"},
			[]string{"download PostgreSQL", "connect to the internet"},
		},
	} {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			_, err := audition(t, "kernel", append(test.env, "PGLOCK_PG="+way)...)
			if err == nil {
				t.Fatal("started")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("no %q in: %v", want, err)
				}
			}
			for _, other := range []string{"local", "docker", "download"} {
				if other != way && strings.Contains(err.Error(), "\n"+other+":") {
					t.Errorf("tried %s too: %v", other, err)
				}
			}
		})
	}
}

// A server that is too old is refused by its number; one that is new enough
// and answers the same question is not.
func TestStart_TooOld(t *testing.T) {
	t.Parallel()
	for version, refused := range map[string]bool{"13.9": true, "14.0": false} {
		bin := t.TempDir()
		script := "#!/bin/sh\necho 'postgres (PostgreSQL) " + version + "'\n"
		for _, name := range []string{"postgres", "initdb"} {
			if err := os.WriteFile(filepath.Join(bin, name), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		_, err := audition(t, "kernel", "PGLOCK_PG=local", "PGLOCK_PG_BIN="+bin, "XDG_CACHE_HOME="+t.TempDir())
		if err == nil {
			t.Fatal("a script that prints a version started a server")
		}
		if got := strings.Contains(err.Error(), "want 14 or newer"); got != refused {
			t.Errorf("%s: %v", version, err)
		}
	}
}

// DATABASE_URL may be production.
func TestStart_IgnoresDatabaseURL(t *testing.T) {
	t.Parallel()
	p := cast(t, "kernel", "DATABASE_URL=postgres://127.0.0.1:1/production")
	if strings.Contains(p.dsn, "production") {
		t.Error(p.dsn)
	}
}

func TestStart_Docker(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"stop", "exit", "kill"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			p, err := audition(t, "", "PGLOCK_PG=docker")
			pgtest.Require(t, "docker", err)
			conn := connect(t, p.dsn)
			if got := setting(t, conn, "fsync"); got != "off" {
				t.Errorf("fsync is %s, want off as asked for", got)
			}
			p.end(t, how)
			eventually(t, "gone", func() bool { return ping(t.Context(), p.dsn) != nil })
		})
	}
}

func TestStart_Download(t *testing.T) {
	t.Parallel()
	if os.Getenv("PGLOCK_PG_CACHE") == "" {
		pgtest.Require(t, "download", errors.New("PGLOCK_PG_CACHE names no folder with an archive"))
	}
	p, err := audition(t, "", "PGLOCK_PG=download")
	pgtest.Require(t, "download", err)
	if got := setting(t, connect(t, p.dsn), "fsync"); got != "off" {
		t.Errorf("fsync is %s, want off as asked for", got)
	}
	p.end(t, "kill")
	eventually(t, "ended", p.ended)
}
