package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// marks are the changes from one listing to the next. A nil *marks marks nothing.
type marks struct {
	states map[string]string // of the last listing, by key
	recent map[string]mark
	lines  map[string][]cell // as last shown, for what is gone
}

type mark struct {
	sign  string
	until time.Time
}

// update compares with the listing before and says whether anything differs.
func (m *marks) update(found *listing, now time.Time) (changed bool) {
	states := found.states()
	maps.DeleteFunc(m.recent, func(_ string, k mark) bool { return now.After(k.until) })
	set := func(key, sign string) {
		changed = true
		m.recent[key] = mark{sign, now.Add(markFor)}
	}
	if m.states != nil {
		for key, state := range states {
			if before, known := m.states[key]; !known {
				set(key, "+")
			} else if before != state {
				set(key, "*")
			}
		}
		for key, state := range m.states {
			if _, still := states[key]; still {
				continue
			}
			if kind, _, _ := strings.Cut(key, "\x00"); found.seen(kind + "\x00") {
				set(key, "-")
			} else {
				states[key] = state
			}
		}
	}
	m.states = states
	return changed
}

func (m *marks) colour(key string) colour {
	if m == nil {
		return plain
	}
	switch m.recent[key].sign {
	case "+":
		return green
	case "*":
		return yellow
	}
	return plain
}

// mark puts a column of signs before a table whose lines have these keys, and at
// its end what has gone of that kind.
func (m *marks) mark(t *table, kind string, keys []string) *table {
	if m == nil {
		return t
	}
	marked := newTable(append([]string{" "}, t.head...)...)
	for i, line := range t.lines {
		m.lines[keys[i]] = line
		marked.add(append([]cell{{m.recent[keys[i]].sign, m.colour(keys[i])}}, line...)...)
	}
	for _, key := range slices.Sorted(maps.Keys(m.recent)) {
		if m.recent[key].sign != "-" || !strings.HasPrefix(key, kind) {
			continue
		}
		gone := []cell{{"-", red}}
		for _, c := range m.lines[key] {
			gone = append(gone, c.in(faint))
		}
		marked.add(gone...)
	}
	return marked
}

// The kinds of keys, which a name can't have in it.
const (
	leaseKind = "lease\x00"
	lockKind  = "lock\x00"
	tableKind = "table\x00"
)

func (l listedLease) key() string { return leaseKind + l.Name }
func (w listedWaiter) key(lease string) string {
	return leaseKind + lease + "\x00" + strconv.FormatInt(w.Ticket, 10)
}
func (l listedLock) key() string {
	return fmt.Sprintf("%s%d\x00%s\x00%d\x00%t", lockKind, l.Sub, l.Key, l.Pid, l.Shared)
}
func (p protectedTable) key() string { return tableKind + p.Table }

// keys are those of the lines that parts makes, by kind.
func (found *listing) keys(kind string) (keys []string) {
	switch kind {
	case leaseKind:
		for _, l := range found.Leases {
			keys = append(keys, l.key())
			for _, w := range l.Waiters {
				keys = append(keys, w.key(l.Name))
			}
		}
	case lockKind:
		for _, l := range found.Locks {
			keys = append(keys, l.key())
		}
	case tableKind:
		for _, p := range found.Protected {
			keys = append(keys, p.key())
		}
	}
	return keys
}

// seen says whether there was an answer about a kind.
func (found *listing) seen(kind string) bool {
	switch kind {
	case leaseKind:
		return found.Leases != nil
	case lockKind:
		return found.Locks != nil
	}
	return found.Protected != nil
}

// states are what a change of is marked. A renewal is none.
func (found *listing) states() map[string]string {
	states := map[string]string{}
	for _, l := range found.Leases {
		states[l.key()] = fmt.Sprint(l.Token, l.Remaining <= 0)
		for _, w := range l.Waiters {
			states[w.key(l.Name)] = ""
		}
	}
	for _, l := range found.Locks {
		states[l.key()] = fmt.Sprint(l.Granted)
	}
	for _, p := range found.Protected {
		states[p.key()] = fmt.Sprint(p.Pattern, p.Enabled, p.Gaps)
	}
	return states
}
