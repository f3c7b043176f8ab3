package main

import (
	"context"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
)

// machine is where it was measured.
type machine struct {
	Processor string `json:"processor"`
	Cores     int    `json:"cores"`
	MemoryMiB int    `json:"memory_mib"`
	System    string `json:"system"`
	Kernel    string `json:"kernel"`
	Go        string `json:"go"`
	Load      string `json:"load"` // when it began: 1, 5 and 15 minutes
}

func describe(ctx context.Context) machine {
	kernel, _ := exec.CommandContext(ctx, "uname", "-r").Output()
	memory, _, _ := strings.Cut(field("/proc/meminfo", "MemTotal:"), " ")
	kib, _ := strconv.Atoi(memory)
	load, _ := os.ReadFile("/proc/loadavg")
	return machine{
		Processor: field("/proc/cpuinfo", "model name\t:"),
		Cores:     runtime.NumCPU(),
		MemoryMiB: kib / 1024,
		System:    strings.Trim(field("/etc/os-release", "PRETTY_NAME="), `"`),
		Kernel:    strings.TrimSpace(string(kernel)),
		Go:        runtime.Version(),
		Load:      strings.Join(strings.Fields(string(load))[:min(3, len(strings.Fields(string(load))))], " "),
	}
}

// field is what follows the first line's beginning in a file, "" if there is none.
func field(file, begins string) string {
	text, _ := os.ReadFile(file)
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, begins); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}
