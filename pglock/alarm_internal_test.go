package pglock

import (
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// Alarms ring at their time and in the order of their times, however they are set and
// whatever is stopped before them; one that was stopped doesn't.
func TestAlarms(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		var a alarms
		var mu sync.Mutex
		var rung []time.Duration
		note := func(after time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			rung = append(rung, after)
		}
		has := func(want ...time.Duration) {
			t.Helper()
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(rung, want) {
				t.Errorf("%v have rung, want %v", rung, want)
			}
		}
		set := map[time.Duration]*alarm{}
		for _, after := range []time.Duration{5, 9, 2, 7, 3, 8, 1} {
			after *= time.Second
			set[after] = a.at(start.Add(after), func() {
				if late := time.Since(start) - after; late != 0 {
					t.Errorf("the alarm after %v rang %v late", after, late)
				}
				note(after)
			})
		}
		for _, after := range []time.Duration{1, 3, 8, 9} { // the first, two of the middle, the last
			if !set[after*time.Second].stop() {
				t.Errorf("the alarm after %v s was not stopped", int(after))
			}
		}
		time.Sleep(6 * time.Second)
		synctest.Wait()
		has(2*time.Second, 5*time.Second)
		if set[2*time.Second].stop() || set[time.Second].stop() {
			t.Error("an alarm that has rung, or was stopped, was stopped")
		}
		// The timer has nothing to do any more, and is set again.
		if !set[7*time.Second].stop() {
			t.Error("the last alarm was not stopped")
		}
		time.Sleep(4 * time.Second)
		again := time.Now().Add(time.Second)
		a.at(again, func() { note(11 * time.Second) })
		time.Sleep(2 * time.Second)
		synctest.Wait()
		has(2*time.Second, 5*time.Second, 11*time.Second)
	})
}

// One that is due in the past rings at once.
func TestAlarms_Late(t *testing.T) {
	rung := make(chan struct{})
	new(alarms).at(time.Now().Add(-time.Hour), func() { close(rung) })
	<-rung
}

func BenchmarkAlarms(b *testing.B) {
	b.Run("alarm", func(b *testing.B) {
		var a alarms
		for b.Loop() {
			a.at(time.Now().Add(answerBound), func() {}).stop()
		}
	})
	b.Run("timer", func(b *testing.B) {
		for b.Loop() {
			time.AfterFunc(answerBound, func() {}).Stop()
		}
	})
}
