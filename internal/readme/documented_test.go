package readme

import (
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// undocumented lists what a package exports without a comment of its own.
// Methods that say with their name what every Go programmer knows are left out,
// and constants and variables are documented as a group or each by itself.
func undocumented(pkg *doc.Package) (names []string) {
	funcs := func(prefix string, all []*doc.Func) {
		for _, f := range all {
			known := slices.Contains([]string{"Error", "String"}, f.Name) && prefix != ""
			if f.Doc == "" && !known {
				names = append(names, prefix+f.Name)
			}
		}
	}
	values := func(all []*doc.Value) {
		for _, v := range all {
			for _, spec := range v.Decl.Specs {
				s := spec.(*ast.ValueSpec)
				if v.Doc == "" && s.Doc == nil && s.Comment == nil && s.Names[0].IsExported() {
					names = append(names, s.Names[0].Name)
				}
			}
		}
	}
	if pkg.Doc == "" {
		names = append(names, "package "+pkg.Name)
	}
	funcs("", pkg.Funcs)
	values(pkg.Consts)
	values(pkg.Vars)
	for _, t := range pkg.Types {
		if t.Doc == "" {
			names = append(names, t.Name)
		}
		funcs("", t.Funcs)
		funcs(t.Name+".", t.Methods)
		values(t.Consts)
		values(t.Vars)
	}
	return names
}

// Everything that is exported has a comment, and almost every verb an Example.
func TestDocumented(t *testing.T) {
	t.Parallel()
	k := learn(t)
	for _, folder := range []string{"pglock", "optimistic", "migrations"} {
		files := token.NewFileSet()
		paths, err := filepath.Glob(filepath.Join(root, folder, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		var code []*ast.File
		for _, path := range paths {
			file, err := parser.ParseFile(files, path, nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if !strings.HasSuffix(path, "_test.go") {
				code = append(code, file)
			}
		}
		pkg, err := doc.NewFromFiles(files, code, "x/"+folder)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range undocumented(pkg) {
			t.Errorf("%s: %s has no comment", folder, name)
		}
	}
	for _, verb := range []string{
		"LockRow", "LockRows", "RowLock_NoWait", "SetHoldTimeout", "KeyOf", "LockTx",
		"Client_WithLock", "Client_TryLock",
		"Client_WithLease", "Client_Acquire", "Client_TryAcquire", "Client_TryAcquireAll", "Client_Elect",
		"Client_Close", "Client_ForceRelease", "Client_Observe", "WithObserver", "Lease_fake",
		"Lease_InTx", "Lease_Guard", "Fence", "Present", "Client_AcquireAll",
		"TryLockTx", "Key_Shared", "SetLockTimeout", "SQL",
		"Table_Update", "Table_CompareAndSet", "Table_CompareAndSetMany", "Table_Insert", "Table_Delete",
		"Table_Touch", "Table_Verify", "Exec", "RunInTx", "IfMatch", "Up",
	} {
		if _, ok := k.examples["Example"+verb]; !ok {
			t.Errorf("there is no Example%s", verb)
		}
	}
}

// What has no comment is found, and what has one is not.
func TestDocumented_Doctored(t *testing.T) {
	t.Parallel()
	const source = `
		package p
		// A has one.
		type A struct{}
		func (A) Error() string { return "" }
		func (A) Run() {}
		// C are some.
		const C, c = 1, 2
		var (
			// V has one.
			V = 1
			W = 2
		)
		type B int
		func F() {}`
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, "p.go", source, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	pkg, err := doc.NewFromFiles(files, []*ast.File{file}, "x/p")
	if err != nil {
		t.Fatal(err)
	}
	got := undocumented(pkg)
	slices.Sort(got)
	if want := []string{"A.Run", "B", "F", "W", "package p"}; !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
}
