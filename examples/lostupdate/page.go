package main

import (
	"embed"
	"fmt"
	"html/template"
	"io"
	"runtime"
	"strings"
	"time"
)

//go:embed page
var pageFiles embed.FS

var pages = template.Must(template.New("").Funcs(template.FuncMap{
	"css": func() (template.CSS, error) {
		text, err := pageFiles.ReadFile("page/page.css")
		return template.CSS(text), err
	},
	"colours": func() (template.CSS, error) {
		text, err := pageFiles.ReadFile("page/picture.css")
		return template.CSS(text), err
	},
	"js": func() (template.JS, error) {
		text, err := pageFiles.ReadFile("page/page.js")
		return template.JS(text), err
	},
}).ParseFS(pageFiles, "page/*.html", "page/*.svg"))

// page is what the templates show.
type page struct {
	Workers, Ops, Withdrawals int
	Think, TTL                time.Duration
	Deposit, AmountA, AmountB int
	PostgreSQL, Go, System    string
	CPUs                      int
	Began                     time.Time
	Controlled                bool // the strategies ran, and also without a lock
	Strategies                []measured
	Stories                   []picture
}

// measured is a tally with the lengths of its bars, of 100.
type measured struct {
	tally
	LostBar, TimeBar float64
}

func newPage(r results) page {
	p := page{
		Workers: r.workers, Ops: r.ops, Withdrawals: r.workers * r.ops, Think: r.think, TTL: r.ttl,
		Deposit: deposit, AmountA: amountA, AmountB: amountB,
		PostgreSQL: r.version, Go: strings.TrimPrefix(runtime.Version(), "go"),
		System: runtime.GOOS + "/" + runtime.GOARCH, CPUs: runtime.NumCPU(), Began: r.began.UTC(),
	}
	slowest := int64(1)
	for _, t := range r.tallies {
		slowest = max(slowest, t.ElapsedMS)
	}
	for _, t := range r.tallies {
		p.Controlled = p.Controlled || t.Strategy == none
		p.Strategies = append(p.Strategies, measured{t,
			100 * float64(t.Lost) / float64(p.Withdrawals), 100 * float64(t.ElapsedMS) / float64(slowest)})
	}
	for _, t := range r.tales {
		p.Stories = append(p.Stories, draw(t))
	}
	return p
}

func (m measured) Seconds() string { return fmt.Sprintf("%.2f s", float64(m.ElapsedMS)/1000) }
func (m measured) Effort() string  { return effort(m.tally) }

// What follows are the measures of the stories side by side.

const (
	sheetMargin = 28
	sheetTop    = 58 // of the pictures, under their titles
)

func (p page) PictureX(i int) int { return sheetMargin + i*(pictureWidth+sheetMargin) }
func (p page) PictureY() int      { return sheetTop }
func (p page) SheetWidth() int    { return p.PictureX(len(p.Stories)) }
func (p page) SheetHeight() int   { return p.OutcomeY() + 56 }
func (p page) SourceY() int       { return p.OutcomeY() + 34 }

func (p page) OutcomeY() int {
	height := 0
	for _, s := range p.Stories {
		height = max(height, s.Height())
	}
	return sheetTop + height + 20
}

// writePage writes one page that needs nothing but itself.
func writePage(w io.Writer, r results) error {
	return pages.ExecuteTemplate(w, "page.html", newPage(r))
}

// writePicture writes the stories alone, for where no page can be shown.
func writePicture(w io.Writer, r results) error {
	return pages.ExecuteTemplate(w, "stories.svg", newPage(r))
}
