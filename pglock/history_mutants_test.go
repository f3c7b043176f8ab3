package pglock_test

import (
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
)

// playHurried takes one lease and frees it at once.
func (p *player) playHurried(string) {
	if token, ok := p.take("a"); ok {
		p.ask("a", token, "release")
	} else {
		p.think(2 * time.Millisecond)
	}
}

// playTardy renews what has run out.
func (p *player) playTardy(name string) {
	if token, ok := p.take(name); ok {
		wait(playTTL)
		p.ask(name, token, "renew")
	} else {
		p.think(playTTL / 40)
	}
}

// The checker refuses what clients are told by mutants.
func TestHistory_Mutants(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name      string
		mutant    string
		functions map[string]string
		play      func(*player, string)
	}{
		{"none, hurried", "", nil, (*player).playHurried},
		{"none, tardy", "", nil, (*player).playTardy},
		{"token of the proposed row", takeExcluded, map[string]string{"acquire": "mutant.acquire"}, (*player).playHurried},
		{"token drawn in a CTE", takeEarly, map[string]string{"acquire": "mutant.acquire"}, (*player).playHurried},
		{"renewal that revives", renewReviving, map[string]string{"renew": "mutant.renew"}, (*player).playTardy},
	} {
		t.Run(tt.name, func(t *testing.T) {
			want, tries := porcupine.Ok, 1
			if tt.mutant != "" {
				want, tries = porcupine.Illegal, 20 // by chance it may have answered right
			}
			var result porcupine.CheckResult
			for try := 0; try < tries && (try == 0 || result != want); try++ {
				h := newHistory(t, tt.functions)
				if tt.mutant != "" {
					mutate(t, h.pool, tt.mutant)
				}
				h.run(10, 3*playTTL/2, 1, 0, tt.play)
				calls := h.complete()
				began := time.Now()
				_, result = judge(t, calls)
				t.Logf("%d calls: %v, judged in %v as %v", len(calls), h.counts, time.Since(began), result)
			}
			if result != want {
				t.Errorf("the checker says %v, want %v", result, want)
			}
		})
	}
}
