package pgtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var callOf = regexp.MustCompile(`pglock\.(\w+)\(`)

// ClientCalls returns the names of the functions that a role calls through package
// pglock, whose folder it is given, sorted: those that stand in the package's
// strings, but for what is an operator's.
func ClientCalls(t testing.TB, folder string) (names []string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if text, ok := n.(*ast.BasicLit); ok && text.Kind == token.STRING {
				for _, m := range callOf.FindAllStringSubmatch(text.Value, -1) {
					names = append(names, m[1])
				}
			}
			return true
		})
	}
	slices.Sort(names)
	names = slices.Compact(names)
	return slices.DeleteFunc(names, func(name string) bool { return name == "force_release" })
}
