package optimistic

import (
	"context"
	"fmt"
	"slices"
	"strings"
)

// A Finding is one thing that Inspect has found.
type Finding struct {
	Aspect string // table, column, type, null, default, unique key, guard, row security, partitioned, inheritance
	Text   string // what it is, what it leads to, and what to do where that isn't SQL
	Fix    string // SQL that puts it right, one or more statements; "" where none can by itself
	// Advice is true where the promises of this package hold for all that write
	// through it, and other writers, or readers of its errors, should know more.
	Advice bool
}

// String is the finding with its SQL on a line of its own.
func (f Finding) String() string {
	s := f.Aspect + ": " + f.Text
	if f.Advice {
		s = "advice, " + s
	}
	if f.Fix != "" {
		s += "\n\t\t" + f.Fix + ";"
	}
	return s
}

// A SchemaError is an ErrSchema with all that was found, advice too.
type SchemaError struct {
	Table    string
	Findings []Finding
}

func (e *SchemaError) Error() string {
	lines := []string{fmt.Sprintf("%v: %s", ErrSchema, e.Table)}
	for _, f := range e.Findings {
		lines = append(lines, f.String())
	}
	return strings.Join(lines, "\n\t")
}

// Unwrap makes a SchemaError an ErrSchema.
func (e *SchemaError) Unwrap() error { return ErrSchema }

// Verify is for the start of a program and for a test of its migrations: nothing
// else here looks at the schema, and most faults show later, as a lost update or
// a conflict that isn't one. The error is a *SchemaError when something breaks
// what this package promises, and then holds all that Inspect finds. Advice by
// itself is no error.
func (t *Table[T]) Verify(ctx context.Context, db DB) error {
	found, err := t.Inspect(ctx, db)
	if err == nil && slices.ContainsFunc(found, func(f Finding) bool { return !f.Advice }) {
		err = &SchemaError{Table: t.name, Findings: found}
	}
	return err
}
