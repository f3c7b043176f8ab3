package main

import (
	"encoding/xml"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pawl-go/pawl/pglock"
)

// told is what a run is like.
func told() results {
	began := time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC)
	r := results{options: options{workers: 4, ops: 10, think: 5 * time.Millisecond, ttl: time.Second}, version: "15.18", began: began}
	for i, story := range stories {
		t := tale{Story: story, Began: began, Tokens: [2]pglock.Token{401, 402}, Balance: 900, Expected: 700, Accepted: true}
		late := event{Actor: "A", Kind: accepted, Token: 401, Written: 900}
		if i > 0 {
			t.Balance, t.Expected, t.Accepted = 800, 800, false
			late.Kind, late.Accepted, late.Error, late.State = refused, 402, "refused", "25P02"
		}
		for i, e := range []event{
			{Actor: "A", Kind: granted, Token: 401},
			{Actor: "A", Kind: read, Token: 401, Read: 1000},
			{Actor: "A", Kind: believed, Token: 401},
			{Actor: "A", Kind: stopped, Token: 401},
			{Actor: "B", Kind: held, Token: 401, Holder: "A", Left: 480 * time.Millisecond},
			{Actor: "lease", Kind: expired, Token: 401},
			{Actor: "B", Kind: granted, Token: 402},
			{Actor: "B", Kind: accepted, Token: 402, Read: 1000, Written: 800},
			{Actor: "B", Kind: released, Token: 402},
			{Actor: "A", Kind: continued, Token: 401},
			late,
			{Actor: "A", Kind: lost, Token: 401},
		} {
			e.At = began.Add(time.Duration(i+1) * 10 * time.Millisecond)
			e.Fenced = story == fenced && e.Actor != "lease" && e.Kind != stopped && e.Kind != continued
			t.Events = append(t.Events, e)
		}
		r.tales = append(r.tales, t)
	}
	return r
}

var number = regexp.MustCompile(`[0-9]+(\.[0-9]+)?`)

// The picture in the README is one that this program draws: it differs from
// another in nothing but numbers.
func TestPicture_OfTheReadme(t *testing.T) {
	t.Parallel()
	kept, err := os.ReadFile(filepath.Join("..", "..", "docs", "timeline.svg"))
	if err != nil {
		t.Fatal(err)
	}
	var drawn strings.Builder
	if err := writePicture(&drawn, told()); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{string(kept), drawn.String()} {
		for d := xml.NewDecoder(strings.NewReader(text)); ; {
			if _, err := d.Token(); err == io.EOF {
				break
			} else if err != nil {
				t.Fatal(err)
			}
		}
	}
	got, want := strings.Split(number.ReplaceAllString(string(kept), "#"), "\n"), strings.Split(number.ReplaceAllString(drawn.String(), "#"), "\n")
	for i := range max(len(got), len(want)) {
		if i >= len(got) || i >= len(want) || got[i] != want[i] {
			t.Fatalf("line %d is not as it is drawn now: go run ./examples/lostupdate -svg docs/timeline.svg", i+1)
		}
	}
}

// Every colour can be read where it is used, by day and by night: text by the
// 4.5 to 1 of WCAG 2, shapes by its 3 to 1.
func TestColours(t *testing.T) {
	t.Parallel()
	css, err := pageFiles.ReadFile("page/picture.css")
	if err != nil {
		t.Fatal(err)
	}
	schemes := strings.SplitAfter(string(css), "@media (prefers-color-scheme: dark)")
	if len(schemes) != 2 {
		t.Fatalf("%d schemes", len(schemes))
	}
	for i, scheme := range schemes {
		luminance := map[string]float64{}
		for _, m := range regexp.MustCompile(`--([a-z-]+): #(..)(..)(..);`).FindAllStringSubmatch(scheme, -1) {
			for j, weight := range []float64{0.2126, 0.7152, 0.0722} {
				n, err := strconv.ParseUint(m[2+j], 16, 8)
				if err != nil {
					t.Fatal(err)
				}
				luminance[m[1]] += weight * linear(float64(n)/255)
			}
		}
		for _, pair := range []struct {
			colour, on string
			least      float64
		}{
			{"ink", "card", 4.5}, {"ink", "paper", 4.5}, {"soft", "card", 4.5}, {"soft", "paper", 4.5}, {"harm", "card", 4.5},
			{"harm", "harm-tint", 4.5}, {"ink", "a-tint", 4.5}, {"ink", "b-tint", 4.5}, {"soft", "a-tint", 4.5},
			{"a", "card", 3}, {"b", "card", 3}, {"still", "card", 3}, {"still", "paper", 3},
		} {
			x, y := luminance[pair.colour], luminance[pair.on]
			if got := (max(x, y) + 0.05) / (min(x, y) + 0.05); got < pair.least {
				t.Errorf("scheme %d: %s on %s has a contrast of %.2f, want %v", i, pair.colour, pair.on, got, pair.least)
			}
		}
	}
}

func linear(c float64) float64 {
	if c <= 0.04045 {
		return c / 12.92
	}
	return math.Pow((c+0.055)/1.055, 2.4)
}
