package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	watchEvery = time.Second
	markFor    = 3 * watchEvery // how long a change stays marked
)

// watch lists again and again, until it is interrupted: that is how one ends it,
// and no failure.
func (a *app) watch(ctx context.Context, names []string) error {
	pool, err := a.connect(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	v := &view{app: a, marks: &marks{recent: map[string]mark{}, lines: map[string][]cell{}}}
	defer v.leave()
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	var known []string // of leases that have gone, too
	for {
		found, err := list(ctx, pool, names, known)
		switch {
		case ctx.Err() != nil:
			return interrupted(ctx)
		case found == nil && v.found == nil:
			return err
		case found == nil:
			err = v.show(v.found, err)
		default:
			known = slices.Compact(slices.Sorted(slices.Values(found.known)))
			err = v.show(found, nil)
		}
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return interrupted(ctx)
		case <-tick.C:
		}
	}
}

// interrupted is no error if it was Ctrl-C.
func interrupted(ctx context.Context) error {
	cause := context.Cause(ctx)
	if s, ok := errors.AsType[signalled](cause); ok && s.Signal == os.Interrupt {
		return nil
	}
	return cause
}

// view is what has been shown.
type view struct {
	*app
	marks          *marks
	found          *listing
	columns, lines int // of the terminal that is drawn on; zero: none is
}

// show draws the listing over the last one; where that is no terminal, it prints
// what has changed. failed is why it is not a new one.
func (v *view) show(found *listing, failed error) error {
	changed := v.marks.update(found, time.Now()) || v.found == nil
	v.found = found
	if v.output == "json" {
		if !changed {
			return nil
		}
		lines := json.NewEncoder(v.stdout)
		lines.SetEscapeHTML(false)
		return lines.Encode(found)
	}
	columns, lines := screen(v.stdout)
	if columns == 0 && !changed && failed == nil {
		return nil
	}
	var frame bytes.Buffer
	status := "  + new  - gone  * changed"
	if failed != nil {
		status = "  no answer: " + printable(oneLine(failed.Error()))
	}
	fmt.Fprintf(&frame, "%s%s\n\n", found.At.UTC().Format("2006-01-02 15:04:05 MST"), status)
	_ = write(&frame, found.parts(columns, v.marks), colours(v.stdout)) // a Buffer takes everything
	if columns == 0 {
		_, err := v.stdout.Write(frame.Bytes())
		return err
	}
	return v.draw(strings.Split(strings.TrimRight(frame.String(), "\n"), "\n"), columns, lines)
}

const (
	clear      = "\x1b[2J"
	home       = "\x1b[H"
	restOfLine = "\x1b[K"
	restBelow  = "\x1b[J"
	hideCursor = "\x1b[?25l"
	showCursor = "\x1b[?25h"
)

// draw writes lines over those that stand there, so that nothing flickers.
func (v *view) draw(text []string, columns, lines int) error {
	var out strings.Builder
	if columns != v.columns || lines != v.lines {
		out.WriteString(hideCursor + clear)
		v.columns, v.lines = columns, lines
	}
	if most := max(lines-1, 1); len(text) > most {
		more := len(text) - most + 1
		text = append(text[:most-1], fmt.Sprintf("… and %d lines more", more))
	}
	out.WriteString(home + strings.Join(text, restOfLine+"\r\n") + restOfLine + restBelow)
	_, err := fmt.Fprint(v.stdout, out.String())
	return err
}

// leave gives the terminal back, with the last listing on it.
func (v *view) leave() {
	if v.columns > 0 {
		_, _ = fmt.Fprint(v.stdout, "\r\n"+showCursor)
	}
}

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
