package pgtest

import (
	"cmp"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
)

// Client is the path of one of PostgreSQL's client programs (psql, pg_dump and
// so on) that is new enough for the server of a DSN: of the newest on PATH and
// in Debian's folders. The program is the rig of that name.
func Client(t testing.TB, program, dsn string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	var number int
	err = conn.QueryRow(t.Context(), "SELECT current_setting('server_version_num')::int").Scan(&number)
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	path, major := newest(program)
	if path == "" {
		Require(t, program, exec.ErrNotFound)
	}
	if major < number/10000 {
		Require(t, program, fmt.Errorf("%s is of PostgreSQL %d, the server is of %d", path, major, number/10000))
	}
	return path
}

var clientVersion = regexp.MustCompile(`\(PostgreSQL\) (\d+)`)

func newest(program string) (path string, major int) {
	paths, _ := filepath.Glob("/usr/lib/postgresql/*/bin/" + program)
	if path, err := exec.LookPath(program); err == nil {
		paths = append(paths, path)
	}
	version := func(path string) int {
		out, _ := exec.Command(path, "--version").Output()
		number := clientVersion.FindSubmatch(out)
		if number == nil {
			return 0
		}
		major, _ := strconv.Atoi(string(number[1]))
		return major
	}
	if len(paths) == 0 {
		return "", 0
	}
	path = slices.MaxFunc(paths, func(a, b string) int { return cmp.Compare(version(a), version(b)) })
	return path, version(path)
}
