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

// cpuOf is the CPU time of a process and of all that it has started.
func cpuOf(root int) (time.Duration, error) {
	first, err := readStat(strconv.Itoa(root))
	if err != nil {
		return 0, err
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, err
	}
	total := first.own + first.children
	for _, entry := range entries {
		if _, err := strconv.Atoi(entry.Name()); err != nil {
			continue
		}
		// One that has just ended is among its parent's children by the next look.
		if s, err := readStat(entry.Name()); err == nil && s.parent == root {
			total += s.own + s.children
		}
	}
	return total, nil
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
