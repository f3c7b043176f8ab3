package pglock_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// accounts returns a pool on a database with the accounts 1 to n.
func accounts(t *testing.T, n int) *pgxpool.Pool {
	t.Helper()
	return accountsOn(t, roomy(t, pgtest.Pool(t), 20), n)
}

func accountsOn(t *testing.T, pool *pgxpool.Pool, n int) *pgxpool.Pool {
	t.Helper()
	exec(t, pool, `CREATE TABLE accounts (id int PRIMARY KEY, balance int NOT NULL DEFAULT 100)`)
	exec(t, pool, `CREATE TABLE transfers (account int REFERENCES accounts)`)
	exec(t, pool, `INSERT INTO accounts SELECT generate_series(1, $1)`, n)
	return pool
}

const oneAccount = `SELECT balance FROM accounts WHERE id = $1`

func lockAccount(t *testing.T, tx pgx.Tx, how pglock.RowLock, id int) {
	t.Helper()
	if _, err := pglock.LockRow(t.Context(), tx, how, pgx.RowTo[int], oneAccount, id); err != nil {
		t.Fatal(err)
	}
}

// The row comes back as it stands after the wait, not as it was before it.
func TestLockRow_WaitsAndReadsTheNew(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 1)
	holder, waiter := begin(t, pool), begin(t, pool)
	lockAccount(t, holder, pglock.ForNoKeyUpdate, 1)
	type answer struct {
		balance int
		err     error
	}
	done := make(chan answer, 1)
	go func() {
		balance, err := pglock.LockRow(context.Background(), waiter, pglock.ForNoKeyUpdate, pgx.RowTo[int], oneAccount, 1)
		done <- answer{balance, err}
	}()
	blockedBy(t, pool, uint32(pid(holder)))
	exec(t, holder, `UPDATE accounts SET balance = 7`)
	if err := holder.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := <-done; got.err != nil || got.balance != 7 {
		t.Errorf("got %+v, want 7", got)
	}
}

func TestLockRow_Answers(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 2)
	tx := begin(t, pool)
	for _, how := range []pglock.RowLock{{}, pglock.ForUpdate.NoWait(), pglock.ForShare.SkipLocked()} {
		_, err := pglock.LockRow(t.Context(), tx, how, pgx.RowTo[int], oneAccount, 99)
		if !errors.Is(err, pglock.ErrNotFound) || !errors.Is(err, pgx.ErrNoRows) {
			t.Errorf("%v, no such row: %v", how, err)
		}
		usable(t, tx)
		_, err = pglock.LockRow(t.Context(), tx, how, pgx.RowTo[int], `SELECT balance FROM accounts`)
		if !errors.Is(err, pgx.ErrTooManyRows) {
			t.Errorf("%v, two rows: %v", how, err)
		}
		usable(t, tx)
		none, err := pglock.LockRows(t.Context(), tx, how, pgx.RowTo[int], oneAccount+` ORDER BY id`, 99)
		if none == nil || len(none) != 0 || err != nil {
			t.Errorf("%v, no rows: %v, %v", how, none, err)
		}
		// pgx's ways to give arguments and to scan work as with Query.
		type account struct{ ID, Balance int }
		got, err := pglock.LockRow(t.Context(), tx, how, pgx.RowToStructByName[account],
			`SELECT id, balance FROM accounts WHERE id = @id -- by key`, pgx.NamedArgs{"id": 2})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(account{2, 100}, got); diff != "" {
			t.Error(diff)
		}
		_, err = pglock.LockRow(t.Context(), tx, how, pgx.RowTo[int], oneAccount, pgx.QueryExecModeExec, 1)
		if err != nil {
			t.Error(err)
		}
	}
}

// What each lock keeps out, as the manual's table of conflicts has it.
func TestLockRow_Conflicts(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 1)
	locks := []pglock.RowLock{pglock.ForKeyShare, pglock.ForShare, pglock.ForNoKeyUpdate, pglock.ForUpdate}
	for i, held := range locks {
		for j, asked := range locks {
			holder, tx := begin(t, pool), begin(t, pool)
			lockAccount(t, holder, held, 1)
			_, err := pglock.LockRow(t.Context(), tx, asked.NoWait(), pgx.RowTo[int], oneAccount, 1)
			conflict := i+j >= 3 && !(i == 1 && j == 1)
			if got := errors.Is(err, pglock.ErrLocked); got != conflict || !got && err != nil {
				t.Errorf("%v beside %v: %v", asked, held, err)
			}
			var blocked *pglock.BlockedError
			if conflict && (!errors.As(err, &blocked) || sqlState(err) != "55P03" || !strings.Contains(err.Error(), "accounts")) {
				t.Errorf("refused with %#v", err)
			}
			usable(t, tx)
			skipped, err := pglock.LockRows(t.Context(), tx, asked.SkipLocked(), pgx.RowTo[int], `SELECT id FROM accounts`)
			if got := len(skipped) == 0; got != conflict || err != nil {
				t.Errorf("%v skipping %v: %v, %v", asked, held, skipped, err)
			}
			_ = holder.Rollback(t.Context())
			_ = tx.Rollback(t.Context())
		}
	}
}

// The default lets child rows be added, FOR UPDATE doesn't.
func TestLockRow_ChildInsert(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 1)
	for how, flows := range map[pglock.RowLock]bool{{}: true, pglock.ForUpdate: false} {
		holder, tx := begin(t, pool), begin(t, pool)
		lockAccount(t, holder, how, 1)
		if err := pglock.SetLockTimeout(t.Context(), tx, 10*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(t.Context(), `INSERT INTO transfers VALUES (1)`); (err == nil) != flows {
			t.Errorf("a child's INSERT beside %v: %v", how, err)
		}
		_ = holder.Rollback(t.Context())
		_ = tx.Rollback(t.Context())
	}
}

// A refused NoWait gives back what it had locked before it met the locked row.
func TestLockRows_NoWaitLocksAllOrNone(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 3)
	holder, tx := begin(t, pool), begin(t, pool)
	lockAccount(t, holder, pglock.ForUpdate, 3)
	const sql = `SELECT id FROM accounts ORDER BY id`
	free := func() []int {
		var ids []int
		inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
			var err error
			if ids, err = pglock.LockRows(t.Context(), tx, pglock.ForUpdate.SkipLocked(), pgx.RowTo[int], sql); err != nil {
				t.Fatal(err)
			}
		})
		return ids
	}
	if _, err := pglock.LockRows(t.Context(), tx, pglock.ForUpdate.NoWait(), pgx.RowTo[int], sql); !errors.Is(err, pglock.ErrLocked) {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int{1, 2}, free()); diff != "" {
		t.Error(diff)
	}
	// A refusal that the server makes when it reads the query leaves tx usable too.
	if _, err := pglock.LockRow(t.Context(), tx, pglock.ForUpdate.NoWait(), pgx.RowTo[int], `SELECT mode() WITHIN (id) FROM accounts`); err == nil {
		t.Error("nonsense was accepted")
	}
	usable(t, tx)
	if _, err := pglock.LockRows(t.Context(), tx, pglock.ForUpdate.SkipLocked(), pgx.RowTo[int], sql); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int{}, free()); diff != "" {
		t.Error(diff)
	}
}

func TestLockRow_Timeout(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 1)
	holder, tx := begin(t, pool), begin(t, pool)
	lockAccount(t, holder, pglock.ForUpdate, 1)
	if err := pglock.SetLockTimeout(t.Context(), tx, time.Millisecond); err != nil {
		t.Fatal(err)
	}
	_, err := pglock.LockRow(t.Context(), tx, pglock.ForUpdate, pgx.RowTo[int], oneAccount, 1)
	var blocked *pglock.BlockedError
	if !errors.As(err, &blocked) || !errors.Is(err, pglock.ErrLocked) || sqlState(err) != "55P03" {
		t.Fatal(err)
	}
	if !strings.Contains(err.Error(), `while locking tuple (0,1) in relation "accounts"`) {
		t.Errorf("%v doesn't say what was waited for", err)
	}
	aborted(t, tx)
}

func TestLockRow_Cancelled(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 1)
	holder, tx := begin(t, pool), begin(t, pool)
	lockAccount(t, holder, pglock.ForUpdate, 1)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := pglock.LockRow(ctx, tx, pglock.ForUpdate, pgx.RowTo[int], oneAccount, 1)
		done <- err
	}()
	blockedBy(t, pool, uint32(pid(holder)))
	cancel()
	if err := <-done; !errors.Is(err, pglock.ErrLocked) || !errors.Is(err, context.Canceled) {
		t.Errorf("a wait that was given up: %v", err)
	}
	until(t, pool, "the cancelled session end", `SELECT NOT EXISTS (SELECT FROM pg_locks WHERE pid = $1)`, pid(tx))

	tx = begin(t, pool)
	_, err := pglock.LockRow(ctx, tx, pglock.ForUpdate, pgx.RowTo[int], oneAccount, 1)
	if !errors.Is(err, context.Canceled) || errors.Is(err, pglock.ErrLocked) {
		t.Errorf("with a context that ended before: %v", err)
	}
	usable(t, tx)
}

// At the higher levels a row that changed since the snapshot is the caller's
// to try again with the whole transaction.
func TestLockRow_ChangedSinceTheSnapshot(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 1)
	for _, level := range levels {
		inTx(t, pool, level, func(tx pgx.Tx) {
			before := one[int](t, tx, oneAccount, 1)
			exec(t, pool, `UPDATE accounts SET balance = balance + 1`)
			got, err := pglock.LockRow(t.Context(), tx, pglock.ForNoKeyUpdate, pgx.RowTo[int], oneAccount, 1)
			switch {
			case level == pgx.ReadCommitted && (err != nil || got != before+1):
				t.Errorf("%v: got %d, %v", level, got, err)
			case level != pgx.ReadCommitted && (sqlState(err) != "40001" || errors.Is(err, pglock.ErrLocked)):
				t.Errorf("%v: %v", level, err)
			}
		})
	}
}

// TestLockRows_R01_Deadlock has workers lock random sets of rows: in the order
// of the key there is no deadlock, in a random order there is one.
func TestLockRows_R01_Deadlock(t *testing.T) {
	t.Parallel()
	const workers = 20
	pool := accounts(t, 10)
	// A deadlock ends all workers: each costs a second until it is found.
	contend := func(what string, rounds int, sql string) error {
		g, ctx := errgroup.WithContext(t.Context())
		var locked atomic.Int64
		start := time.Now()
		for range workers {
			g.Go(func() error {
				for range rounds {
					err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
						_, err := pglock.LockRows(ctx, tx, pglock.ForNoKeyUpdate, pgx.RowTo[int], sql, rand.Perm(10)[:5])
						return err
					})
					if err != nil {
						return err
					}
					locked.Add(1)
				}
				return nil
			})
		}
		err := g.Wait()
		t.Logf("%s: %d workers locked %d of %d sets of 5 rows out of 10 in %v, and then: %v",
			what, workers, locked.Load(), workers*rounds, time.Since(start).Round(time.Millisecond), err)
		return err
	}
	if err := contend("in order", scale(500, 20), `SELECT id FROM accounts WHERE id - 1 = ANY ($1) ORDER BY id`); err != nil {
		t.Errorf("in order: %v", err)
	}
	err := contend("in random order", 500, `SELECT id FROM accounts WHERE id - 1 = ANY ($1) ORDER BY random()`)
	if sqlState(err) != "40P01" || !strings.Contains(err.Error(), "pglock: deadlock, which aborts this transaction; Process ") {
		t.Errorf("in random order: %v, want a deadlock, and called so", err)
	}
}

// TestLockRows_Queue takes work by SkipLocked from several workers: each job
// once, none left.
func TestLockRows_Queue(t *testing.T) {
	t.Parallel()
	pool := accounts(t, 60)
	var g errgroup.Group
	done := make(chan int, 1000)
	for range 6 {
		g.Go(func() error {
			for {
				var ids []int
				err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
					ids, err = pglock.LockRows(t.Context(), tx, pglock.ForUpdate.SkipLocked(), pgx.RowTo[int], `SELECT id FROM accounts LIMIT 3`)
					if err == nil {
						_, err = tx.Exec(t.Context(), `DELETE FROM accounts WHERE id = ANY ($1)`, ids)
					}
					return err
				})
				if err != nil || len(ids) == 0 {
					return err
				}
				for _, id := range ids {
					done <- id
				}
			}
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	close(done)
	seen := map[int]int{}
	for id := range done {
		seen[id]++
	}
	if len(seen) != 60 {
		t.Errorf("%d jobs were done, want 60", len(seen))
	}
	for id, n := range seen {
		if n != 1 {
			t.Errorf("job %d was done %d times", id, n)
		}
	}
}
