package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/internal/scratch"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The program as a user runs it: no edit is lost under If-Match, some are
// without, and the database is as it was.
func TestRun(t *testing.T) {
	t.Parallel()
	dsn := pgtest.EmptyDSN(t)
	var out, errs bytes.Buffer
	if code := run(t.Context(), []string{"-dsn=" + dsn, "-editors=3", "-edits=4"}, &out, &errs); code != 0 || errs.Len() > 0 {
		t.Fatalf("exit %d: %s", code, errs.String())
	}
	if !strings.Contains(out.String(), "12 edits, 12 kept, 0 lost") {
		t.Error(out.String())
	}
	var left int
	err := pgtest.PoolOn(t, dsn).QueryRow(t.Context(), `SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'httpetag%'`).Scan(&left)
	if err != nil || left != 0 {
		t.Errorf("%d schemas are left, %v", left, err)
	}
}

func TestRun_Flags(t *testing.T) {
	t.Parallel()
	var out, errs bytes.Buffer
	for args, code := range map[string]int{"-h": 0, "-editors=1": 2, "-nonsense": 2, "more": 2, "-dsn=host=/nowhere": 1} {
		if got := run(t.Context(), []string{args}, &out, &errs); got != code {
			t.Errorf("%s: exit %d, want %d", args, got, code)
		}
	}
}

// What the server answers to each header.
func TestHandler(t *testing.T) {
	t.Parallel()
	err := scratch.In(t.Context(), pgtest.EmptyDSN(t), "httpetag", createPages, func(_ scratch.Schema, pool *pgxpool.Pool) error {
		h := handler(pool)
		ask := func(method, header, tag string, status int) (etag string) {
			t.Helper()
			r := httptest.NewRequest(method, "/pages/a", strings.NewReader(`{"body": "x"}`))
			if header != "" {
				r.Header.Set(header, tag)
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			if w.Code != status {
				t.Errorf("%s with %s: %s: %d %s, want %d", method, header, tag, w.Code, w.Body, status)
			}
			return w.Header().Get("ETag")
		}
		ask(http.MethodGet, "", "", 404)
		ask(http.MethodPut, "If-Match", `"1"`, 404)
		ask(http.MethodPut, "If-None-Match", `"1"`, 400)
		first := ask(http.MethodPut, "If-None-Match", "*", 201)
		ask(http.MethodPut, "If-None-Match", "*", 412)
		ask(http.MethodPut, "", "", 428)
		ask(http.MethodPut, "If-Match", "nonsense", 400)
		ask(http.MethodPut, "If-Match", "W/"+first, 412)
		second := ask(http.MethodPut, "If-Match", `"1", `+first, 200)
		ask(http.MethodPut, "If-Match", first, 412)
		if got := ask(http.MethodGet, "If-None-Match", first, 200); got != second || got == first {
			t.Errorf("tags %s, %s, %s", first, second, got)
		}
		ask(http.MethodGet, "If-None-Match", "W/"+second, 304)
		ask(http.MethodDelete, "If-Match", first, 412)
		ask(http.MethodDelete, "", "", 428)
		ask(http.MethodDelete, "If-Match", second, 204)
		if again := ask(http.MethodPut, "If-None-Match", "*", 201); again == first || again == second {
			t.Errorf("%s is back", again)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
