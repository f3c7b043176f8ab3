// Report reads what go test -json prints and prints what a person wants to
// read: the closing line of each package, and of what failed everything. It
// exits 1 after a failure, and after a test that was skipped for a reason that
// -skips does not match: a rig that is missing by mistake looks like success.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
)

type event struct {
	Action, Package, Test, ImportPath, Output string
	Elapsed                                   float64
}

func main() {
	skips := flag.String("skips", "^$", "reasons for which tests may be skipped, a regular expression")
	flag.Parse()
	allowed := regexp.MustCompile(*skips)

	output := map[string][]string{} // of each test that has not ended
	failed := false
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			fmt.Println(lines.Text())
			continue
		}
		key := cmp.Or(e.Package, e.ImportPath) + " " + e.Test
		switch e.Action {
		case "output", "build-output":
			output[key] = append(output[key], e.Output)
			continue
		case "pass":
			if e.Test == "" {
				fmt.Print(closing(e, output[key]))
			}
		case "fail", "build-fail":
			failed = true
			for _, line := range output[key] {
				if !strings.HasPrefix(line, "=== ") {
					fmt.Print(line)
				}
			}
		case "skip":
			if reason := strings.Join(output[key], ""); e.Test != "" && !allowed.MatchString(reason) {
				failed = true
				fmt.Printf("unexpected skip of %s:\n%s", key, reason)
			}
		default:
			continue
		}
		delete(output, key)
	}
	// A package that ended without a word of its own, by a signal for example.
	for key, left := range output {
		failed = true
		fmt.Printf("%s did not end:\n%s", key, strings.Join(left, ""))
	}
	if err := lines.Err(); err != nil {
		fmt.Println(err)
		failed = true
	}
	if failed {
		os.Exit(1)
	}
}

// closing is the line that go test without flags prints of a package that
// passed; a test program that is run by itself prints none.
func closing(e event, output []string) string {
	for _, line := range output {
		if strings.HasPrefix(line, "ok  \t") {
			return line
		}
	}
	return fmt.Sprintf("ok  \t%s\t%.3fs\n", e.Package, e.Elapsed)
}
