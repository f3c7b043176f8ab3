package pglock_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/pglock"
)

// What protection costs the writer: an UPDATE of 10 rows, and ten of them in a
// transaction, on a server that is as careful with its disk as one in use is.
// Presenting is a statement more in the transaction; present/ has it without a
// protected table, so that the trigger's part is the difference.
func BenchmarkProtect(b *testing.B) {
	pool := durable(b)
	exec(b, pool, `CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$`)
	for _, table := range []string{"plain", "empty", "protected"} {
		exec(b, pool, `CREATE TABLE `+table+` (id int PRIMARY KEY, balance int) WITH (fillfactor = 50);
			INSERT INTO `+table+` SELECT n, 0 FROM generate_series(1, 1000) n`)
	}
	exec(b, pool, `CREATE TRIGGER nothing BEFORE UPDATE ON empty FOR EACH STATEMENT EXECUTE FUNCTION nothing();
		SELECT pglock.protect('protected', 'accounts/%')`)
	token := pglock.Token(one[int64](b, pool, `SELECT token FROM pglock.acquire('{accounts/42}', '24 h')`))
	conn := newConn(b, pool)
	for _, updates := range []int{1, 10} {
		for _, tt := range []struct {
			name, table string
			present     bool
		}{{"unprotected", "plain", false}, {"empty trigger", "empty", false}, {"present", "plain", true}, {"protected", "protected", true}} {
			sql := `UPDATE ` + tt.table + ` SET balance = balance + 1 WHERE id BETWEEN $1 AND $1 + 9`
			run := func(ctx context.Context, n int) error {
				return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
					if tt.present {
						if err := pglock.Present(ctx, tx, "accounts/42", token); err != nil {
							return err
						}
					}
					for i := range updates {
						if _, err := tx.Exec(ctx, sql, (n*updates+i)%99*10+1); err != nil {
							return err
						}
					}
					return nil
				})
			}
			b.Run(map[int]string{1: "one UPDATE/", 10: "ten UPDATEs/"}[updates]+tt.name, func(b *testing.B) {
				for n := 0; b.Loop(); n++ {
					if err := run(b.Context(), n); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
