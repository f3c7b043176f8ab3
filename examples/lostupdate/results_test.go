package main

import (
	"strings"
	"testing"

	"github.com/pawl-go/pawl/pglock"
)

// The control must fail too, and where it can't the program says so.
func TestUnshown(t *testing.T) {
	t.Parallel()
	two := options{workers: 2, ops: 5}
	good := tale{Story: fenced, Tokens: [2]pglock.Token{1, 2}, Balance: 800, Expected: 800}
	tests := []struct {
		name string
		res  results
		want string
	}{
		{"nothing ran", results{options: two}, ""},
		{"control lost", results{options: two, tallies: []tally{{Strategy: none, Lost: 3}}}, ""},
		{"control kept", results{options: two, tallies: []tally{{Strategy: none}}}, "no withdrawal was lost without a lock"},
		{"control alone", results{options: options{workers: 1, ops: 5}, tallies: []tally{{Strategy: none}}}, ""},
		{"lock kept", results{options: two, tallies: []tally{{Strategy: "lease"}}}, ""},
		{"lock lost", results{options: two, tallies: []tally{{Strategy: "lease", Lost: 1}}}, "lease: 1 of 10"},
		{"lock doubled", results{options: two, tallies: []tally{{Strategy: "optimistic", Lost: -1}}}, "optimistic: -1 of 10"},
		{"story control won", results{tales: []tale{{Story: unfenced, Tokens: [2]pglock.Token{1, 2}, Accepted: true, Balance: 900, Expected: 700}}}, ""},
		{"story control refused", results{tales: []tale{{Story: unfenced, Tokens: [2]pglock.Token{1, 2}}}}, "unfenced: the stale write was not accepted"},
		{"fence refused", results{tales: []tale{good}}, ""},
		{"fence passed", results{tales: []tale{{Story: fenced, Tokens: good.Tokens, Accepted: true}}}, "fenced: the stale write was accepted"},
		{"fence lost", results{tales: []tale{{Story: fenced, Tokens: good.Tokens, Balance: 900, Expected: 800}}}, "fenced: the balance is 900"},
		{"tokens fell", results{tales: []tale{{Story: fenced, Tokens: [2]pglock.Token{2, 1}, Balance: 800, Expected: 800}}}, "token 1 was granted after 2"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			got := strings.Join(test.res.unshown(), "\n")
			if !strings.Contains(got, test.want) || (got == "") != (test.want == "") {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
