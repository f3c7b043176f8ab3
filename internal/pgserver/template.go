package pgserver

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// initialize puts a fresh cluster into data and returns the password of its
// superuser. initdb takes seconds, so it runs once for each version and user;
// afterwards its result is copied from the user's cache.
//
// The password keeps other users of the machine out: whoever connects as
// superuser may run programs as the server's account. It is random and crosses
// the loopback only, so that md5 will do; SCRAM's thousands of rounds cost each
// connection 1.5 ms, and 18 ms under the race detector.
func initialize(ctx context.Context, b binaries, who account, data string) (password string, err error) {
	cache, err := os.UserCacheDir()
	if err == nil {
		cache = filepath.Join(cache, "pawl")
		err = ownFolder(cache, 0o700)
	}
	if err != nil { // no HOME, or one that is not there
		cache = filepath.Join(os.TempDir(), fmt.Sprintf("pawl-cache-%d", os.Geteuid()), "pawl")
		if err := ownFolder(cache, 0o700); err != nil {
			return "", err
		}
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\n%s\n%v", b.version, b.dir, who))
	ready := filepath.Join(cache, fmt.Sprintf("cluster-%d-%s", b.major, hex.EncodeToString(sum[:6])))
	lock, err := lockFile(ctx, ready+".lock", true)
	if err != nil {
		return "", err
	}
	if _, err = os.Stat(ready); err != nil {
		err = initdb(ctx, b, who, ready)
	}
	if err := errors.Join(err, lock.Close()); err != nil {
		return "", err
	}
	secret, err := os.ReadFile(filepath.Join(ready, "password"))
	if err != nil {
		return "", err
	}
	return strings.TrimSpace(string(secret)), copyTree(who, filepath.Join(ready, "data"), data)
}

// ownFolder makes a folder, and returns an error if it belongs to somebody else,
// who could have put anything there.
func ownFolder(dir string, mode fs.FileMode) error {
	if err := os.MkdirAll(dir, mode); err != nil {
		return err
	}
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if !mine(info) {
		return fmt.Errorf("%s belongs to another user", dir)
	}
	return nil
}

// initdb makes a cluster and moves it to ready as a whole, so that a process
// killed meanwhile leaves nothing that looks done.
func initdb(ctx context.Context, b binaries, who account, ready string) (err error) {
	base, err := root(who, false)
	if err != nil {
		return err
	}
	work, owner, err := newFolder(ctx, base)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(work), owner.Close()) }()

	password := rand.Text()
	secret := filepath.Join(work, "password")
	if err := errors.Join(os.WriteFile(secret, []byte(password+"\n"), 0o600), who.own(secret)); err != nil {
		return err
	}
	// initdb makes its folder itself, so it needs one of its own to make it in.
	made := filepath.Join(work, "made")
	if err := errors.Join(os.Mkdir(made, 0o700), who.own(made)); err != nil {
		return err
	}
	data := filepath.Join(made, "data")
	cmd := exec.CommandContext(ctx, b.program("initdb"), "-D", data, "-U", "postgres",
		"-A", "md5", "--pwfile", secret, "-E", "UTF8", "--locale=C", "--no-sync")
	cmd.Dir = work
	cmd.Env = serverEnv()
	who.take(cmd)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", cmd, err, out)
	}

	part := ready + ".part" // ours by the lock, and a rest of a killed process's if there
	err = errors.Join(
		os.RemoveAll(part),
		os.Mkdir(part, 0o700),
		copyFile(secret, filepath.Join(part, "password")),
		copyTree(account{}, data, filepath.Join(part, "data")),
		os.Rename(part, ready),
	)
	if err != nil {
		return errors.Join(err, os.RemoveAll(part))
	}
	return nil
}

// serverEnv is this process's environment without what would reach into a
// server: a PGDATA or a PGPORT of the user's, and the locale, since restart
// reads the log, and macOS refuses to start a server that has to look it up.
func serverEnv() []string {
	env := []string{"LC_ALL=C"}
	for _, pair := range os.Environ() {
		if !strings.HasPrefix(pair, "PG") && !strings.HasPrefix(pair, "LC_") && !strings.HasPrefix(pair, "LANG") {
			env = append(env, pair)
		}
	}
	return env
}
