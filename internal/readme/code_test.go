package readme

import (
	"bytes"
	"fmt"
	"go/format"
	"path/filepath"
	"strings"
	"testing"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// surroundings are what a reader of the README has in the program around each
// block of its code, and how they look at what came of it.
var surroundings = map[string]struct{ before, after string }{
	"Example_migrate":         {},
	"ExampleLockRow":          {},
	"ExampleLockTx":           {},
	"ExampleClient_WithLock":  {},
	"ExampleClient_WithLease": {},
	"ExampleLease_InTx": {before: `
		client := pglock.New(pool)
		defer client.Close(ctx)
		lease, err := client.Acquire(ctx, "accounts/42", time.Minute)
		if err != nil { log.Fatal(err) }`},
	"ExampleFence":        {},
	"ExampleNew":          {},
	"ExampleTable_Update": {after: `fmt.Println(row.Value.Balance, err)`},
}

// program is one that runs the README's code from the first block to the last,
// the migrations before all others. Its SQL runs where it stands, but for what
// is an operator's. It is about the account that the README is about.
func program(t *testing.T) []byte {
	t.Helper()
	code, _ := blocks(text(t))
	var first, calls, funcs strings.Builder
	for i, b := range code {
		name, ok := strings.CutPrefix(b.mark, "from ")
		switch {
		case b.language == "sql" && b.mark == "":
			fmt.Fprintf(&calls, "\tdo(ctx, pool, %q)\n", b.String())
			if strings.Contains(b.String(), "CREATE TABLE accounts") {
				fmt.Fprintf(&calls, "\tdo(ctx, pool, %q)\n", `
					INSERT INTO accounts (id, balance) VALUES (42, 100), (1, 100);
					CREATE MATERIALIZED VIEW daily AS SELECT count(*) FROM accounts`)
			}
			if strings.Contains(b.String(), "pglock.protect(") { // what comes next knows nothing of it
				fmt.Fprintf(&calls, "\tdo(ctx, pool, %q)\n", `SELECT pglock.unprotect('accounts')`)
			}
		case ok:
			around, known := surroundings[name]
			if !known {
				t.Errorf("line %d: this test doesn't know what stands around %s", b.line, name)
			}
			to := &calls
			if name == "Example_migrate" {
				to = &first
			}
			fmt.Fprintf(to, "\tblock%d(ctx, pool)\n", i)
			fmt.Fprintf(&funcs, "// %s\nfunc block%d(ctx context.Context, pool *pgxpool.Pool) {\n\tvar err error\n\t_ = err\n{\n%s\n{\n%s\n%s\n}\n}\n}\n\n",
				name, i, around.before, b, around.after)
		}
	}
	source := `package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/migrations"
	"github.com/pawl-go/pawl/optimistic"
	"github.com/pawl-go/pawl/pglock"
	"github.com/pawl-go/pawl/pglock/pglockotel"
)

var errInsufficient = errors.New("insufficient funds")

func main() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
` + first.String() + calls.String() + `
	var balance int
	if err := pool.QueryRow(ctx, "SELECT balance FROM accounts WHERE id = 42").Scan(&balance); err != nil {
		log.Fatal(err)
	}
	fmt.Println("balance", balance)
}

func do(ctx context.Context, pool *pgxpool.Pool, sql string) {
	if _, err := pool.Exec(ctx, sql); err != nil {
		log.Fatalf("%s: %v", sql, err)
	}
}

` + funcs.String()
	formatted, err := format.Source([]byte(source))
	if err != nil {
		t.Fatalf("%v\n%s", err, source)
	}
	return formatted
}

// The README's code, typed into a fresh folder, compiles and does what the
// README says: each of the four locks, the fence and the migrations.
func TestCode(t *testing.T) {
	t.Parallel()
	source := program(t)
	for name := range surroundings {
		if !bytes.Contains(source, []byte("// "+name+"\n")) {
			t.Errorf("the README has no code of %s", name)
		}
	}
	dir := module(t, "readme", source)
	run(t, dir, "go", "build", "-o", "program.exe", ".")
	got := run(t, dir, filepath.Join(dir, "program.exe"), pgtest.EmptyDSN(t))
	_, told, _ := strings.Cut(got, "making the report") // before it stands what was applied
	want := ` under reports/daily
10 withdrawn
<nil>
pglock: resource "accounts/42" is fenced: presented token 17, accepted 18
30 <nil>
balance 70
`
	if told != want {
		t.Errorf("it printed %q, want %q at the end", got, want)
	}
}
