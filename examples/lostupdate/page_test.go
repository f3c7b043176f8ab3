package main

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// recorded is a run with -html, as -json has it, and the page.
func recorded(t *testing.T) (r results, path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "timeline.html")
	code, stdout, stderr := demo(t, "-json", "-html="+path, "-dsn="+pgtest.EmptyDSN(t))
	if code != 0 || stderr != "Written to "+path+"\n" {
		t.Fatalf("exit %d, standard error %q", code, stderr)
	}
	for line := range strings.Lines(stdout) {
		var err error
		if strings.Contains(line, `"strategy"`) {
			r.tallies = append(r.tallies, tally{})
			err = json.Unmarshal([]byte(line), &r.tallies[len(r.tallies)-1])
		} else {
			r.tales = append(r.tales, tale{})
			err = json.Unmarshal([]byte(line), &r.tales[len(r.tales)-1])
		}
		if err != nil {
			t.Fatalf("%q: %v", line, err)
		}
	}
	r.options = options{workers: 4, ops: 10, think: 5 * time.Millisecond, ttl: time.Second}
	return r, path
}

// seen is what a page shows.
type seen struct {
	Stories    []seenStory
	Strategies [][]string // the cells of each row
}

type seenStory struct {
	Story, Began, Title string
	Outcomes            []string // at the picture, at the table
	Rows                []seenRow
}

type seenRow struct {
	Kind, At, After, Who, Words, Token string // in the table
	Drawn, Text                        string // in the picture, its kind and its words
	Y                                  float64
}

const lookAt = `({
	Stories: [...document.querySelectorAll(".story")].map((figure) => {
		const table = document.getElementById(figure.dataset.story);
		const drawn = [...figure.querySelectorAll(".picture [data-kind]")];
		return {
			Story: figure.dataset.story, Began: table.dataset.began, Title: figure.querySelector("h2").innerText,
			Outcomes: [figure.querySelector(".outcome").innerText.slice(2), table.tFoot.innerText.trim()],
			Rows: [...table.tBodies[0].rows].map((row, n) => ({
				Kind: row.dataset.kind, At: row.querySelector("time").dateTime,
				After: row.cells[0].innerText, Who: row.cells[1].innerText, Words: row.cells[2].innerText, Token: row.cells[3].innerText,
				Drawn: drawn[n].dataset.kind, Text: [...drawn[n].querySelectorAll("text")].map((text) => text.textContent).join(" "),
				Y: drawn[n].querySelector("text").getBoundingClientRect().y,
			})),
		};
	}),
	Strategies: [...document.querySelectorAll(".chart tbody tr")].map((row) => [...row.cells].map((cell) => cell.innerText)),
})`

// faults says where a page differs from what happened, and where its stories
// are not the ones that it is to tell.
func (s seen) faults(r results) (list []string) {
	fault := func(format string, args ...any) { list = append(list, fmt.Sprintf(format, args...)) }
	same := func(what string, got, want any) {
		if got := fmt.Sprint(got); got != fmt.Sprint(want) {
			fault("%s: %q, want %q", what, got, want)
		}
	}
	same("stories", len(s.Stories), len(r.tales))
	for i, story := range s.Stories[:min(len(s.Stories), len(r.tales))] {
		t := r.tales[i]
		same("story", story.Story, t.Story)
		same("beginning of "+t.Story, story.Began, t.Began.Format(time.RFC3339Nano))
		same("outcomes of "+t.Story, story.Outcomes, []string{outcome(t), outcome(t)})
		same("events of "+t.Story, len(story.Rows), len(t.Events))
		for j, row := range story.Rows[:min(len(story.Rows), len(t.Events))] {
			e := t.Events[j]
			what := fmt.Sprintf("%s, event %d, ", t.Story, j+1)
			after := fmt.Sprintf("%.3f", e.At.Sub(t.Began).Seconds())
			same(what+"kind", row.Kind, e.Kind)
			same(what+"kind in the picture", row.Drawn, e.Kind)
			same(what+"time", row.At, e.At.Format(time.RFC3339Nano))
			same(what+"time since the beginning", row.After, after+" s")
			same(what+"who", row.Who, e.Actor)
			same(what+"token", row.Token, e.Token)
			same(what+"words", row.Words, strings.Join(describe(e), " "))
			if !strings.HasPrefix(row.Text, after) {
				fault("%stime in the picture: %q, want %q", what, row.Text, after)
			}
			if j > 0 && row.Y <= story.Rows[j-1].Y {
				fault("%sis drawn above the one before", what)
			}
		}
		list = append(list, story.wrong()...)
	}
	same("strategies", len(s.Strategies), len(r.tallies))
	for i, row := range s.Strategies[:min(len(s.Strategies), len(r.tallies))] {
		t := r.tallies[i]
		same("row of "+t.Strategy, row[:3], []string{t.Strategy, fmt.Sprint(t.Lost), fmt.Sprintf("%.2f s", float64(t.ElapsedMS)/1000)})
	}
	return list
}

// wrong says what a story doesn't tell: that the late write comes after the
// takeover and the write of who took over, with the lower token, and what
// becomes of it. It goes by the page alone.
func (s seenStory) wrong() (list []string) {
	find := func(kind kind, who string) int {
		return slices.IndexFunc(s.Rows, func(r seenRow) bool { return r.Kind == string(kind) && r.Who == who })
	}
	token := func(row int) int64 {
		n, _ := strconv.ParseInt(s.Rows[row].Token, 10, 64)
		return n
	}
	ending := accepted
	if s.Story == fenced {
		ending = refused
	}
	order := []int{find(granted, "A"), find(stopped, "A"), find(granted, "B"), find(accepted, "B"), find(continued, "A"), find(ending, "A")}
	if order[0] < 0 || !slices.IsSorted(order) {
		return []string{fmt.Sprintf("%s: grant, stop, takeover, write, continue and late write are events %v", s.Story, order)}
	}
	old, late := token(order[2]), token(order[5])
	if late <= 0 || late >= old {
		list = append(list, fmt.Sprintf("%s: the late write has token %d after the takeover with %d", s.Story, late, old))
	}
	drawn := s.Rows[order[5]].Text
	want := "refused " + short(pglock.Token(late)) + " < " + short(pglock.Token(old))
	if s.Story == unfenced {
		want = "accepted"
	}
	if !strings.HasSuffix(drawn, want) {
		list = append(list, fmt.Sprintf("%s: the late write is drawn as %q, want %q", s.Story, drawn, want))
	}
	return list
}

func (b browser) look() seen {
	b.Helper()
	return eval[seen](b, lookAt)
}

func TestPage(t *testing.T) {
	t.Parallel()
	of := newBrowser(t)
	r, path := recorded(t)

	t.Run("loads", func(t *testing.T) {
		b := of.on(t)
		for _, s := range []screen{desktop, {width: 375, height: 812, dark: true, still: true}} {
			b.open(path, s)
			for _, complaint := range b.complained() {
				t.Error(complaint)
			}
		}
	})
	t.Run("complains", func(t *testing.T) { // the control of loads
		b := of.on(t)
		bad := filepath.Join(t.TempDir(), "bad.html")
		save(t, bad, `<!doctype html><img src="nothing.png"><script>console.log(1); missing()</script>`)
		b.open(bad, desktop)
		got := strings.Join(b.complained(), "\n")
		for _, want := range []string{"nothing.png", "console: log", "missing is not defined"} {
			if !strings.Contains(got, want) {
				t.Errorf("complained of %q, and not of %q", got, want)
			}
		}
	})
	t.Run("shows the run", func(t *testing.T) {
		b := of.on(t)
		b.open(path, desktop)
		for _, fault := range b.look().faults(r) {
			t.Error(fault)
		}
	})
	t.Run("keys", func(t *testing.T) {
		b := of.on(t)
		b.open(path, desktop)
		if err := b.keys(); err != nil {
			t.Error(err)
		}
	})
	t.Run("no keys", func(t *testing.T) { // the control of keys
		b := of.on(t)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for from, to := range map[string]string{
			"ArrowRight:": "ArrowUp:", "Home:": "Begin:", `" ":`: `"_":`,
			`story.veil.setAttribute("y"`: `story.veil.setAttribute("z"`,
		} {
			deaf := filepath.Join(t.TempDir(), "deaf.html")
			save(t, deaf, strings.ReplaceAll(string(text), from, to))
			b.open(deaf, desktop)
			if err := b.keys(); err == nil {
				t.Errorf("nothing was wrong with %s for %s", to, from)
			}
		}
	})
	t.Run("mouse", func(t *testing.T) {
		b := of.on(t)
		b.open(path, desktop)
		b.do(chromedp.Click(chromedp.CSS(`[data-do="play"]`)), chromedp.Click(chromedp.CSS(`[data-do="back"]`)))
		b.at(t, 0)
		b.do(chromedp.Click(chromedp.CSS(`[data-do="forward"]`)))
		b.at(t, 1)
		b.do(chromedp.Click(chromedp.CSS(`#player input`))) // its middle
		if got, half := b.player().Position, float64(len(r.tales[0].Events))/2; math.Abs(got-half) > 0.5 {
			t.Errorf("a click in the middle of the slider went to %v, want about %v", got, half)
		}
		third := eval[[2]float64](b, `(() => { const at = document.querySelectorAll(".picture [data-kind]")[2].getBoundingClientRect(); return [at.x + 5, at.y + 5]; })()`)
		b.do(chromedp.MouseClickXY(third[0], third[1]))
		b.at(t, 3)
		b.do(chromedp.Click(chromedp.CSS(`[data-do="loop"]`)))
		if b.player().Loop {
			t.Error("it loops after a click on Loop")
		}
	})
	t.Run("plays and loops", func(t *testing.T) {
		b := of.on(t)
		b.open(path, desktop)
		if p := b.player(); p.Button != "Pause" {
			t.Errorf("the button says %q: it does not play by itself", p.Button)
		}
		wait(b, `Number(document.querySelector("#player input").value) > 0.2`)
		b.do(chromedp.KeyEvent(kb.End), chromedp.KeyEvent(kb.ArrowLeft), chromedp.KeyEvent(" "))
		wait(b, `document.querySelector("#player input").value === document.querySelector("#player input").max`)
		wait(b, `Number(document.querySelector("#player input").value) < 1`)
		if p := b.player(); p.Button != "Pause" {
			t.Errorf("the button says %q after a round", p.Button)
		}
	})
	t.Run("reduced motion", func(t *testing.T) {
		b := of.on(t)
		b.open(path, screen{width: 1280, height: 900, still: true})
		frames(b)
		if p := b.player(); p.Button != "Play" || p.Position != p.Last {
			t.Errorf("it is not still at the end: %+v", p)
		}
		b.do(chromedp.KeyEvent(kb.Home))
		frames(b)
		b.at(t, 0)
		// The control: where motion is welcome the same look sees it.
		b.open(path, desktop)
		frames(b)
		if p := b.player(); p.Button != "Pause" || p.Position == p.Last {
			t.Errorf("it is still: %+v", p)
		}
	})
	t.Run("narrow", func(t *testing.T) {
		b := of.on(t)
		for _, width := range []int64{375, 320} {
			b.open(path, screen{width: width, height: 812, still: true})
			if over := b.overflow(); over > 0 {
				t.Errorf("at %d it is %d too wide", width, over)
			}
		}
		const epoch = 200_000_000 << 22 // where tokens begin after a failover
		long := doctored(told(), func(t *tale) {
			for i := range t.Events {
				t.Events[i].Token += epoch
				t.Events[i].Accepted += epoch
			}
		})
		b.open(render(t, long), screen{width: 375, height: 812, still: true})
		if over, faults := b.overflow(), b.look().faults(long); over > 0 || len(faults) > 0 {
			t.Errorf("with long tokens it is %d too wide, %v", over, faults)
		}
		eval[bool](b, `document.querySelector("main").append(Object.assign(document.createElement("pre"), {textContent: "x".repeat(80)})) ?? true`)
		if b.overflow() <= 0 {
			t.Error("a wide line is not seen to be too wide")
		}
	})
	t.Run("dark", func(t *testing.T) {
		b := of.on(t)
		colours := func(dark bool) string {
			b.open(path, screen{width: 1280, height: 900, dark: dark, still: true})
			return eval[string](b, `["body", ".story", ".story h2", ".picture .at", ".picture .bar.harm rect"].map((of) => {
				const style = getComputedStyle(document.querySelector(of));
				return style.color + style.backgroundColor + style.fill;
			}).join("\n")`)
		}
		light, dark := strings.Split(colours(false), "\n"), strings.Split(colours(true), "\n")
		for i := range light {
			if light[i] == dark[i] {
				t.Errorf("%s is the same in the dark", light[i])
			}
		}
	})
	t.Run("stories of unequal length", func(t *testing.T) {
		b := of.on(t)
		uneven := told()
		at := &uneven.tales[0].Events
		*at = slices.DeleteFunc(*at, func(e event) bool { return e.Kind == held || e.Kind == expired }) // as when B comes late
		b.open(render(t, uneven), desktop)
		if faults := b.look().faults(uneven); len(faults) > 0 {
			t.Error(faults)
		}
		if err := b.keys(); err != nil {
			t.Error(err)
		}
	})
	t.Run("without a script", func(t *testing.T) {
		b := of.on(t)
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		plain := filepath.Join(t.TempDir(), "plain.html")
		save(t, plain, regexp.MustCompile(`(?s)<script>.*</script>`).ReplaceAllString(string(text), ""))
		b.open(plain, desktop)
		for _, fault := range b.look().faults(r) {
			t.Error(fault)
		}
		if shown := eval[bool](b, `document.querySelector(".controls").checkVisibility()`); shown {
			t.Error("it has controls that do nothing")
		}
	})
	// The control of all that is compared: a page of something else.
	for name, falsify := range map[string]func(t *tale){
		"token":        func(t *tale) { t.Events[len(t.Events)-2].Token += 2 },
		"time":         func(t *tale) { t.Events[3].At = t.Events[3].At.Add(time.Millisecond) },
		"nanosecond":   func(t *tale) { t.Events[3].At = t.Events[3].At.Add(1) },
		"order":        func(t *tale) { t.Events[1], t.Events[2] = t.Events[2], t.Events[1] },
		"event less":   func(t *tale) { t.Events = t.Events[:len(t.Events)-1] },
		"balance":      func(t *tale) { t.Balance++ },
		"other ending": func(t *tale) { t.Events[len(t.Events)-2].Kind = accepted },
	} {
		t.Run("false "+name, func(t *testing.T) {
			b := of.on(t)
			other := doctored(r, falsify)
			b.open(render(t, other), desktop)
			if faults := b.look().faults(r); len(faults) == 0 {
				t.Error("it was not noticed")
			}
		})
	}
	// The control of the stories: what the page shows did happen, and is not what
	// is to be told.
	for name, happened := range map[string]func(t *tale){
		"no lower token":   func(t *tale) { t.Events[len(t.Events)-2].Token += 2 },
		"late write first": func(t *tale) { late := len(t.Events) - 2; move(t.Events, late, 2) },
		"takeover last":    func(t *tale) { move(t.Events, slices.IndexFunc(t.Events, takeover), len(t.Events)-1) },
		"nothing late":     func(t *tale) { t.Events = t.Events[:len(t.Events)-2] },
		"accepted, refused": func(t *tale) {
			e := &t.Events[len(t.Events)-2]
			e.Kind = map[kind]kind{accepted: refused, refused: accepted}[e.Kind]
		},
	} {
		t.Run("wrong story, "+name, func(t *testing.T) {
			b := of.on(t)
			wrong := doctored(r, happened)
			b.open(render(t, wrong), desktop)
			s := b.look()
			if len(s.Stories) != 2 {
				t.Fatalf("%d stories", len(s.Stories))
			}
			for _, story := range s.Stories {
				if len(story.wrong()) == 0 {
					t.Errorf("%s: it was not noticed", story.Story)
				}
			}
		})
	}
	for _, complaint := range of.complained() {
		t.Error(complaint)
	}
}

func takeover(e event) bool { return e.Kind == granted && e.Actor == "B" }

// move takes an event to another place.
func move(events []event, from, to int) {
	e := events[from]
	copy(events[from:], events[from+1:])
	copy(events[to+1:], events[to:len(events)-1])
	events[to] = e
}

func doctored(r results, how func(*tale)) results {
	r.tales = slices.Clone(r.tales)
	for i := range r.tales {
		r.tales[i].Events = slices.Clone(r.tales[i].Events)
		how(&r.tales[i])
	}
	return r
}

func render(t testing.TB, r results) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "page.html")
	var page strings.Builder
	if err := writePage(&page, r); err != nil {
		t.Fatal(err)
	}
	save(t, path, page.String())
	return path
}

func save(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
