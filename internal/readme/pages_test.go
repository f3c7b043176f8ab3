package readme

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// pages are the texts of docs, by their names.
func pages(t *testing.T) map[string]string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("docs has no pages: %v", err)
	}
	all := map[string]string{}
	for _, path := range paths {
		page, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		all[filepath.Base(path)] = string(page)
	}
	return all
}

// The pages name what there is, link to what there is, and are short; and the
// README leads to each.
func TestPages(t *testing.T) {
	t.Parallel()
	k := learn(t)
	for name, page := range pages(t) {
		for _, fault := range faults(page, "docs", k) {
			t.Errorf("docs/%s: %s", name, fault)
		}
		if n := strings.Count(page, "\n"); n > 250 {
			t.Errorf("docs/%s has %d lines", name, n)
		}
		if !strings.Contains(text(t), "](docs/"+name) {
			t.Errorf("the README doesn't lead to docs/%s", name)
		}
	}
}

// The SQL that a page has somebody type runs as it stands.
func TestPages_SQL(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	ran := 0
	for name, page := range pages(t) {
		code, _ := blocks(page)
		for _, b := range code {
			if b.mark != "runs" {
				continue
			}
			ran++
			if _, err := pool.Exec(t.Context(), b.String()); err != nil {
				t.Errorf("docs/%s, line %d: %v", name, b.line, err)
			}
		}
	}
	if ran == 0 {
		t.Error("no code is marked: this test shows nothing")
	}
}

// A name costs what docs/operations.md says, also after many tenures.
func TestPages_SizeOfAName(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	const names = 5000
	for range 3 {
		_, err := pool.Exec(t.Context(), `
			WITH taken AS (
				SELECT array_agg(a.name) AS names, array_agg(a.token) AS tokens
				FROM pglock.acquire((SELECT array_agg('orders/' || n) FROM generate_series(1, $1) n), '1 h', owner => 'host-1/4711/worker') a)
			SELECT pglock.release(names, tokens) FROM taken`, names)
		if err != nil {
			t.Fatal(err)
		}
		// What a released lease leaves is autovacuum's to clear.
		if _, err := pool.Exec(t.Context(), `VACUUM pglock.leases`); err != nil {
			t.Fatal(err)
		}
	}
	var size, rows int
	err := pool.QueryRow(t.Context(), `SELECT pg_total_relation_size('pglock.leases'), count(*) FROM pglock.leases`).Scan(&size, &rows)
	if err != nil || rows != names {
		t.Fatalf("%d rows, %v", rows, err)
	}
	t.Logf("%d bytes a name", size/names)
	if size/names >= 1024 {
		t.Errorf("a name costs %d bytes", size/names)
	}
	var purged int
	if err := pool.QueryRow(t.Context(), `SELECT pglock.purge('0')`).Scan(&purged); err != nil || purged != names {
		t.Errorf("%d purged, %v", purged, err)
	}
	client := pglock.New(pool)
	defer client.Close(t.Context())
	if l, err := client.TryAcquire(t.Context(), "orders/1", time.Minute); err != nil {
		t.Error(err)
	} else if l.Token() <= 3*names {
		t.Errorf("after the purge comes token %d", l.Token())
	}
}
