package pgserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// oldest is the first major version that Pawl supports.
const oldest = 14

// binaries is a folder that holds initdb and postgres.
type binaries struct {
	dir     string
	version string // the whole line, for example "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)"
	major   int
}

func (b binaries) program(name string) string {
	if runtime.GOOS == "windows" {
		name += ".exe"
	}
	return filepath.Join(b.dir, name)
}

// installed are where packages put the server without putting it on PATH:
// Debian, the PostgreSQL project's RPMs, Homebrew on its three roots, the Mac
// application and the Windows installer.
var installed = []string{
	"/usr/lib/postgresql/*/bin",
	"/usr/pgsql-*/bin",
	"/opt/homebrew/opt/postgresql*/bin",
	"/usr/local/opt/postgresql*/bin",
	"/home/linuxbrew/.linuxbrew/opt/postgresql*/bin",
	"/Applications/Postgres.app/Contents/Versions/*/bin",
	`C:\Program Files\PostgreSQL\*\bin`,
}

// findBinaries looks into PGLOCK_PG_BIN and nowhere else if it is set, then
// along PATH, then where packages install, newest first.
func findBinaries(ctx context.Context) (binaries, error) {
	if dir := os.Getenv("PGLOCK_PG_BIN"); dir != "" {
		b, err := inspect(ctx, dir)
		if err != nil {
			return binaries{}, fmt.Errorf("PGLOCK_PG_BIN=%s: %w", dir, err)
		}
		return b, nil
	}
	var refused []error
	if path, err := exec.LookPath("postgres"); err == nil {
		// Distributions link single programs into PATH; initdb wants its
		// siblings beside it.
		if real, err := filepath.EvalSymlinks(path); err == nil {
			path = real
		}
		b, err := inspect(ctx, filepath.Dir(path))
		if err == nil {
			return b, nil
		}
		refused = append(refused, err)
	}
	var found []binaries
	for _, pattern := range installed {
		dirs, _ := filepath.Glob(pattern)
		for _, dir := range dirs {
			b, err := inspect(ctx, dir)
			if err != nil {
				refused = append(refused, err)
				continue
			}
			found = append(found, b)
		}
	}
	if len(found) > 0 {
		return slices.MaxFunc(found, func(a, b binaries) int { return cmp.Compare(a.major, b.major) }), nil
	}
	if len(refused) > 0 {
		return binaries{}, errors.Join(refused...)
	}
	return binaries{}, errors.New("no initdb and postgres on PATH or in the folders of Debian, Red Hat and Homebrew")
}

var versionNumber = regexp.MustCompile(`\(PostgreSQL\) (\d+)`)

// inspect says what dir holds, or why it can't be used.
func inspect(ctx context.Context, dir string) (binaries, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return binaries{}, err
	}
	b := binaries{dir: dir}
	if _, err := os.Stat(b.program("initdb")); err != nil {
		return binaries{}, fmt.Errorf("no initdb: %w", err)
	}
	out, err := exec.CommandContext(ctx, b.program("postgres"), "--version").Output()
	if err != nil {
		return binaries{}, fmt.Errorf("run %s --version: %w", b.program("postgres"), err)
	}
	b.version = strings.TrimSpace(string(out))
	number := versionNumber.FindStringSubmatch(b.version)
	if number == nil {
		return binaries{}, fmt.Errorf("%s says %q, which names no version", b.program("postgres"), b.version)
	}
	if b.major, _ = strconv.Atoi(number[1]); b.major < oldest {
		return binaries{}, fmt.Errorf("%s holds PostgreSQL %d, want %d or newer", dir, b.major, oldest)
	}
	return b, nil
}
