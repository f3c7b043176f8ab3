package readme

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// What a module that only takes locks must not have to require.
var heavy = regexp.MustCompile(`goose|testcontainers|embedded-postgres|opentelemetry`)

// Another module uses this one by what the README says to type.
func TestOutsideModule(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		program string
		dsn     func(testing.TB) string
		heavy   bool
		want    string
	}{
		{"locks", pgtest.DSN, false, "balance 42\n"},
		// That this one requires goose shows that the other is looked at closely enough.
		{"schema", pgtest.EmptyDSN, true, "all applied true none applied false\nall applied false none applied true\n"},
	} {
		t.Run(tt.program, func(t *testing.T) {
			t.Parallel()
			dir := outside(t, tt.program)
			required, err := os.ReadFile(filepath.Join(dir, "go.mod"))
			if err != nil {
				t.Fatal(err)
			}
			if heavy.Match(required) != tt.heavy {
				t.Errorf("after go mod tidy its go.mod says\n%s", required)
			}
			run(t, dir, "go", "build", "-o", "program.exe", ".")
			if got := run(t, dir, filepath.Join(dir, "program.exe"), tt.dsn(t)); got != tt.want {
				t.Errorf("it printed %q, want %q", got, tt.want)
			}
		})
	}
}

// outside makes a module of a program in testdata.
func outside(t *testing.T, program string) (dir string) {
	t.Helper()
	source, err := os.ReadFile(filepath.Join("testdata", program, "main.go"))
	if err != nil {
		t.Fatal(err)
	}
	return module(t, program, source)
}

// module makes a module of a program, by the commands of the README.
func module(t *testing.T, name string, program []byte) (dir string) {
	t.Helper()
	pawl, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	// Spares the checksum database a question for each module.
	sums, err := os.ReadFile(filepath.Join(pawl, "go.sum"))
	if err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	for file, text := range map[string][]byte{"main.go": program, "go.sum": sums} {
		if err := os.WriteFile(filepath.Join(dir, file), text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	run(t, dir, "go", "mod", "init", "example.org/"+name)
	for _, line := range marked(t, "by replace").lines {
		run(t, dir, strings.Fields(strings.Replace(line, "../pawl", pawl, 1))...)
	}
	return dir
}

// These are in the output of a go command that wanted a module which is neither
// in the cache nor to be had.
var offline = regexp.MustCompile(`GOPROXY=off|dial tcp|no such host|connection refused|i/o timeout`)

// run runs a command in dir and returns what it prints. It skips the test where
// the command lacks nothing but the network.
func run(t *testing.T, dir string, command ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOFLAGS=-mod=mod -buildvcs=false", "GOWORK=off")
	var failed strings.Builder
	cmd.Stderr = &failed
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%s: %w\n%s", strings.Join(command, " "), err, failed.String())
		if command[0] == "go" && (offline.MatchString(failed.String()) || errors.Is(err, exec.ErrNotFound)) {
			pgtest.Require(t, "modules", err)
		}
		t.Fatal(err)
	}
	return string(out)
}
