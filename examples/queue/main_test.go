package main

import (
	"bytes"
	"os"
	"regexp"
	"testing"

	"github.com/pawl-go/pawl/internal/pgtest"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == workerCommand {
		os.Exit(worker(os.Stdin, os.Stdout, os.Stderr))
	}
	pgtest.Main(m)
}

// The program as a user runs it: under locks the jobs of the killed are done by
// others, once; under marks they are stuck; and the database is as it was.
func TestRun(t *testing.T) {
	t.Parallel()
	dsn := pgtest.EmptyDSN(t)
	var out, errs bytes.Buffer
	if code := run(t.Context(), []string{"-dsn=" + dsn}, &out, &errs); code != 0 || errs.Len() > 0 {
		t.Fatalf("exit %d: %s%s", code, out.String(), errs.String())
	}
	want := regexp.MustCompile(`^locked: 60 jobs, 5 workers killed in the middle of 15 of them: 60 done, 0 stuck, 0 done twice
marked: 60 jobs, 5 workers killed in the middle of (\d+) of them: \d+ done, (\d+) stuck, 0 done twice
$`)
	if got := want.FindStringSubmatch(out.String()); got == nil || got[1] != got[2] {
		t.Error(out.String())
	}
	var left int
	err := pgtest.PoolOn(t, dsn).QueryRow(t.Context(), `SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'queue%'`).Scan(&left)
	if err != nil || left != 0 {
		t.Errorf("%d schemas are left, %v", left, err)
	}
}

func TestRun_Flags(t *testing.T) {
	t.Parallel()
	var out, errs bytes.Buffer
	for args, code := range map[string]int{"-h": 0, "-nonsense": 2, "more": 2, "-dsn=host=/nowhere": 1} {
		if got := run(t.Context(), []string{args}, &out, &errs); got != code {
			t.Errorf("%s: exit %d, want %d", args, got, code)
		}
	}
}
