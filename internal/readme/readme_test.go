// Package readme tests what the README says: that its code is code which
// compiles, that what it names exists, and that another module can use this one
// in the way that it shows.
package readme

import (
	"fmt"
	"go/format"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// root is the repository's.
const root = "../.."

func text(t testing.TB) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// block is a piece of code between fences.
type block struct {
	line     int
	language string
	mark     string // of the comment on the line before, "": none
	lines    []string
}

func (b block) String() string { return strings.Join(b.lines, "\n") }

var mark = regexp.MustCompile(`^<!-- (.+) -->$`)

// blocks splits a README into its code and its prose.
func blocks(readme string) (code []block, prose string) {
	var open *block
	var rest []string
	before := ""
	for i, line := range strings.Split(readme, "\n") {
		language, fence := strings.CutPrefix(line, "```")
		switch {
		case fence && open != nil:
			code, open = append(code, *open), nil
		case fence:
			open = &block{line: i + 1, language: language}
			if m := mark.FindStringSubmatch(before); m != nil {
				open.mark = m[1]
			}
		case open != nil:
			open.lines = append(open.lines, line)
		default:
			rest = append(rest, line)
		}
		before = line
	}
	return code, strings.Join(rest, "\n")
}

// marked is the one block with that mark.
func marked(t testing.TB, want string) block {
	t.Helper()
	code, _ := blocks(text(t))
	i := slices.IndexFunc(code, func(b block) bool { return b.mark == want })
	if i < 0 {
		t.Fatalf("the README has no code marked <!-- %s -->", want)
	}
	return code[i]
}

var (
	inline = regexp.MustCompile("`[^`\n]+`")
	link   = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	// A name of one of the packages, or of the schema, with a method or a field.
	qualified = regexp.MustCompile(`\b(pglock|pglockotel|optimistic|migrations)\.([A-Za-z_]\w*)(\.[A-Z]\w*)?`)
	method    = regexp.MustCompile("^`([A-Z]\\w*\\.[A-Z]\\w*)(\\(.*\\))?`$")
	testName  = regexp.MustCompile(`Test[A-Z]\w*`)
	variable  = regexp.MustCompile(`PGLOCK_[A-Z_]*[A-Z]`)
	folder    = regexp.MustCompile(`(?:^|\s)\./(\w[\w/]*)`)
)

// faults says what is not so in a page of that folder of the repository.
func faults(readme, dir string, k known) (faults []string) {
	fault := func(format string, args ...any) { faults = append(faults, fmt.Sprintf(format, args...)) }
	code, prose := blocks(readme)
	for _, b := range code {
		if b.language == "go" {
			if err := k.excerpt(b); err != nil {
				fault("line %d: %v", b.line, err)
			}
		}
		for _, m := range folder.FindAllStringSubmatch(b.String(), -1) {
			if _, err := os.Stat(filepath.Join(root, m[1])); err != nil {
				fault("line %d: %v", b.line, err)
			}
		}
	}
	for _, m := range qualified.FindAllStringSubmatch(readme, -1) {
		if !k.names[m[0]] && !k.objects[m[0]] {
			fault("there is no %s", m[0])
		}
	}
	for _, quoted := range inline.FindAllString(prose, -1) {
		if m := method.FindStringSubmatch(quoted); m != nil && !k.names["pglock."+m[1]] && !k.names["optimistic."+m[1]] {
			fault("there is no %s", m[1])
		}
	}
	for _, name := range testName.FindAllString(readme, -1) {
		if !k.tests[name] {
			fault("there is no test %s", name)
		}
	}
	for _, name := range variable.FindAllString(readme, -1) {
		if !k.variables[name] {
			fault("nothing sets or reads %s", name)
		}
	}
	for _, m := range link.FindAllStringSubmatch(prose, -1) {
		path, anchor, _ := strings.Cut(m[1], "#")
		switch {
		case strings.Contains(path, "://"):
		case path == "":
			if !slices.Contains(anchors(prose), anchor) {
				fault("no heading is #%s", anchor)
			}
		default:
			to, err := os.Stat(filepath.Join(root, dir, path))
			if err != nil {
				fault("link: %v", err)
			} else if anchor != "" && !to.IsDir() {
				other, _ := os.ReadFile(filepath.Join(root, dir, path)) // it is there
				_, prose := blocks(string(other))
				if !slices.Contains(anchors(prose), anchor) {
					fault("no heading of %s is #%s", path, anchor)
				}
			}
		}
	}
	return faults
}

// anchors are the headings as links spell them.
func anchors(prose string) (all []string) {
	for line := range strings.Lines(prose) {
		if heading, ok := strings.CutPrefix(strings.TrimLeft(line, "#"), " "); ok && line[0] == '#' {
			heading = regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(strings.ToLower(strings.TrimSpace(heading)), "")
			all = append(all, strings.ReplaceAll(heading, " ", "-"))
		}
	}
	return all
}

// excerpt returns an error unless the block stands, line by line, in the body
// of the Example that it is marked with.
func (k known) excerpt(b block) error {
	name, ok := strings.CutPrefix(b.mark, "from ")
	if !ok {
		return fmt.Errorf("Go code without <!-- from Example… --> before it")
	}
	body, ok := k.examples[name]
	if !ok {
		return fmt.Errorf("there is no %s", name)
	}
	if formatted, err := format.Source([]byte(b.String())); err != nil {
		return fmt.Errorf("excerpt of %s: %w", name, err)
	} else if string(formatted) != b.String() {
		return fmt.Errorf("excerpt of %s is not as gofmt has it", name)
	}
	want := unindented(b.lines)
	for i := range body {
		if len(want) > 0 && i+len(want) <= len(body) && slices.Equal(body[i:i+len(want)], want) {
			return nil
		}
	}
	return fmt.Errorf("these lines are not in the body of %s", name)
}

func unindented(lines []string) []string {
	flush := make([]string, len(lines))
	for i, line := range lines {
		flush[i] = strings.TrimSpace(line)
	}
	return flush
}

func TestReadme(t *testing.T) {
	t.Parallel()
	readme, k := text(t), learn(t)
	for _, fault := range faults(readme, ".", k) {
		t.Error(fault)
	}
	code, _ := blocks(readme)
	for _, want := range []string{
		"ExampleLockRow", "ExampleLockTx", "ExampleClient_WithLock", "ExampleClient_WithLease", "ExampleFence",
		"ExampleTable_Update", "ExampleNew", "Example_migrate",
	} {
		if !slices.ContainsFunc(code, func(b block) bool { return b.mark == "from "+want }) {
			t.Errorf("it shows nothing of %s", want)
		}
	}
}

// Each kind of fault that TestReadme looks for is found in a short README that is
// right but for that.
func TestReadme_Doctored(t *testing.T) {
	t.Parallel()
	k := learn(t)
	first := marked(t, "from ExampleLockRow")
	row, from := first.String(), "<!-- from ExampleLockRow -->"
	readme := "# Pawl\n\nTake `pglock.LockRow`.\n\n" + from + "\n```go\n" + row + "\n```\n"
	if found := faults(readme, ".", k); len(found) > 0 {
		t.Fatalf("found %q before it was doctored", found)
	}
	for name, tt := range map[string]struct{ old, new, want string }{
		"other code":        {row, strings.Replace(row, "10", "11", 1), "are not in the body"},
		"a line less":       {row, strings.Join(slices.Delete(slices.Clone(first.lines), 1, 2), "\n"), "ExampleLockRow"},
		"not as gofmt":      {row, strings.ReplaceAll(row, "\t", "  "), "gofmt"},
		"no mark":           {from, "", "without <!--"},
		"no such Example":   {from, "<!-- from ExampleNothing -->", "no ExampleNothing"},
		"function":          {"", "`pglock.Fense`", "no pglock.Fense"},
		"method":            {"", "`Lease.Gard`", "no Lease.Gard"},
		"qualified method":  {"", "`pglock.Lease.Gard`", "no pglock.Lease.Gard"},
		"unexported":        {"", "`optimistic.pause`", "no optimistic.pause"},
		"SQL function":      {"", "```sql\nSELECT pglock.aquire('{a}', '1 s');\n```", "no pglock.aquire"},
		"file":              {"", "[x](pglock/nothing.go)", "nothing.go"},
		"heading elsewhere": {"", "[x](docs/protocol.md#nothing)", "#nothing"},
		"heading":           {"", "[x](#nothing)", "#nothing"},
		"test":              {"", "`TestNothing`", "no test TestNothing"},
		"variable":          {"", "`PGLOCK_NOTHING`", "reads PGLOCK_NOTHING"},
		"command":           {"", "```sh\ngo run ./examples/nothing\n```", "examples/nothing"},
	} {
		t.Run(name, func(t *testing.T) {
			doctored := readme + "\n" + tt.new + "\n"
			if tt.old != "" {
				doctored = strings.Replace(readme, tt.old, tt.new, 1)
			}
			found := faults(doctored, ".", k)
			if len(found) != 1 || !strings.Contains(found[0], tt.want) {
				t.Errorf("found %q, want one that says %q", found, tt.want)
			}
		})
	}
}
