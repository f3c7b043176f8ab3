package optimistic

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

const tableSQL = `
	SELECT c.relkind IN ('r', 'p'), row_security_active(c.oid),
		c.relkind = 'r' AND EXISTS (SELECT FROM pg_catalog.pg_inherits i WHERE i.inhparent = c.oid),
		ARRAY(
			SELECT a.attname::text FROM pg_catalog.pg_partitioned_table q
			JOIN pg_catalog.pg_attribute a ON a.attrelid = q.partrelid AND a.attnum = ANY (q.partattrs::int2[])
			WHERE q.partrelid = c.oid ORDER BY a.attnum),
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
			WHERE g.tgrelid = c.oid AND g.tgenabled IN ('O', 'A') AND cardinality(g.tgattr::int2[]) = 0
				AND g.tgtype & 19 = 19 -- FOR EACH ROW, BEFORE, UPDATE
				AND strpos(translate(lower(p.prosrc), ' "', ''), translate(lower('old.' || $4::text), ' "', '') || '+1') > 0),
		EXISTS (
			SELECT FROM pg_catalog.pg_proc p
			JOIN pg_catalog.pg_namespace s ON s.oid = p.pronamespace
			WHERE s.nspname = 'pglock' AND p.proname = 'guard_version')
	FROM pg_catalog.pg_class c WHERE c.oid = to_regclass($1::text)`

const columnsSQL = `
	SELECT a.attname::text, format_type(a.atttypid, a.atttypmod), a.attnotnull,
		coalesce(pg_get_expr(d.adbin, d.adrelid), ''), a.attgenerated <> '' OR a.attidentity = 'a',
		CASE WHEN a.attidentity <> '' THEN 'DROP IDENTITY' WHEN a.attgenerated = 's' THEN 'DROP EXPRESSION' ELSE '' END
	FROM pg_catalog.pg_attribute a
	LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
	WHERE a.attrelid = to_regclass($1::text) AND a.attnum > 0 AND NOT a.attisdropped`

// storedTable and storedColumn are what the catalog says.
type storedTable struct {
	table, secured, inherited bool
	partitionKey              []string
	unique, guarded           bool
	guards                    bool // pglock.guard_version is there
	columns                   map[string]storedColumn
}

type storedColumn struct {
	typ, def        string
	notNull, filled bool
	drop            string // what makes a plain column of it
}

// Inspect compares the table with what this package needs, and returns all that
// it found, advice too, in an order in which the Fixes can be run.
//
// Two statements, which read the catalog and change nothing. Errors of the
// server abort a transaction of the caller's.
func (t *Table[T]) Inspect(ctx context.Context, db DB) ([]Finding, error) {
	if err := t.made(); err != nil {
		return nil, err
	}
	if err := checkDB(ctx, db); err != nil {
		return nil, err
	}
	var is storedTable
	found := false
	err := each(ctx, db, tableSQL, []any{t.from, t.live != "", t.keys, t.version}, func(rows pgx.Rows) error {
		found = true
		return rows.Scan(&is.table, &is.secured, &is.inherited, &is.partitionKey, &is.unique, &is.guarded, &is.guards)
	})
	is.columns = map[string]storedColumn{}
	if err == nil && is.table {
		err = each(ctx, db, columnsSQL, []any{t.from}, func(rows pgx.Rows) error {
			var name string
			var c storedColumn
			err := rows.Scan(&name, &c.typ, &c.notNull, &c.def, &c.filled, &c.drop)
			is.columns[name] = c
			return err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("inspect %s: %w", t.name, outside(db, err))
	}
	f := findings{}
	switch {
	case !found:
		f.wrong("table", "there is none of this name on the search_path; names are taken as PostgreSQL stores them, in lower case unless they were quoted", "")
	case !is.table:
		f.wrong("table", "it is a view, or something else that isn't a table: name the table beneath it", "")
	default:
		t.compareVersion(&f, is)
		t.compareColumns(&f, is)
		t.compareTable(&f, is)
	}
	return f, nil
}

type findings []Finding

func (f *findings) wrong(aspect, text, fix string) {
	*f = append(*f, Finding{Aspect: aspect, Text: text, Fix: fix})
}

func (f *findings) advise(aspect, text, fix string) {
	*f = append(*f, Finding{Aspect: aspect, Text: text, Fix: fix, Advice: true})
}

func (t *Table[T]) compareVersion(f *findings, is storedTable) {
	version := quote(t.version)
	alter := fmt.Sprintf("ALTER TABLE %s ALTER COLUMN %s ", t.from, version)
	clock := alter + "SET DEFAULT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
	v, ok := is.columns[t.version]
	if !ok {
		f.wrong("column", "the version column "+version+" is missing",
			fmt.Sprintf("ALTER TABLE %s ADD COLUMN %s bigint NOT NULL DEFAULT 1; %s", t.from, version, clock))
		return
	}
	if v.filled {
		fix := ""
		if v.drop != "" {
			fix = alter + v.drop + "; " + clock
		}
		f.wrong("column", "the version column is generated by the database, so it can't be counted up", fix)
	}
	if v.typ != "bigint" {
		f.wrong("type", "the version column is "+v.typ, alter+"TYPE bigint USING "+version+"::bigint")
	}
	if !v.notNull {
		f.wrong("null", "the version column may be NULL, which equals no version",
			fmt.Sprintf("UPDATE %s SET %s = 1 WHERE %s IS NULL; %sSET NOT NULL", t.from, version, version, alter))
	}
	switch {
	case v.filled || strings.Contains(v.def, "clock_timestamp"):
	case v.drop != "":
		f.advise("default", "the version column's default is a sequence, which counts slower than updates do: a row that others delete and insert again can come to a version it had before", alter+v.drop+"; "+clock)
	case v.def == "":
		f.advise("default", "the version column has no default: an INSERT by others that doesn't name it fails", clock)
	default:
		f.advise("default", "the version column's default is "+v.def+": a row that others delete and insert again can come to a version it had before", clock)
	}
}

func (t *Table[T]) compareColumns(f *findings, is storedTable) {
	for _, key := range t.keys {
		if column, ok := is.columns[key]; !ok {
			f.wrong("column", "the key column "+quote(key)+" is missing: WithKey names another", "")
		} else if !column.notNull {
			f.advise("null", "the key column "+quote(key)+" may be NULL, and such a row can't be reached",
				fmt.Sprintf("ALTER TABLE %s ALTER COLUMN %s SET NOT NULL", t.from, quote(key)))
		}
	}
	for _, c := range t.columns {
		if _, ok := is.columns[c.name]; !ok {
			f.wrong("column", "a field's column "+quote(c.name)+` is missing: give the field its column's exact name in a db tag, or db:"-"`, "")
		}
	}
	for _, c := range t.set {
		if is.columns[c.name].filled {
			f.wrong("column", fmt.Sprintf("the column %s is generated by the database: tag its field db:%q", quote(c.name), c.name+",readonly"), "")
		}
	}
}

func (t *Table[T]) compareTable(f *findings, is storedTable) {
	isKey := func(column string) bool { return slices.Contains(t.keys, column) }
	isMissing := func(column string) bool { _, ok := is.columns[column]; return !ok }
	outside := slices.DeleteFunc(slices.Clone(is.partitionKey), isKey)
	if !is.unique {
		fix := fmt.Sprintf("ALTER TABLE %s ADD UNIQUE (%s)", t.from, quoteAll(t.keys))
		if t.live != "" {
			fix = fmt.Sprintf("CREATE UNIQUE INDEX ON %s (%s) WHERE %s", t.from, quoteAll(t.keys), t.live)
		}
		if len(outside) > 0 || slices.ContainsFunc(t.keys, isMissing) {
			fix = ""
		}
		f.wrong("unique key", "no unique index is on exactly the key's columns, checked at once: one key can have several rows", fix)
	}
	if len(outside) > 0 {
		all := `"` + strings.Join(append(slices.Clone(t.keys), outside...), `", "`) + `"`
		f.wrong("partitioned", "a partitioned table has a unique key only with its partition key in it: name that too, WithKey("+all+")", "")
	}
	if is.inherited {
		f.wrong("inheritance", "its inheritance children are read and written too, and its unique key doesn't reach them: make them partitions", "")
	}
	if is.secured {
		f.advise("row security", "policies apply to this role: a row hidden from it is ErrNotFound, one hidden from its writes is ErrVetoed", "")
	}
	if !is.guarded {
		fix := t.guardSQL(is.guards)
		if is.inherited {
			fix = "" // the children would have no trigger
		}
		f.advise("guard", "no trigger counts for writers who forget to: their updates go unnoticed", fix)
	}
}

// guardSQL adds a trigger that counts: pglock's, where that is installed and
// knows the column's name.
func (t *Table[T]) guardSQL(pglock bool) string {
	literal := func(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
	if pglock && t.version == "version" {
		return "SELECT pglock.guard_version(" + literal(t.from) + ")"
	}
	name, version := quote("count_"+t.version), quote(t.version)
	return fmt.Sprintf(`CREATE OR REPLACE FUNCTION %s() RETURNS trigger LANGUAGE plpgsql AS %s; `+
		`CREATE TRIGGER %s BEFORE UPDATE ON %s FOR EACH ROW WHEN (NEW.%s IS DISTINCT FROM OLD.%s + 1) EXECUTE FUNCTION %s()`,
		name, literal(fmt.Sprintf("BEGIN NEW.%s := OLD.%s + 1; RETURN NEW; END", version, version)),
		name, t.from, version, version, name)
}
