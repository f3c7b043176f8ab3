package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of the times in /proc: USER_HZ, which is 100 wherever Go runs.
const tick = 10 * time.Millisecond

// stat is what /proc/PID/stat says: who started the process, its own CPU time,
// and that of its children that have ended.
type stat struct {
	parent        int
	own, children time.Duration
}

func readStat(pid string) (stat, error) {
	text, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
	if err != nil {
		return stat{}, err
	}
	// The second field is the program's name in brackets, which may have some itself.
	fields := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(fields) < 15 {
		return stat{}, fmt.Errorf("/proc/%s/stat: %q", pid, text)
	}
	var n [5]int64
	for i, field := range []int{1, 11, 12, 13, 14} {
		if n[i], err = strconv.ParseInt(fields[field], 10, 64); err != nil {
			return stat{}, err
		}
	}
	return stat{int(n[0]), time.Duration(n[1]+n[2]) * tick, time.Duration(n[3]+n[4]) * tick}, nil
}

// cpuOf is the CPU time of a process and of those that it has started. While
// it reaps one of them, that one's time is in neither place or in both: look again.
func cpuOf(root int) (time.Duration, error) {
	for {
		before, err := readStat(strconv.Itoa(root))
		if err != nil {
			return 0, err
		}
		entries, err := os.ReadDir("/proc")
		if err != nil {
			return 0, err
		}
		var children time.Duration
		for _, entry := range entries {
			if s, err := readStat(entry.Name()); err == nil && s.parent == root {
				children += s.own + s.children
			}
		}
		after, err := readStat(strconv.Itoa(root))
		if err != nil {
			return 0, err
		}
		if after.children == before.children {
			return after.own + after.children + children, nil
		}
	}
}

// cpuTimes are a server's, zero where its processes are not ours to read, and
// this process's.
func cpuTimes(s *server) (of, self time.Duration, err error) {
	if s.pid != 0 {
		if of, err = cpuOf(s.pid); err != nil {
			return 0, 0, err
		}
	}
	own, err := readStat("self")
	return of, own.own, err
}

// sockets is how many this process has open.
func sockets() (n int, err error) {
	fds, err := os.ReadDir("/proc/self/fd")
	for _, fd := range fds {
		if target, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(target, "socket:") {
			n++
		}
	}
	return n, err
}
