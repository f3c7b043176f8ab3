package main

import (
	"testing"
	"time"
)

// What the program itself did stands in a story beside what its clients wrote
// down, so its time must be one that writing down doesn't change.
func TestNow(t *testing.T) {
	t.Parallel()
	if at := now(); at != at.Round(0) {
		t.Errorf("%v carries a clock that its text does not", at)
	}
	if at := time.Now(); at == at.Round(0) { // the control
		t.Errorf("%v carries nothing else: the test is blind", at)
	}
}
