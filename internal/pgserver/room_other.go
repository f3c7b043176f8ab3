//go:build !linux

package pgserver

func roomy(string) bool { return false }
