package pglock

import (
	"container/list"
	"sync"
	"time"
)

// alarms rings each alarm that is not stopped before its time, as time.AfterFunc does.
// It costs less where nearly all are stopped, as the bound of a call is: to set a timer
// of the runtime that is due before all others wakes the thread that waits for the
// network, which took a tenth of the time of a call that goes alone. One timer serves
// all here. It is left as it is when an alarm is stopped, and goes on to the first that
// is left when it is due.
//
// Those of one alarms are about as long as each other: a new one is looked for its place
// from the end of the line.
type alarms struct {
	mu    sync.Mutex
	line  list.List // of *alarm, by when
	timer *time.Timer
	due   time.Time // of the timer; zero: it is not set
}

type alarm struct {
	of    *alarms
	when  time.Time
	ring  func()
	place *list.Element // nil: stopped, or rung
}

// at sets an alarm. What it rings must not take long: others may be due.
func (a *alarms) at(when time.Time, ring func()) *alarm {
	a.mu.Lock()
	defer a.mu.Unlock()
	one := &alarm{of: a, when: when, ring: ring}
	before := a.line.Back()
	for before != nil && before.Value.(*alarm).when.After(when) {
		before = before.Prev()
	}
	if before != nil {
		one.place = a.line.InsertAfter(one, before)
	} else {
		one.place = a.line.PushFront(one)
	}
	if a.due.IsZero() || when.Before(a.due) {
		a.set(when)
	}
	return one
}

// set sets the timer. The mutex is held.
func (a *alarms) set(when time.Time) {
	a.due = when
	if a.timer == nil {
		a.timer = time.AfterFunc(time.Until(when), a.fire)
	} else {
		a.timer.Reset(time.Until(when))
	}
}

// fire rings what is due.
func (a *alarms) fire() {
	var due []*alarm
	a.mu.Lock()
	a.due = time.Time{}
	now := time.Now()
	for first := a.line.Front(); first != nil; first = a.line.Front() {
		one := first.Value.(*alarm)
		if one.when.After(now) {
			a.set(one.when)
			break
		}
		a.line.Remove(first)
		one.place = nil
		due = append(due, one)
	}
	a.mu.Unlock()
	for _, one := range due {
		one.ring()
	}
}

// stop says whether the alarm is stopped; else it has rung, or is about to.
func (one *alarm) stop() bool {
	one.of.mu.Lock()
	defer one.of.mu.Unlock()
	if one.place == nil {
		return false
	}
	one.of.line.Remove(one.place)
	one.place = nil
	return true
}
