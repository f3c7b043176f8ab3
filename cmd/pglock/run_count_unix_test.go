//go:build unix

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// increment reads a number, takes its time, and writes the next.
const increment = `#!/bin/sh
n=$(cat "$1")
sleep 0.003
echo $((n + 1)) > "$1"
`

// Two shells count in one file, each many times: under run the count is exact, and
// without it it is not. Those that try go on until one was refused.
func TestRun_TwoShellsCount(t *testing.T) {
	t.Parallel()
	dsn := pgtest.DSN(t)
	for _, tt := range []struct {
		what   string
		times  int
		loop   string // of one shell; the file is $1, the script $2, pglock $3
		counts func(tries, count, refused int) bool
	}{
		{"run", 100, `"$3" run counter -- "$2" "$1" || exit`, func(tries, count, _ int) bool { return count == tries }},
		{"try", 20, `"$3" run tried --try -- "$2" "$1" 2>/dev/null; case $? in 0) ;; 75) refused=$((refused + 1)); : >"$1.refused" ;; *) exit ;; esac
			[ $n -lt $most ] || [ -e "$1.refused" ] || most=$((n + 1))`,
			func(tries, count, refused int) bool { return count == tries-refused && refused > 0 && count > 0 }},
		{"control", 100, `"$2" "$1"`, func(tries, count, _ int) bool { return count < tries }},
	} {
		t.Run(tt.what, func(t *testing.T) {
			t.Parallel()
			times := tt.times
			if testing.Short() {
				times = min(times, 20)
			}
			dir, path := t.TempDir(), onPath(t)
			file, script := filepath.Join(dir, "count"), filepath.Join(dir, "increment.sh")
			for name, text := range map[string]string{file: "0\n", script: increment} {
				if err := os.WriteFile(name, []byte(text), 0o755); err != nil {
					t.Fatal(err)
				}
			}
			loop := fmt.Sprintf(`refused=0; n=0; most=%d; while [ $n -lt $most ]; do n=$((n + 1)); %s; done; echo $n $refused`, times, tt.loop)
			type outcome struct{ tries, refused int }
			outcomes := make(chan outcome, 2)
			for range 2 {
				go func() {
					ctx, cancel := context.WithTimeout(context.Background(), 10*limit)
					defer cancel()
					var o outcome
					out, err := shell(ctx, dsn, loop, file, script, path)
					if _, scanErr := fmt.Sscan(out, &o.tries, &o.refused); err != nil || scanErr != nil {
						t.Errorf("%v: %s", err, out)
					}
					outcomes <- o
				}()
			}
			one, other := <-outcomes, <-outcomes
			tries, refused := one.tries+other.tries, one.refused+other.refused
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var count int
			if _, err := fmt.Sscan(string(text), &count); err != nil {
				t.Fatal(err)
			}
			t.Logf("%d tries: counted %d, refused %d", tries, count, refused)
			if !tt.counts(tries, count, refused) {
				t.Errorf("counted %d in %d tries, refused %d", count, tries, refused)
			}
		})
	}
}
