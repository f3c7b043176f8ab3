package readme

import (
	"errors"
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/pawl-go/pawl/migrations"
)

// known is what there is to be named.
type known struct {
	examples  map[string][]string // bodies, by the name of the function
	names     map[string]bool     // exported, with the package's
	objects   map[string]bool     // of the schema
	tests     map[string]bool
	variables map[string]bool // in the environment
}

func learn(t testing.TB) known {
	t.Helper()
	k, err := learned()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

var learned = sync.OnceValues(func() (known, error) {
	k := known{map[string][]string{}, map[string]bool{}, map[string]bool{}, map[string]bool{}, map[string]bool{}}
	var errs []error
	for _, folder := range []string{"pglock", "pglock/pglockotel", "optimistic", "migrations", "internal/readme"} {
		errs = append(errs, k.learnPackage(folder))
	}
	return k, errors.Join(append(errs, k.learnSchema(), k.learnTestsAndVariables())...)
})

func (k known) learnPackage(folder string) error {
	paths, err := filepath.Glob(filepath.Join(root, folder, "*.go"))
	if err != nil {
		return err
	}
	files := token.NewFileSet()
	var code []*ast.File
	for _, path := range paths {
		source, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		file, err := parser.ParseFile(files, path, source, parser.ParseComments)
		if err != nil {
			return err
		}
		if !strings.HasSuffix(path, "_test.go") {
			code = append(code, file)
			continue
		}
		for _, declared := range file.Decls {
			if f, ok := declared.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Example") {
				body := source[files.Position(f.Body.Lbrace).Offset+1 : files.Position(f.Body.Rbrace).Offset]
				k.examples[f.Name.Name] = unindented(strings.Split(string(body), "\n"))
			}
		}
	}
	if len(code) == 0 {
		return nil
	}
	pkg, err := doc.NewFromFiles(files, code, "x/"+folder)
	if err != nil {
		return err
	}
	k.learnValues(pkg.Name, pkg.Consts)
	k.learnValues(pkg.Name, pkg.Vars)
	k.learnFuncs(pkg.Name, pkg.Funcs)
	for _, typ := range pkg.Types {
		k.names[pkg.Name+"."+typ.Name] = true
		k.learnValues(pkg.Name, typ.Consts)
		k.learnValues(pkg.Name, typ.Vars)
		k.learnFuncs(pkg.Name, typ.Funcs)
		k.learnFuncs(pkg.Name+"."+typ.Name, typ.Methods)
		for _, spec := range typ.Decl.Specs {
			if s, ok := spec.(*ast.TypeSpec).Type.(*ast.StructType); ok {
				for _, field := range s.Fields.List {
					for _, name := range field.Names {
						k.names[pkg.Name+"."+typ.Name+"."+name.Name] = true
					}
				}
			}
		}
	}
	return nil
}

func (k known) learnValues(prefix string, values []*doc.Value) {
	for _, v := range values {
		for _, name := range v.Names {
			k.names[prefix+"."+name] = true
		}
	}
}

func (k known) learnFuncs(prefix string, funcs []*doc.Func) {
	for _, f := range funcs {
		k.names[prefix+"."+f.Name] = true
	}
}

var created = regexp.MustCompile(`(?m)^CREATE (?:FUNCTION|TABLE|VIEW) (pglock\.\w+)`)

func (k known) learnSchema() error {
	k.objects["pglock.goose_db_version"] = true
	return fs.WalkDir(migrations.FS, ".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".sql") {
			return err
		}
		text, err := fs.ReadFile(migrations.FS, path)
		for _, m := range created.FindAllSubmatch(text, -1) {
			k.objects[string(m[1])] = true
		}
		return err
	})
}

var (
	declared = regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	used     = regexp.MustCompile(`os\.Getenv\("(PGLOCK_\w+)"\)|"(PGLOCK_\w+)="`) // read, or set for a command
)

func (k known) learnTestsAndVariables() error {
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") {
			return err
		}
		text, err := os.ReadFile(path)
		if strings.HasSuffix(path, "_test.go") {
			for _, m := range declared.FindAllSubmatch(text, -1) {
				k.tests[string(m[1])] = true
			}
		} else {
			for _, m := range used.FindAllSubmatch(text, -1) {
				k.variables[string(m[1])+string(m[2])] = true
			}
		}
		return err
	})
}

var docLink = regexp.MustCompile(`\[\*?([A-Z]\w*(?:\.[A-Z]\w*)?)\]`)

// A link in a package's essay that leads nowhere is shown as text, brackets and
// all.
func TestDocLinks(t *testing.T) {
	t.Parallel()
	k := learn(t)
	for _, pkg := range []string{"pglock", "optimistic"} {
		essay, err := os.ReadFile(filepath.Join(root, pkg, "doc.go"))
		if err != nil {
			t.Fatal(err)
		}
		links := docLink.FindAllSubmatch(essay, -1)
		if len(links) == 0 {
			t.Errorf("%s/doc.go links to nothing: this test shows nothing", pkg)
		}
		for _, m := range links {
			if name := pkg + "." + string(m[1]); !k.names[name] {
				t.Errorf("%s/doc.go: there is no %s", pkg, name)
			}
		}
	}
}
