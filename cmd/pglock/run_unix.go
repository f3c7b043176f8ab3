//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"github.com/pawl-go/pawl/pglock"
)

// toEnd are the signals that ask a program to end.
var toEnd = []os.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT}

// listen takes every signal that can be passed on, and SIGCHLD. Left out are those
// that are about this process alone, its terminal and its faults, and those that
// were ignored when it began, as by nohup.
func listen() chan os.Signal {
	own := []syscall.Signal{
		syscall.SIGKILL, syscall.SIGSTOP, syscall.SIGURG, syscall.SIGPIPE, syscall.SIGTTIN, syscall.SIGTTOU,
		syscall.SIGSEGV, syscall.SIGBUS, syscall.SIGFPE, syscall.SIGILL, syscall.SIGTRAP, syscall.SIGABRT, syscall.SIGSYS, syscall.SIGPROF,
	}
	var all []os.Signal
	for s := syscall.Signal(1); s < 65; s++ {
		if !slices.Contains(own, s) && !signal.Ignored(s) {
			all = append(all, s)
		}
	}
	signals := make(chan os.Signal, 64)
	signal.Notify(signals, all...)
	return signals
}

// runUnder runs the command under the lease.
func (a *app) runUnder(ctx context.Context, o runOptions, args []string) error {
	signals := listen()
	defer signal.Stop(signals)
	cmd, err := a.command(args)
	if err != nil {
		return a.cantRun(err)
	}
	l, done, err := a.await(ctx, o, signals)
	if err != nil {
		return err
	}
	cmd.Env = environment(l)
	g, err := start(cmd)
	if err != nil {
		err = a.cantRun(err)
		a.letGo(ctx, l, 0)
		done()
		return err
	}
	lost, gone := g.watch(l, o.ttl, signals)
	// What is left of the lease ends with its TTL in either case.
	if !gone {
		a.complain(fmt.Errorf("run: process group %d does not end even by KILL", g.id))
	}
	if lost != nil {
		a.complain(fmt.Errorf("run: the command was ended, for its lease could not be kept: %w", lost))
		return status(exitLost)
	}
	if !gone {
		return status(exitFailed)
	}
	code, released := a.letGo(ctx, l, g.status())
	if released {
		done()
	}
	if code == 0 {
		return nil
	}
	return code
}

// await connects and acquires, until a signal to end comes.
func (a *app) await(ctx context.Context, o runOptions, signals <-chan os.Signal) (l *pglock.Lease, done func(), err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	acquired := make(chan struct{})
	go func() {
		defer close(acquired)
		var client *pglock.Client
		if client, done, err = a.client(ctx); err == nil {
			if l, err = a.acquire(ctx, client, o); err != nil {
				done()
			}
		}
	}()
	for waiting := true; waiting; {
		select {
		case s := <-signals:
			if slices.Contains(toEnd, s) {
				cancel(signalled{s})
			}
		case <-acquired:
			waiting = false
		}
	}
	cancel(context.Canceled)
	if s, ok := errors.AsType[signalled](context.Cause(ctx)); ok {
		if err == nil { // granted at that moment
			a.letGo(context.WithoutCancel(ctx), l, 0)
			done()
		}
		return nil, nil, s
	}
	return l, done, err
}
