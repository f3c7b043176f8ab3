package optimistic

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// A Finding is one thing that Verify has found.
type Finding struct {
	Aspect string // table, column, type, null, default, unique key, guard, row security, partitioned, inheritance
	Text   string // what is wrong, and what it leads to
	Fix    string // what to do about it, "" where that is the reader's to judge
	// Advice is true where the promises of this package hold for all that write
	// through it, and other writers, or readers of its errors, should know more.
	Advice bool
}

// A SchemaError is everything that Verify found. It is an ErrSchema unless all
// of it is advice.
type SchemaError struct {
	Table    string
	Findings []Finding
}

func (e *SchemaError) Error() string {
	lines := []string{fmt.Sprintf("optimistic: table %s: %d findings", e.Table, len(e.Findings))}
	for _, f := range e.Findings {
		line := f.Aspect + ": " + f.Text
		if f.Advice {
			line = "advice, " + line
		}
		if f.Fix != "" {
			line += " (" + f.Fix + ")"
		}
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n\t")
}

// Is says whether anything found breaks what this package promises.
func (e *SchemaError) Is(target error) bool {
	if target != ErrSchema {
		return false
	}
	for _, f := range e.Findings {
		if !f.Advice {
			return true
		}
	}
	return false
}

const tableSQL = `
	SELECT c.relkind IN ('r', 'p'), c.relkind = 'p', row_security_active(c.oid),
		c.relkind = 'r' AND EXISTS (SELECT FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid),
		EXISTS (
			SELECT FROM pg_catalog.pg_index x
			WHERE x.indrelid = c.oid AND x.indisunique AND x.indisvalid AND x.indimmediate AND x.indexprs IS NULL
				AND (x.indpred IS NULL OR $2::bool) AND x.indnkeyatts = cardinality($3::text[])
				AND (SELECT array_agg(a.attname::text ORDER BY a.attname COLLATE "C") FROM pg_catalog.pg_attribute a
					WHERE a.attrelid = c.oid AND a.attnum = ANY ((x.indkey::int2[])[0:x.indnkeyatts - 1]))
					= (SELECT array_agg(k ORDER BY k COLLATE "C") FROM unnest($3::text[]) k)),
		EXISTS (
			SELECT FROM pg_catalog.pg_trigger g
			JOIN pg_catalog.pg_proc p ON p.oid = g.tgfoid
			JOIN pg_catalog.pg_namespace s ON s.oid = p.pronamespace
			WHERE g.tgrelid = c.oid AND s.nspname = 'pglock' AND p.proname = 'bump_version' AND g.tgenabled IN ('O', 'A'))
	FROM pg_catalog.pg_class c WHERE c.oid = to_regclass($1::text)`

const columnsSQL = `
	SELECT a.attname::text, format_type(a.atttypid, a.atttypmod), a.attnotnull,
		coalesce(pg_get_expr(d.adbin, d.adrelid), ''), a.attgenerated <> '' OR a.attidentity = 'a'
	FROM pg_catalog.pg_attribute a
	LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
	WHERE a.attrelid = to_regclass($1::text) AND a.attnum > 0 AND NOT a.attisdropped`

// storedTable and storedColumn are what the catalog says.
type storedTable struct {
	table, partitioned, secured, inherited, unique, guarded bool
}

type storedColumn struct {
	typ, def        string
	notNull, filled bool
}

// Verify compares the table with what this package needs, and returns all that
// it found as one *SchemaError, or nil. It is for the start of a program and for
// a test of its migrations: nothing else here looks at the schema, and most
// faults show later, as a lost update or a conflict that isn't one.
//
// Two statements, which read the catalog and change nothing. Errors of the
// server abort a transaction of the caller's, findings leave it usable.
func (t *Table[T]) Verify(ctx context.Context, db DB) error {
	if err := t.made(); err != nil {
		return err
	}
	if err := checkDB(ctx, db); err != nil {
		return err
	}
	var is storedTable
	found := false
	err := each(ctx, db, tableSQL, []any{t.from, t.live != "", t.keys}, func(rows pgx.Rows) error {
		found = true
		return rows.Scan(&is.table, &is.partitioned, &is.secured, &is.inherited, &is.unique, &is.guarded)
	})
	columns := map[string]storedColumn{}
	if err == nil && found {
		err = each(ctx, db, columnsSQL, []any{t.from}, func(rows pgx.Rows) error {
			var name string
			var c storedColumn
			err := rows.Scan(&name, &c.typ, &c.notNull, &c.def, &c.filled)
			columns[name] = c
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("verify %s: %w", t.name, outside(db, err))
	}
	f := findings{}
	if !found {
		f.wrong("table", "there is none of this name on the search_path", "names are taken as PostgreSQL stores them, in lower case unless they were quoted")
	} else {
		t.compareColumns(&f, columns)
		t.compareTable(&f, is)
	}
	if len(f) == 0 {
		return nil
	}
	return &SchemaError{Table: t.name, Findings: f}
}

type findings []Finding

func (f *findings) wrong(aspect, text, fix string) {
	*f = append(*f, Finding{Aspect: aspect, Text: text, Fix: fix})
}

func (f *findings) advise(aspect, text, fix string) {
	*f = append(*f, Finding{Aspect: aspect, Text: text, Fix: fix, Advice: true})
}

func (t *Table[T]) compareColumns(f *findings, columns map[string]storedColumn) {
	alter := fmt.Sprintf("ALTER TABLE %s ALTER COLUMN %s ", t.from, quote(t.version))
	const clock = "SET DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
	v, ok := columns[t.version]
	switch {
	case !ok:
		f.wrong("column", "the version column "+quote(t.version)+" is missing", fmt.Sprintf("ALTER TABLE %s ADD COLUMN %s bigint NOT NULL DEFAULT 1", t.from, quote(t.version)))
	default:
		if v.typ != "bigint" {
			f.wrong("type", "the version column is "+v.typ, alter+"TYPE bigint")
		}
		if !v.notNull {
			f.wrong("null", "the version column may be NULL, which equals no version", alter+"SET NOT NULL")
		}
		if v.filled {
			f.wrong("column", "the version column is generated by the database, so it can't be counted up", "")
		}
		if v.def == "" {
			f.advise("default", "the version column has no default: an INSERT that doesn't name it fails", alter+clock)
		} else if !strings.Contains(v.def, "clock_timestamp") {
			f.advise("default", "the version column's default is "+v.def+": a row that others delete and insert again can come to a version it had before", alter+clock)
		}
	}
	for _, key := range t.keys {
		if _, ok := columns[key]; !ok {
			f.wrong("column", "the key column "+quote(key)+" is missing", "")
		} else if !columns[key].notNull {
			f.advise("null", "the key column "+quote(key)+" may be NULL, and such a row can't be reached", fmt.Sprintf("ALTER TABLE %s ALTER COLUMN %s SET NOT NULL", t.from, quote(key)))
		}
	}
	for _, c := range t.columns {
		if _, ok := columns[c.name]; !ok {
			f.wrong("column", "a field's column "+quote(c.name)+" is missing", `name it in the field's tag, or db:"-"`)
		}
	}
	for _, c := range t.set {
		if columns[c.name].filled {
			f.wrong("column", "the column "+quote(c.name)+" is generated by the database", fmt.Sprintf("db:%q", c.name+",readonly"))
		}
	}
}

func (t *Table[T]) compareTable(f *findings, is storedTable) {
	if !is.table {
		f.wrong("table", "it is no table", "name the table beneath it")
		return
	}
	if !is.unique {
		fix := fmt.Sprintf("ALTER TABLE %s ADD UNIQUE (%s)", t.from, quoteAll(t.keys))
		if is.partitioned {
			fix += ", after naming the partition key's columns in WithKey too"
		}
		f.wrong("unique key", "no unique index is on exactly the key's columns, checked at once: one key can have several rows", fix)
	}
	if is.partitioned && !is.unique {
		f.wrong("partitioned", "a partitioned table has a unique key only where the partition key is part of it", "WithKey takes several columns")
	}
	if is.inherited {
		f.wrong("inheritance", "its inheritance children are read and written too, and its unique key doesn't reach them", "use partitions")
	}
	if is.secured {
		f.advise("row security", "policies apply to this role: a row hidden from it is ErrNotFound, one hidden from its writes is ErrVetoed", "")
	}
	if !is.guarded {
		fix := "SELECT pglock.guard_version('" + strings.ReplaceAll(t.from, "'", "''") + "')"
		if t.version != "version" {
			fix = "pglock.guard_version wants a column named version; otherwise a trigger of your own"
		}
		f.advise("guard", "no trigger counts for writers who forget to: their updates go unnoticed", fix)
	}
}
