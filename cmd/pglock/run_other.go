//go:build !unix

package main

import (
	"context"
	"errors"
)

// runUnder refuses: without process groups a command could go on after its lease
// has ended.
func (a *app) runUnder(context.Context, runOptions, []string) error {
	return errors.New("run needs process groups and signals, which this system does not have: use pglock.Client.WithLease in a program")
}
