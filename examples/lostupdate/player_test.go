package main

import (
	"errors"
	"fmt"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
)

// player is what the controls show, and what the pictures do.
type player struct {
	Position, Last float64
	Button         string
	Loop           bool
	Shown          [][]bool // of each story, the events that are not veiled
	Captions       []string
}

func (b browser) player() player {
	b.Helper()
	return eval[player](b, `({
		Position: Number(document.querySelector("#player input").value),
		Last: Number(document.querySelector("#player input").max),
		Button: document.querySelector("[data-do=play]").ariaLabel,
		Loop: document.querySelector("[data-do=loop]").ariaPressed === "true",
		Shown: [...document.querySelectorAll(".picture")].map((picture) => {
			const veil = picture.querySelector(".veil").getBoundingClientRect().y;
			return [...picture.querySelectorAll("[data-kind] .at")].map((text) => text.getBoundingClientRect().y < veil);
		}),
		Captions: [...document.querySelectorAll(".caption")].map((caption) => caption.innerText),
	})`)
}

// is returns an error unless the page shows as many events as it should at a
// position, and says the last of them.
func (b browser) is(position float64) error {
	p, s := b.player(), b.look()
	if p.Position != position {
		return fmt.Errorf("it is at %v, want %v", p.Position, position)
	}
	for i, shown := range p.Shown {
		for j, shown := range shown {
			if want := j < int(position); shown != want {
				return fmt.Errorf("at %v event %d of story %d is shown: %v", position, j+1, i+1, shown)
			}
		}
		if position > 0 {
			row := s.Stories[i].Rows[min(int(position), len(s.Stories[i].Rows))-1]
			if want := row.After + " " + row.Who + " " + row.Words; p.Captions[i] != want {
				return fmt.Errorf("at %v it says %q, want %q", position, p.Captions[i], want)
			}
		}
	}
	return nil
}

func (b browser) at(t *testing.T, position float64) {
	t.Helper()
	if err := b.is(position); err != nil {
		t.Error(err)
	}
}

// keys presses every key that the player knows and returns an error at the
// first that doesn't do what it should.
func (b browser) keys() error {
	press := func(key string, position float64) error {
		b.do(chromedp.KeyEvent(key))
		return b.is(position)
	}
	if b.do(chromedp.KeyEvent(" ")); b.player().Button != "Play" {
		return errors.New("space does not pause it")
	}
	last := b.player().Last
	err := errors.Join(press(kb.End, last), press(kb.ArrowRight, last), press(kb.Home, 0), press(kb.ArrowLeft, 0))
	for n := 1.0; err == nil && n <= last; n++ {
		err = press(kb.ArrowRight, n)
	}
	if err = errors.Join(err, press(kb.ArrowLeft, last-1)); err != nil {
		return err
	}
	if b.do(chromedp.KeyEvent("l")); b.player().Loop {
		return errors.New("L does not end the loop")
	}
	if b.do(chromedp.KeyEvent(" ")); b.player().Button != "Pause" {
		return errors.New("space does not play it")
	}
	// With the slider in focus the keys do the same, and not twice.
	b.do(chromedp.Focus(chromedp.CSS("#player input")), chromedp.KeyEvent(kb.Home))
	return errors.Join(press(kb.ArrowRight, 1), press(kb.ArrowRight, 2))
}

// wait waits until an expression holds in the page.
func wait(b browser, expression string) {
	b.Helper()
	if _, err := chromedp.Run(b.ctx, chromedp.Poll[bool](expression)); err != nil {
		b.Fatalf("%v: %s", err, expression)
	}
}

// frames lets the page draw a few times.
func frames(b browser) {
	b.Helper()
	eval[bool](b, `(async () => { for (let n = 0; n < 5; n++) await new Promise(requestAnimationFrame); return true; })()`)
}

// overflow is by how much the page, or what is in a picture, is too wide.
func (b browser) overflow() int {
	b.Helper()
	return eval[int](b, `(() => {
		const wide = [document.documentElement.scrollWidth];
		for (const text of document.querySelectorAll(".picture text")) {
			wide.push(text.getBoundingClientRect().right - text.closest("svg").getBoundingClientRect().right + innerWidth);
		}
		return Math.ceil(Math.max(...wide) - document.documentElement.clientWidth);
	})()`)
}
