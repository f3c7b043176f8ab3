//go:build unix

package pglock_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/pglock"
)

// memberEnv makes the test binary a process that adds elements to a set.
const memberEnv = "PAWL_TEST_MEMBER"

func init() {
	if os.Getenv(memberEnv) != "" {
		os.Exit(member(os.Stdin, os.Stdout))
	}
}

// membership is the one line on a member's standard input. It goes on until
// that ends.
type membership struct {
	DSN     string
	ID      int
	TTL     time.Duration
	Section time.Duration // how long it is the holder for, at most
	Write   string        // the way in which it writes
}

// added is a line on its standard output, for each time that it held the lease.
type added struct {
	Element int
	Err     string // empty: the element is in the set for good
	Refused bool   // by the resource
}

// member adds elements to a set, each under the lease, by reading the set,
// thinking, and writing the whole of it. It asks nobody whether it still holds
// the lease.
func member(in io.Reader, out io.Writer) int {
	lines, reports := json.NewDecoder(in), json.NewEncoder(out)
	var m membership
	if err := lines.Decode(&m); err != nil {
		return 1
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		var more any
		_ = lines.Decode(&more) // until the end
		cancel()
	}()
	pool, err := pgxpool.New(ctx, m.DSN)
	if err != nil {
		fmt.Fprintln(os.Stderr, "member:", err)
		return 1
	}
	locks := pglock.New(pool, pglock.WithOwner(fmt.Sprint(m.ID)))
	for n := 1; ctx.Err() == nil; n++ {
		l, err := locks.Acquire(ctx, "set", m.TTL)
		if err != nil {
			continue
		}
		thinks := rand.N(m.Section)
		before := thinks / 4
		<-time.After(before)
		a := added{Element: m.ID*1_000_000 + n}
		if err := m.write(l, pool, a.Element, thinks-before); err != nil {
			a.Err, a.Refused = err.Error(), errors.Is(err, pglock.ErrFenced) || errors.Is(err, pglock.ErrLost)
		}
		_ = l.Release(context.Background()) // it may be lost
		if err := reports.Encode(a); err != nil {
			return 1
		}
	}
	_ = locks.Close(context.Background())
	return 0
}

// write adds an element the one way or the other.
func (m membership) write(l *pglock.Lease, pool *pgxpool.Pool, element int, thinks time.Duration) error {
	ctx := context.Background()
	add := func(db interface {
		querier
		executor
	}) error {
		rows, err := db.Query(ctx, `SELECT elements FROM sets`)
		if err != nil {
			return err
		}
		elements, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[[]int])
		if err != nil {
			return err
		}
		<-time.After(thinks)
		_, err = db.Exec(ctx, `UPDATE sets SET elements = $1`, append(elements, element))
		return err
	}
	switch m.Write {
	case "after Fence":
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := pglock.Fence(ctx, tx, "set", l.Token()); err != nil {
				return err
			}
			return add(tx)
		})
	case "in InTx":
		return l.InTx(ctx, pool, func(_ context.Context, tx pgx.Tx) error { return add(tx) })
	}
	return add(pool)
}
