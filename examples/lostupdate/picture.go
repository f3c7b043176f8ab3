package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/pawl-go/pawl/pglock"
)

// picture is a tale drawn: a lane each for the clients, the lease and the
// account, side by side, and below one another the events. A row is an event,
// whatever the time since the one before; the times stand beside it.
type picture struct {
	tale
	Lanes []label
	Bars  []bar
	Rows  []row
}

// The measures of a picture, in its own units.
const (
	pictureWidth = 408
	laneA        = 76
	laneLease    = 178
	laneB        = 274
	laneAccount  = 378
	leaseHalf    = 15 // of the width of its bars
	accountHalf  = 24
	pauseHalf    = 7
	barsTop      = 28
	firstRow     = 72
	rowHeight    = 37
)

// bar is a state that lasts.
type bar struct {
	X, Y, Width, Height int
	Class               string
	Texts               []label
}

// row is an event: a mark on the lane of who it happened to, perhaps an arrow
// from lane to lane, and few words.
type row struct {
	event
	Y      int
	After  string // the beginning, in seconds
	Words  string
	Mark   string // A, B: whose, and its shape; "": none
	MarkX  int
	Arrow  *arrow
	Labels []label
}

type arrow struct {
	From, To, Y int
	Class       string
	Stopped     bool // before it got there
}

// Head is the path of the arrow's head, or of what stopped it.
func (a arrow) Head() string {
	back := -7
	if a.To < a.From {
		back = 7
	}
	if a.Stopped {
		return fmt.Sprintf("M%d %dv20m4 -20v20", a.To+3, a.Y-10)
	}
	return fmt.Sprintf("M%d %dl%d -4v8z", a.To, a.Y, back)
}

type label struct {
	X, Y   int
	Anchor string // start, middle, end
	Class  string
	Text   string
}

// Upright says whether a label is read from below: beside a bar is no room.
func (l label) Upright() bool { return l.Class == "paused" }

func (r row) TimeY() int { return r.Y + 4 }

func (p picture) Width() int  { return pictureWidth }
func (p picture) Top() int    { return firstRow - rowHeight/2 }
func (p picture) Pitch() int  { return rowHeight }
func (p picture) Bottom() int { return p.Top() + rowHeight*len(p.Events) }
func (p picture) Height() int { return p.Bottom() + 6 }
func (p picture) Begin() int  { return barsTop }

// Title says how the story ends. A page is only written of a run in which each
// ended as it has to.
func (p picture) Title() string {
	if p.Story == fenced {
		return "With a fence the late write is refused"
	}
	return "Without a fence the late write wins"
}

func (p picture) Outcome() string { return outcome(p.tale) }
func (p picture) Lost() bool      { return p.Balance != p.Expected }

func draw(t tale) picture {
	p := picture{tale: t}
	for _, lane := range []label{{X: laneA, Text: "client A"}, {X: laneLease, Text: "lease"}, {X: laneB, Text: "client B"}, {X: laneAccount, Text: "account"}} {
		lane.Y, lane.Anchor, lane.Class = 16, "middle", "lane"
		p.Lanes = append(p.Lanes, lane)
	}
	for i, e := range t.Events {
		r := row{event: e, Y: firstRow + i*rowHeight,
			After: fmt.Sprintf("%.3f", e.At.Sub(t.Began).Seconds()), Words: strings.Join(describe(e), " ")}
		r.draw(e)
		p.Rows = append(p.Rows, r)
	}
	p.drawLease()
	p.drawAccount()
	p.drawPause()
	return p
}

func (r *row) draw(e event) {
	me := laneA
	if e.Actor == "B" {
		me = laneB
	}
	if e.Actor == "A" || e.Actor == "B" {
		r.Mark, r.MarkX = e.Actor, me
	}
	// The words stand beside the client, towards what it deals with.
	say := func(above, below string) {
		x, anchor := me+11, "start"
		if e.Actor == "B" && (e.Kind == held || e.Kind == granted || e.Kind == released) {
			x, anchor = me-11, "end"
		}
		r.label(x, -6, anchor, "said", above)
		r.label(x, 15, anchor, "more", below)
	}
	presents := ""
	if e.Fenced {
		presents = "with " + short(e.Token)
	}
	switch e.Kind {
	case granted:
		r.point(laneLease, me, leaseHalf, 8)
		say("token "+short(e.Token), "")
	case held:
		r.point(me, laneLease, 8, leaseHalf)
		say("wants it", about(e.Left)+" left")
	case released:
		r.point(me, laneLease, 8, leaseHalf)
		say("releases", "")
	case expired:
		r.label(laneLease-leaseHalf-5, -6, "end", "said", "expires")
	case read:
		r.point(laneAccount, me, accountHalf, 8)
		say(fmt.Sprintf("reads %d", e.Read), presents)
	case accepted:
		r.point(me, laneAccount, 8, accountHalf)
		say(fmt.Sprintf("writes %d", e.Written), presents)
		if late(e) {
			r.Arrow.Class = "harm"
			r.label(laneAccount-accountHalf-9, -6, "end", "harm", "accepted")
		}
	case refused:
		r.point(me, laneAccount, 8, accountHalf+13)
		r.Arrow.Class, r.Arrow.Stopped = "refused", true
		say(fmt.Sprintf("writes %d", e.Written), presents)
		r.label(laneAccount-accountHalf-16, -6, "end", "verdict", "refused")
		r.label(laneAccount-accountHalf-16, 15, "end", "verdict", short(e.Token)+" < "+short(e.Accepted))
	case believed:
		r.label(me+13, 5, "start", "said", "“I hold it”")
	case lost:
		r.label(me+13, 5, "start", "said", "“I lost it”")
	case stopped:
		r.label(me+13, 5, "start", "said", "SIGSTOP")
	case continued:
		r.label(me+13, 5, "start", "said", "SIGCONT")
	}
}

// about is a time in few characters.
func about(d time.Duration) string {
	if d < 10*time.Second {
		return fmt.Sprintf("%d ms", d.Milliseconds())
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

// short is a token in the room that there is: after a failover tokens have 15
// digits. In words they are whole.
func short(t pglock.Token) string {
	digits := fmt.Sprint(t)
	if len(digits) > 5 {
		return "…" + digits[len(digits)-3:]
	}
	return digits
}

// late says whether a write follows from what was read before the pause.
func late(e event) bool { return e.Kind == accepted && e.Read == 0 }

func (r *row) label(x, dy int, anchor, class, text string) {
	if text != "" {
		r.Labels = append(r.Labels, label{x, r.Y + dy, anchor, class, text})
	}
}

// point draws an arrow between two lanes, with room at both ends.
func (r *row) point(from, to, roomFrom, roomTo int) {
	if to < from {
		roomFrom, roomTo = -roomFrom, -roomTo
	}
	r.Arrow = &arrow{From: from + roomFrom, To: to - roomTo, Y: r.Y, Class: strings.ToLower(r.Mark)}
}

// stretch draws a bar from one height to another, and words in it.
func (p *picture) stretch(x, half, from, to int, class string, texts ...label) {
	if to > from {
		p.Bars = append(p.Bars, bar{x - half, from, 2 * half, to - from, class, texts})
	}
}

func (p *picture) drawLease() {
	var holder event
	since := 0
	end := func(y int) {
		if holder.Kind == granted {
			middle := (since + y) / 2
			p.stretch(laneLease, leaseHalf, since, y, "lease "+strings.ToLower(holder.Actor),
				label{laneLease, middle - 3, "middle", "holder", holder.Actor},
				label{laneLease, middle + 12, "middle", "token", short(holder.Token)})
		}
		holder = event{}
	}
	for i, e := range p.Events {
		switch y := p.Rows[i].Y; e.Kind {
		case granted:
			end(y)
			holder, since = e, y
		case expired, released:
			end(y)
		}
	}
	end(p.Bottom())
}

// drawAccount draws the balance, and at the fence the lowest token that it
// takes.
func (p *picture) drawAccount() {
	balance, since, class := int64(deposit), barsTop, ""
	highest := pglock.Token(0)
	words := []label{{laneAccount, since + 17, "middle", "balance", fmt.Sprint(balance)}}
	end := func(y int) {
		p.stretch(laneAccount, accountHalf, since, y, strings.TrimSpace("account "+class), words...)
	}
	for i, e := range p.Events {
		y := p.Rows[i].Y
		if e.Kind == accepted {
			end(y)
			balance, since, class = e.Written, y, strings.ToLower(e.Actor)
			if late(e) {
				class = "harm"
			}
			words = []label{{laneAccount, y + 17, "middle", "balance", fmt.Sprint(balance)}}
		}
		if e.Fenced && (e.Kind == read || e.Kind == accepted) && e.Token > highest {
			highest = e.Token
			at := y + 5
			if e.Kind == accepted {
				at = y + 32
			}
			words = append(words, label{laneAccount, at, "middle", "floor", "≥ " + short(highest)})
		}
	}
	end(p.Bottom())
}

func (p *picture) drawPause() {
	since := -1
	for i, e := range p.Events {
		switch {
		case e.Kind == stopped:
			since = i
		case e.Kind == continued && since >= 0:
			from, to := p.Rows[since].Y, p.Rows[i].Y
			p.stretch(laneA, pauseHalf, from, to, "pause", label{laneA - 14, (from + to) / 2, "middle", "paused",
				"paused for " + about(e.At.Sub(p.Events[since].At))})
		}
	}
}
