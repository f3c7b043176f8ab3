package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// benchEnv has the test's program be the benchmark.
const benchEnv = "PAWL_BENCH_TEST_RUN"

func TestMain(m *testing.M) {
	children["late"] = writeLate
	if len(os.Args) > 1 && children[os.Args[1]] != nil || os.Getenv(benchEnv) != "" {
		os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
	}
	pgtest.Main(m)
}

func TestRun_BadArguments(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{}, {"-all", "-quick"}, {"-quick", "extra"}, {"-quick", "-only", "nobody"}, {"-quick", "-scenario", "nothing"}, {"-no-such-flag"},
	} {
		var out, errs bytes.Buffer
		if code := run(args, &out, &errs); code != 2 || errs.Len() == 0 || out.Len() != 0 {
			t.Errorf("run(%q) = %d, %q, %q; want 2 and a remedy", args, code, out.String(), errs.String())
		}
	}
}

func TestRun_Writes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var out, errs bytes.Buffer
	if code := run([]string{"-quick", "-only", "floor,advisory", "-scenario", "losing,pairs", "-out", dir}, &out, &errs); code != 0 {
		t.Fatalf("exit %d: %s", code, errs.String())
	}
	text, err := os.ReadFile(filepath.Join(dir, "quick.json"))
	if err != nil {
		t.Fatal(err)
	}
	var r results
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	for _, c := range r.Cells {
		for name, f := range c.Metrics {
			// A process's CPU time comes in steps of 10 ms: brief ones can have none.
			if f.Median <= 0 && !strings.Contains(name, "CPU") || len(f.Rounds) != brief.rounds {
				t.Errorf("%s, %s, %s: %s = %+v", c.Scenario, c.Setting, c.Contender, name, f)
			}
		}
	}
	if want := 4*2 + 2; len(r.Cells) != want || !r.Quick {
		t.Errorf("%d cells, quick %v; want %d, true", len(r.Cells), r.Quick, want)
	}
	report, err := os.ReadFile(filepath.Join(dir, "quick.md"))
	if err != nil || string(report) != out.String() {
		t.Errorf("the report's file is not what was printed: %v", err)
	}
	if svg, err := os.ReadFile(filepath.Join(dir, "quick.svg")); err != nil || !bytes.Contains(svg, []byte("<svg")) {
		t.Errorf("the chart: %v", err)
	}
}

// Interrupted in the middle, it leaves no server and no file.
func TestRun_Interrupted(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir, out := t.TempDir(), t.TempDir()
	cmd := exec.Command(self, "-quick", "-only", "redis-memory,floor", "-scenario", "pairs", "-out", out)
	cmd.Env = append(os.Environ(), benchEnv+"=1", "TMPDIR="+dir)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	lines := bufio.NewScanner(stderr)
	var servers []string
	for lines.Scan() {
		said.WriteString(lines.Text() + "\n")
		if strings.HasPrefix(lines.Text(), "pairs, round 1") && servers == nil {
			servers = childrenOf(t, cmd.Process.Pid)
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
		}
	}
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(said.String(), "interrupted") {
		t.Errorf("exit %d; want 1 and a word: %s", code, said.String())
	}
	if len(servers) < 1 {
		t.Error("no server ran: the test shows nothing")
	}
	for _, pid := range servers {
		if _, err := os.Stat(filepath.Join("/proc", pid)); err == nil {
			t.Errorf("server %s still runs", pid)
		}
	}
	for _, dir := range []string{dir, out} {
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, err)
		}
	}
}

func childrenOf(t *testing.T, pid int) (pids []string) {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if s, err := readStat(entry.Name()); err == nil && s.parent == pid {
			pids = append(pids, entry.Name())
		}
	}
	return pids
}
