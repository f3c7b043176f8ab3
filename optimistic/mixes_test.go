package optimistic_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/optimistic"
)

// Random mixes of everything that writes, on few rows: the rows hold exactly
// what was reported as done, versions count the updates, RunInTx hides every
// serialization failure and deadlock, and the mixes did meet conflicts. In the
// control one way in five writes without comparing, and the sums don't agree.
func TestMixes(t *testing.T) {
	t.Parallel()
	runs := 300
	if testing.Short() {
		runs = 30
	}
	pool := newPool(t, manyAccounts, runtimeParam("deadlock_timeout", "10ms"))
	seed := rand.Uint64()
	defer func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	}()
	random := rand.New(rand.NewPCG(seed, 0))
	run := func(n int, blind bool) (m *mix, balance, updates int64) {
		m = &mix{rows: 1 + random.Int64N(4), level: []pgx.TxIsoLevel{pgx.Serializable, pgx.RepeatableRead}[n%2], blind: blind}
		exec(t, pool, `UPDATE accounts SET balance = 0, version = 1`)
		workers, ops := 2+random.IntN(5), 2+random.IntN(4)
		seeds := make([]uint64, workers)
		for i := range seeds {
			seeds[i] = random.Uint64()
		}
		parallel(workers, func(i int) {
			r := rand.New(rand.NewPCG(seeds[i], 1))
			for range ops {
				if err := m.step(t.Context(), pool, r); err != nil {
					t.Errorf("run %d: %v", n, err)
				}
			}
		})
		return m, query[int64](t, pool, `SELECT sum(balance)::bigint FROM accounts`),
			query[int64](t, pool, `SELECT sum(version - 1)::bigint FROM accounts`)
	}
	var all struct{ done, balance, updates, conflicts, again, exhausted int64 }
	for n := range runs {
		m, balance, updates := run(n, false)
		if done := m.done.Load(); balance != done || updates != done {
			t.Errorf("run %d: %d reported, the balances hold %d and the versions count %d", n, done, balance, updates)
		}
		if t.Failed() {
			return
		}
		all.done, all.balance, all.updates = all.done+m.done.Load(), all.balance+balance, all.updates+updates
		all.conflicts, all.again, all.exhausted = all.conflicts+m.conflicts.Load(), all.again+m.again.Load(), all.exhausted+m.exhausted.Load()
	}
	if all.conflicts == 0 || all.again == 0 {
		t.Errorf("%d conflicts and %d transactions that ran again: nobody met anybody", all.conflicts, all.again)
	}
	t.Logf("%d runs: %d increments reported, %d stored, %d counted by the versions; %d conflicts; %d transactions ran again, %d gave up at their bound",
		runs, all.done, all.balance, all.updates, all.conflicts, all.again, all.exhausted)

	for n := range 200 {
		if m, balance, _ := run(n, true); balance < m.done.Load() {
			t.Logf("control: %d reported in run %d, %d stored", m.done.Load(), n, balance)
			return
		}
	}
	t.Error("the control lost nothing")
}

// A mix is one run: what its writers did and met.
type mix struct {
	rows                              int64
	level                             pgx.TxIsoLevel
	blind                             bool // the mutant: CompareAndSet doesn't compare
	done, conflicts, again, exhausted atomic.Int64
}

// step adds 1 to one row or to several, in one of five ways. A conflict is an
// answer, ErrExhausted too; any other error isn't.
func (m *mix) step(ctx context.Context, db *pgxpool.Pool, r *rand.Rand) error {
	id := 1 + r.Int64N(m.rows)
	switch way := r.IntN(5); way {
	case 0:
		calls := int64(0)
		_, err := accounts.Update(ctx, db, id, func(a account) (account, error) {
			calls++
			a.Balance++
			return a, nil
		})
		m.conflicts.Add(max(0, calls-1))
		return m.count(1, err)
	case 1:
		now, err := accounts.Get(ctx, db, id)
		if err == nil && m.blind {
			_, err = db.Exec(ctx, `UPDATE accounts SET balance = $2, version = version + 1 WHERE id = $1`, id, now.Value.Balance+1)
		} else if err == nil {
			_, err = accounts.CompareAndSet(ctx, db, id, now.Version, account{Balance: now.Value.Balance + 1})
		}
		// It never retries, and a writer in line for one row can be the one whom
		// the server picks to end a deadlock of those around it.
		if wantedState(err, "40P01") {
			m.conflicts.Add(1)
			return nil
		}
		return m.count(1, err)
	case 2, 3:
		var changes []change
		for _, n := range r.Perm(int(m.rows)) {
			now, err := accounts.Get(ctx, db, int64(n+1))
			if err != nil {
				return err
			}
			changes = append(changes, change{int64(n + 1), now.Version, account{Balance: now.Value.Balance + 1}})
		}
		var opts []optimistic.ManyOption
		if way == 3 {
			opts = append(opts, optimistic.Partial())
		}
		outcomes, err := accounts.CompareAndSetMany(ctx, db, changes, opts...)
		written := int64(0)
		for _, o := range outcomes {
			if o.Err == nil {
				written++
			}
		}
		if way == 2 && written != 0 && written != m.rows {
			return fmt.Errorf("%d of %d rows were written", written, m.rows)
		}
		m.done.Add(written)
		return m.count(0, err)
	default:
		return m.inTx(ctx, db, r)
	}
}

// inTx adds 1 to two rows in one transaction, in any order.
func (m *mix) inTx(ctx context.Context, db *pgxpool.Pool, r *rand.Rand) error {
	first := r.Int64N(m.rows)
	ids := []int64{1 + first, 1 + (first+1)%m.rows}
	calls := int64(0)
	err := optimistic.RunInTx(ctx, db, func(ctx context.Context, tx pgx.Tx) error {
		calls++
		for _, id := range ids {
			if _, err := accounts.Update(ctx, tx, id, deposit(1)); err != nil {
				return err
			}
		}
		return nil
	}, optimistic.WithTxOptions(pgx.TxOptions{IsoLevel: m.level}))
	m.again.Add(max(0, calls-1))
	if errors.Is(err, optimistic.ErrExhausted) {
		m.exhausted.Add(1)
		if calls < 20 {
			return fmt.Errorf("gave up after %d of 20 attempts: %w", calls, err)
		}
	}
	return m.count(2, err)
}

// count takes a result: n successes, a conflict, or what has to be an error.
func (m *mix) count(n int64, err error) error {
	switch {
	case err == nil:
		m.done.Add(n)
	case errors.Is(err, optimistic.ErrExhausted), errors.Is(err, optimistic.ErrConflict):
		m.conflicts.Add(1)
	default:
		return err
	}
	return nil
}
