package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/internal/scratch"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == nodeCommand {
		os.Exit(node(os.Stdin, os.Stdout, os.Stderr))
	}
	pgtest.Main(m)
}

// The program as a user runs it: one report a night, and without the record one
// of each node that lived; and the database is as it was.
func TestRun(t *testing.T) {
	t.Parallel()
	dsn := pgtest.EmptyDSN(t)
	var out, errs bytes.Buffer
	if code := run(t.Context(), []string{"-dsn=" + dsn}, &out, &errs); code != 0 || errs.Len() > 0 {
		t.Fatalf("exit %d: %s%s", code, out.String(), errs.String())
	}
	const want = `2026-01-01, lock and record: 4 nodes at once, 1 killed in the middle, 1 later; reports: 1
2026-01-02, lock and record: 4 nodes at once, 1 killed in the middle, 1 later; reports: 1
2026-01-03, lock alone: 4 nodes at once, 1 killed in the middle, 1 later; reports: 4
`
	if out.String() != want {
		t.Error(out.String())
	}
	var left int
	err := pgtest.PoolOn(t, dsn).QueryRow(t.Context(), `SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'onlyonce%'`).Scan(&left)
	if err != nil || left != 0 {
		t.Errorf("%d schemas are left, %v", left, err)
	}
}

// Two nodes that both believe to hold the lock, as after a connection broke:
// the record lets one report through.
func TestWrite_WithoutTheLock(t *testing.T) {
	t.Parallel()
	for recorded, want := range map[bool]int{true: 1, false: 2} {
		err := scratch.In(t.Context(), pgtest.EmptyDSN(t), "onlyonce", createTables, func(_ scratch.Schema, pool *pgxpool.Pool) error {
			o := order{Night: "2026-01-01", Recorded: recorded}
			for range 2 {
				if err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return o.write(t.Context(), tx) }); err != nil {
					return err
				}
			}
			var reports int
			err := pool.QueryRow(t.Context(), `SELECT count(*) FROM reports`).Scan(&reports)
			if reports != want {
				t.Errorf("recorded: %v: %d reports, want %d", recorded, reports, want)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
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
