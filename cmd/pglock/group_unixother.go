//go:build unix && !linux

package main

import "syscall"

// tie does nothing: here a command outlives a pglock that is killed.
func tie(*syscall.SysProcAttr) {}

// adopt does nothing: init waits for orphans.
func adopt() {}

// reap does nothing either.
func reap(int) {}
