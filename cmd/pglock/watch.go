package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
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
	status = found.At.UTC().Format("2006-01-02 15:04:05 MST") + status
	if columns > 0 {
		status = cut(status, columns)
	}
	frame.WriteString(status + "\n\n")
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
