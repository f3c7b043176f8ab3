package pglock_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// vanishing is clients that share a few leases, and some of whom are gone from
// one moment to the next.
type vanishing struct {
	t    *testing.T
	pool *pgxpool.Pool
	ttl  time.Duration
	end  time.Time

	mu               sync.Mutex
	asked, granted   map[string]int // by the lease's name
	waiters, holders int            // that vanished
	late             int            // guarded transactions that ended after the expiry
	longest          time.Duration
}

// more says whether to go on.
func (v *vanishing) more() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return time.Now().Before(v.end) || v.holders < 2 && !v.t.Failed()
}

// oneIn counts, and picks one of so many. They are evenly spread, so that no
// two holders of a lease vanish one right after the other: that would take two
// TTLs, and the wait is judged that one takes.
func (v *vanishing) oneIn(n int, counted map[string]int, name string, picked *int) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	counted[name]++
	if counted[name]%n != n/2 {
		return false
	}
	*picked++
	return true
}

// client lives until the time is over or it vanishes.
func (v *vanishing) client(name string) error {
	ctx := context.Background()
	g := &gate{}
	config := v.pool.Config()
	config.ConnConfig.Tracer = g
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	locks := pglock.New(pool)
	vanished := false
	defer func() {
		g.shut.Store(vanished)
		if err := locks.Close(ctx); err != nil && !vanished {
			v.t.Error(err)
		}
	}()
	for v.more() {
		if v.oneIn(33, v.asked, name, &v.waiters) { // it draws a ticket, and nobody ever looks after that
			if _, err := v.pool.Exec(ctx, `SELECT pglock.enqueue($1, $2, gen_random_uuid(), 'nobody')`, name, v.ttl); err != nil {
				return err
			}
		}
		asked := time.Now()
		l, err := locks.Acquire(ctx, name, v.ttl)
		if err != nil {
			return err
		}
		waited := time.Since(asked)
		v.mu.Lock()
		v.longest = max(v.longest, waited)
		v.mu.Unlock()
		stays := rand.N(v.ttl / 20)
		if vanished = v.oneIn(50, v.granted, name, &v.holders); vanished {
			stays = v.ttl * 6 / 5
		}
		if err := v.section(l, stays, func() { g.shut.Store(vanished) }); err != nil && !errors.Is(err, pglock.ErrLost) {
			return err
		}
		if vanished {
			return nil
		}
		if err := l.Release(ctx); err != nil && !errors.Is(err, pglock.ErrLost) {
			return err
		}
	}
	return nil
}

// section is a guarded transaction, over a connection that doesn't vanish. The
// database notes when it was in there.
func (v *vanishing) section(l *pglock.Lease, stays time.Duration, inside func()) error {
	ctx := context.Background()
	return pgx.BeginFunc(ctx, v.pool, func(tx pgx.Tx) error {
		if err := pglock.SetHoldTimeout(ctx, tx, limit); err != nil {
			return err
		}
		if err := l.Guard(ctx, tx); err != nil {
			return err
		}
		var entered time.Time
		if err := tx.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&entered); err != nil {
			return err
		}
		inside()
		wait(stays)
		var within bool // or somebody else has it already
		err := tx.QueryRow(ctx, `INSERT INTO sections VALUES ($1, $2, $3, clock_timestamp())
			RETURNING EXISTS (SELECT FROM pglock.leases WHERE name = $1 AND token = $2 AND expires_at > left_at)`,
			l.Name(), l.Token(), entered).Scan(&within)
		if !within {
			v.mu.Lock()
			v.late++
			v.mu.Unlock()
		}
		return err
	})
}

// Waiters and holders that vanish hold up the others no longer than their time
// lasts, and what is guarded is never done by two at once, also where it takes
// longer than the lease.
func TestLease_Vanishing(t *testing.T) {
	t.Parallel()
	for name, mutant := range map[string]bool{"ours": false, "mutant: taken beside guards": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			v := &vanishing{t: t, ttl: 400 * time.Millisecond, asked: map[string]int{}, granted: map[string]int{}}
			v.pool = roomy(t, pgtest.Pool(t), 12)
			audit(t, v.pool, false)
			exec(t, v.pool, `CREATE TABLE sections (name text, token bigint, entered_at timestamptz, left_at timestamptz);
				SELECT pglock.create_names('{a, b, c}')`)
			if mutant { // what is taken at its expiry is locked so that a guard's FOR KEY SHARE is passed
				for _, function := range []string{"acquire", "enqueue", "refresh"} {
					replace(t, v.pool, function, `FOR UPDATE`, `FOR NO KEY UPDATE`)
				}
			}
			v.end = time.Now().Add(pgtest.Lasting(14*time.Second, 3*time.Second, 2*time.Second))
			var wg sync.WaitGroup
			for i := range 10 {
				wg.Go(func() {
					for v.more() {
						if err := v.client(string('a' + rune(i%3))); err != nil {
							t.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			overlaps := one[int](t, v.pool, `SELECT count(*) FROM sections a JOIN sections b USING (name)
				WHERE a.token < b.token AND a.entered_at < b.left_at AND b.entered_at < a.left_at`)
			grants, inverted := inversions(t, v.pool)
			t.Logf("%d grants; %d waiters and %d holders vanished; %d guarded sections ended after the expiry, %d overlapped; %d tokens not above the one before; the longest wait took %v, with a TTL of %v",
				grants, v.waiters, v.holders, v.late, overlaps, inverted, v.longest, v.ttl)
			if v.waiters == 0 || v.late == 0 {
				t.Error("nobody vanished, or not while it was guarded: this test shows nothing")
			}
			if mutant {
				if overlaps == 0 {
					t.Error("no guarded sections overlap: this test shows nothing")
				}
				return
			}
			if overlaps != 0 || inverted != 0 {
				t.Errorf("%d guarded sections overlap, %d tokens are not above the one before", overlaps, inverted)
			}
			if most := 10 * 2 * v.ttl; v.longest > most {
				t.Errorf("somebody waited %v, want at most %v", v.longest, most)
			}
		})
	}
}
