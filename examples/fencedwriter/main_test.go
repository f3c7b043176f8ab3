//go:build unix

package main

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == writerCommand {
		main()
	}
	pgtest.Main(m)
}

var told = regexp.MustCompile(`(?s)A  writes with token \d+: accepted\n     the file is "a line by A.n"\n` +
	`.*A  writes with token \d+: 409 Conflict: fenced: token \d+ comes too late, \d+ has written\n     the file is "a line by B.n"\n$`)

// The program as a user runs it, with its control; it leaves no folder behind.
func TestRun(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	var out, errs bytes.Buffer
	if code := run(context.Background(), nil, &out, &errs); code != 0 || !told.MatchString(out.String()) {
		t.Errorf("exit %d: %s%s", code, errs.String(), out.String())
	}
	left, err := os.ReadDir(os.TempDir())
	for _, folder := range left {
		if strings.HasPrefix(folder.Name(), "fencedwriter") {
			t.Errorf("%s is left", folder.Name())
		}
	}
	if err != nil {
		t.Error(err)
	}
	if code := run(context.Background(), []string{"more"}, io.Discard, io.Discard); code != 2 {
		t.Errorf("with an argument: exit %d", code)
	}
}

// A store that was to compare and doesn't is found out.
func TestShow_NothingRefused(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var out bytes.Buffer
	err := show(ctx, pgtest.DSN(t), &out, false)
	if err == nil || !strings.Contains(err.Error(), "the late write was not refused") {
		t.Errorf("%v\n%s", err, out.String())
	}
}

// What the store answers, also after a restart.
func TestStore(t *testing.T) {
	t.Parallel()
	dir, err := os.OpenRoot(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dir.Close() })
	s := &store{dir: dir, fenced: true}
	ask := func(method, name, token, body string, status int, want string) {
		t.Helper()
		r := httptest.NewRequest(method, "/files/"+name, strings.NewReader(body))
		if token != "" {
			r.Header.Set(tokenHeader, token)
		}
		w := httptest.NewRecorder()
		s.handler().ServeHTTP(w, r)
		if w.Code != status || !strings.Contains(w.Body.String(), want) {
			t.Errorf("%s %s with token %q: %d %s, want %d %s", method, name, token, w.Code, w.Body, status, want)
		}
	}
	const get, put = http.MethodGet, http.MethodPut
	ask(get, "a", "", "", 404, "no such file")
	ask(put, "a", "", `"x"`, 428, tokenHeader)
	ask(put, "a", "0", `"x"`, 428, tokenHeader)
	ask(put, "a", "much", `"x"`, 428, tokenHeader)
	ask(put, "a", "17", `x`, 400, "invalid")
	ask(put, "a", "17", `"x"`, 200, "x")
	ask(put, "a", "17", `"y"`, 200, "y")
	ask(put, "a", "18", `"z"`, 200, "z")
	ask(put, "a", "17", `"late"`, 409, "token 17 comes too late, 18 has written")
	ask(get, "a", "", "", 200, "z")
	ask(put, "b", "17", `"each file for itself"`, 200, "")
	ask(put, "..%2Fa", "17", `"outside"`, 500, "escapes")

	s = &store{dir: dir, fenced: true}
	ask(put, "a", "17", `"late"`, 409, "token 17")
	s.fenced = false
	ask(put, "a", "17", `"late"`, 200, "late")
}
