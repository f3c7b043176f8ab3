package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// account is the row that everybody withdraws from.
type account struct {
	table             string // schema.accounts
	name              string // of its lease, its advisory lock and its fence
	readSQL, writeSQL string
}

const accountID = 1

func accountIn(schema string) account {
	table := schema + ".accounts"
	return account{
		table:   table,
		name:    fmt.Sprintf("%s/%d", table, accountID),
		readSQL: "SELECT balance FROM " + table + " WHERE id = $1",
		// An application that worked the balance out by a rule of its own sets
		// it; with balance = balance - 1 nothing could be lost.
		writeSQL: "UPDATE " + table + " SET balance = $2 WHERE id = $1",
	}
}

type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// create makes the table with its one row.
func (a account) create(ctx context.Context, db execer) error {
	_, err := db.Exec(ctx, fmt.Sprintf(`
		CREATE TABLE %s (id bigint PRIMARY KEY, balance bigint NOT NULL, version bigint NOT NULL DEFAULT 1);
		INSERT INTO %[1]s (id, balance) VALUES (%d, 0)`, a.table, accountID))
	return err
}

func (a account) read(ctx context.Context, db querier) (int64, error) {
	rows, err := db.Query(ctx, a.readSQL, accountID)
	if err != nil {
		return 0, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowTo[int64])
}

func (a account) write(ctx context.Context, db execer, balance int64) error {
	_, err := db.Exec(ctx, a.writeSQL, accountID, balance)
	return err
}
