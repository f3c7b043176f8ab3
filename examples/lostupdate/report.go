package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"

	"github.com/mattn/go-isatty"
)

// report is where a run goes as it happens.
type report interface {
	progress(format string, args ...any)
	begin(db *database, o options)
	tally(tally)
	beginTale(tale)
	event(tale, event)
	tale(tale)
	note(string)
	fail(error)
	verdict(results) error // nil: everything was shown
}

func newReport(o options, stdout *sink, stderr io.Writer) report {
	if o.json {
		return &jsonReport{lines: json.NewEncoder(stdout), stderr: stderr}
	}
	return &textReport{
		stdout: stdout, stderr: stderr,
		colour: os.Getenv("NO_COLOR") == "" && terminal(stdout.Writer),
		live:   terminal(stderr),
	}
}

// terminal says whether w understands escape sequences. The console of older
// Windows has to be told to, and is left alone.
func terminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && isatty.IsTerminal(f.Fd()) && os.Getenv("TERM") != "dumb" && runtime.GOOS != "windows"
}

// jsonReport prints results and nothing else; what people have to know goes to
// standard error.
type jsonReport struct {
	lines  *json.Encoder
	stderr io.Writer
}

func (*jsonReport) progress(string, ...any)  {}
func (*jsonReport) begin(*database, options) {}
func (*jsonReport) beginTale(tale)           {}
func (*jsonReport) event(tale, event)        {}

// An error to write ends the run by its sink.
func (r *jsonReport) tally(t tally) { _ = r.lines.Encode(t) }
func (r *jsonReport) tale(t tale)   { _ = r.lines.Encode(t) }

func (r *jsonReport) note(text string) { fmt.Fprintln(r.stderr, text) }
func (r *jsonReport) fail(err error)   { fmt.Fprintln(r.stderr, "lostupdate:", err) }

func (r *jsonReport) verdict(res results) error { return verdict(r, res) }

// verdict reports what a run failed to show.
func verdict(r report, res results) error {
	unshown := res.unshown()
	if len(unshown) == 0 {
		return nil
	}
	err := errors.New("not shown:\n  " + strings.Join(unshown, "\n  "))
	r.fail(err)
	return err
}
