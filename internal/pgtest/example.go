package pgtest

import (
	"context"
	"log"
	"slices"
	"testing"
)

// Example is a testing.TB for an Example, which gets none, and what does its
// cleaning up:
//
//	t, done := pgtest.Example()
//	defer done()
//
// A failure is a panic, so that the Example fails too.
func Example() (testing.TB, func()) {
	e := &example{}
	return e, func() {
		for _, f := range slices.Backward(e.cleanups) {
			f()
		}
	}
}

type example struct {
	testing.TB
	cleanups []func()
}

func (*example) Name() string              { return "Example" }
func (*example) Helper()                   {}
func (*example) Failed() bool              { return false }
func (*example) Context() context.Context  { return context.Background() }
func (*example) Logf(f string, a ...any)   { log.Printf(f, a...) }
func (*example) Error(args ...any)         { log.Panic(args...) }
func (*example) Errorf(f string, a ...any) { log.Panicf(f, a...) }
func (*example) Fatal(args ...any)         { log.Panic(args...) }
func (*example) Fatalf(f string, a ...any) { log.Panicf(f, a...) }
func (e *example) Cleanup(f func())        { e.cleanups = append(e.cleanups, f) }
