package pgserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

// startDownload fetches PostgreSQL's programs once for each user and then runs
// a cluster of its own with them, as startLocal does.
func startDownload(ctx context.Context, c config) (engine, string, error) {
	b, err := download(ctx)
	if err != nil {
		return nil, "", err
	}
	return startCluster(ctx, b, c)
}

// programsDir is where downloads are kept: PGLOCK_PG_CACHE, else the user's
// cache. Root's own is closed to the account that runs the server.
func programsDir(who account) (string, error) {
	dir := os.Getenv("PGLOCK_PG_CACHE")
	if dir == "" && who.other {
		dir = "/var/cache/pawl"
	}
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("no place for it, name one in PGLOCK_PG_CACHE: %w", err)
		}
		dir = filepath.Join(cache, "pawl", "download")
	}
	if err := ownFolder(dir, 0o755); err != nil {
		return "", err
	}
	return dir, who.reach(dir)
}

// download returns where the programs are, and puts them there first if need
// be. An archive that already lies in the folder is not fetched again.
func download(ctx context.Context) (binaries, error) {
	version := embeddedpostgres.V18
	who, err := serverAccount()
	if err != nil {
		return binaries{}, err
	}
	home, err := programsDir(who)
	if err != nil {
		return binaries{}, err
	}
	ready := filepath.Join(home, "postgresql-"+string(version))
	lock, err := lockFile(ctx, ready+".lock", true)
	if err != nil {
		return binaries{}, err
	}
	defer lock.Close()
	if b, err := inspect(ctx, filepath.Join(ready, "bin")); err == nil {
		return b, nil
	}
	work := ready + ".part" // ours by the lock, and a rest of a killed process's if there
	if err := errors.Join(os.RemoveAll(work), os.Mkdir(work, 0o755)); err != nil {
		return binaries{}, err
	}
	defer os.RemoveAll(work)
	port, err := freePort()
	if err != nil {
		return binaries{}, err
	}
	unpacked := filepath.Join(work, "postgresql")
	// The package only starts servers, as daemons that outlive this process, and
	// none for root. Asked for a superuser whose name initdb refuses it fetches,
	// unpacks and gives up before it starts one; what it unpacked is what counts.
	start := embeddedpostgres.NewDatabase(embeddedpostgres.DefaultConfig().
		Version(version).
		CachePath(home).
		BinariesPath(unpacked).
		RuntimePath(filepath.Join(work, "runtime")).
		Username("pg_none").
		Port(uint32(port)).
		Logger(io.Discard)).Start
	failed := make(chan error, 1)
	go func() { failed <- start() }() // it takes no context
	select {
	case err = <-failed:
	case <-ctx.Done():
		return binaries{}, fmt.Errorf("download PostgreSQL %s: %w", version, ctx.Err())
	}
	if _, inspectErr := inspect(ctx, filepath.Join(unpacked, "bin")); inspectErr != nil {
		return binaries{}, fmt.Errorf("download PostgreSQL %s: %w", version, errors.Join(err, inspectErr))
	}
	if err := errors.Join(os.RemoveAll(ready), os.Rename(unpacked, ready)); err != nil {
		return binaries{}, err
	}
	return inspect(ctx, filepath.Join(ready, "bin"))
}
