package pgserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// A server's folder holds its data, its log and a file "owner" that the
// process which started it keeps locked. Who finds that lock free finds a
// folder whose process was killed.
const (
	folderPrefix = "pawl-pg-"
	newPrefix    = "pawl-new-" // not yet locked
)

// root is where folders are made: in memory for scratch servers where there is
// room, else in the temporary folder, else, where the server's account can't
// enter that (a TMPDIR below root's home), in /tmp.
func root(who account, scratch bool) (string, error) {
	if scratch && roomy("/dev/shm") {
		return "/dev/shm", nil
	}
	dir := os.TempDir()
	err := who.reach(dir)
	if err == nil {
		return dir, nil
	}
	for _, dir := range []string{"/tmp", "/var/tmp"} {
		if who.reach(dir) == nil {
			return dir, nil
		}
	}
	return "", err
}

// newFolder makes a folder below root and locks it. The folder gets the name
// that sweep looks for only when it is locked.
func newFolder(ctx context.Context, root string) (string, *os.File, error) {
	sweep(ctx, root)
	dir, err := os.MkdirTemp(root, newPrefix)
	if err != nil {
		return "", nil, err
	}
	owner, err := lockFile(ctx, filepath.Join(dir, "owner"), true)
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	final := filepath.Join(root, folderPrefix+strings.TrimPrefix(filepath.Base(dir), newPrefix))
	// 0711: the server's account has to get through, nobody has to look.
	if err := errors.Join(os.Chmod(dir, 0o711), os.Rename(dir, final)); err != nil {
		return "", nil, errors.Join(err, owner.Close(), os.RemoveAll(dir))
	}
	return final, owner, nil
}

// sweep removes what killed processes of this user left below root. What fails
// stays for the next.
func sweep(ctx context.Context, root string) {
	for _, prefix := range []string{folderPrefix, newPrefix} {
		dirs, _ := filepath.Glob(filepath.Join(root, prefix+"*"))
		for _, dir := range dirs {
			info, err := os.Lstat(dir)
			if err != nil || !mine(info) {
				continue
			}
			if prefix == newPrefix && time.Since(info.ModTime()) < time.Hour {
				continue
			}
			owner, err := lockFile(ctx, filepath.Join(dir, "owner"), false)
			if err != nil || owner == nil {
				continue
			}
			if pid := postmaster(filepath.Join(dir, "data")); pid == 0 || !alive(pid) {
				_ = os.RemoveAll(dir)
			}
			_ = owner.Close()
		}
	}
}

// postmaster is the process that runs on a data folder by its own account, 0
// if there is none.
func postmaster(data string) int {
	text, err := os.ReadFile(filepath.Join(data, "postmaster.pid"))
	if err != nil {
		return 0
	}
	line, _, _ := strings.Cut(string(text), "\n")
	pid, _ := strconv.Atoi(line)
	return pid
}

// copyTree copies a data folder and gives the copy to the account.
func copyTree(who account, from, to string) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, rel)
		switch {
		case entry.IsDir():
			err = os.Mkdir(target, 0o700)
		case entry.Type().IsRegular():
			err = copyFile(path, target)
		default:
			err = fmt.Errorf("%s is neither file nor folder", path)
		}
		if err != nil {
			return err
		}
		return who.own(target)
	})
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}
