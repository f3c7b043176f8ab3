package pgserver

import (
	"os"
	"syscall"
)

// roomy reports whether dir is ours to write and has space for a few servers;
// a container's /dev/shm often has 64 MB.
func roomy(dir string) bool {
	var stat syscall.Statfs_t
	if err := syscall.Statfs(dir, &stat); err != nil || stat.Bavail*uint64(stat.Bsize) < 4<<30 {
		return false
	}
	probe, err := os.MkdirTemp(dir, newPrefix)
	if err != nil {
		return false
	}
	return os.Remove(probe) == nil
}
