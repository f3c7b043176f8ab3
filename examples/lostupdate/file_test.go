package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"testing"
)

// A file is there whole or as it was before, and nothing is left beside it.
func TestFiles(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "page.html")
	save(t, path, "old")
	only := func(want string) {
		t.Helper()
		entries, err := os.ReadDir(filepath.Dir(path))
		if err != nil {
			t.Fatal(err)
		}
		if len(entries) != 1 {
			t.Errorf("the folder has %v", entries)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != want {
			t.Errorf("it is %q, %v", got, err)
		}
	}
	note := func(string) {}
	begin := func(render func(io.Writer, results) error) files {
		t.Helper()
		all, err := create(options{html: path})
		if err != nil {
			t.Fatal(err)
		}
		all[0].render = render
		return all
	}

	begin(nil).discard()
	only("old")

	all := begin(func(w io.Writer, _ results) error {
		_, _ = io.WriteString(w, "half")
		return io.ErrShortWrite
	})
	if err := all.write(results{}, note); err == nil {
		t.Error("no error")
	}
	all.discard()
	only("old")

	all = begin(func(w io.Writer, _ results) error {
		_, err := io.WriteString(w, "new")
		return err
	})
	if err := all.write(results{}, note); err != nil {
		t.Error(err)
	}
	all.discard()
	only("new")
}

// A run that does not come to its end leaves no page.
func TestFiles_FailedRun(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	var stdout, stderr bytes.Buffer
	code := run(t.Context(), []string{"-dsn=postgres://127.0.0.1:1/nothing", "-html=" + filepath.Join(dir, "page.html")}, &stdout, &stderr)
	if left, err := os.ReadDir(dir); code != 1 || err != nil || len(left) > 0 {
		t.Errorf("exit %d, left %v, %v", code, left, err)
	}
}
