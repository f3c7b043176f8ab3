package pglock_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// history is a test's record of what its clients asked and were told.
type history struct {
	t         *testing.T
	pool      *pgxpool.Pool     // the test's own, on which there are no faults
	functions map[string]string // those in whose place mutants are called
	start     time.Time
	serial    atomic.Int64

	mu     sync.Mutex
	calls  []call
	faults int
	counts map[string]int // by verb and answer
}

// newHistory has the database record who was granted what and when, for calls
// whose answers were lost: a call stands in its lease's metadata.
func newHistory(t *testing.T, functions map[string]string) *history {
	h := &history{t: t, pool: pgtest.Pool(t), functions: functions, counts: map[string]int{}}
	exec(t, h.pool, `CREATE TABLE granted (name text, token bigint, call bigint, acquired_at timestamptz, expires_at timestamptz);
		CREATE FUNCTION note_granted() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO public.granted VALUES (NEW.name, NEW.token, (NEW.metadata ->> 'call')::bigint, NEW.acquired_at, NEW.expires_at);
			RETURN NULL;
		END $$;
		CREATE TRIGGER note_granted AFTER UPDATE ON pglock.leases FOR EACH ROW
			WHEN (NEW.token <> OLD.token) EXECUTE FUNCTION note_granted();
		CREATE TABLE writes (nth bigserial PRIMARY KEY, name text NOT NULL, token bigint NOT NULL);
		SELECT pglock.create_names('{a, b, c, d, e}')`)
	return h
}

func (h *history) now() int64 { return int64(time.Since(h.start)) }

func (h *history) function(verb string) string {
	if f := h.functions[verb]; f != "" {
		return f
	}
	return "pglock." + verb
}

func (h *history) add(c call) {
	if c.Returned == 0 && c.id != 0 {
		c.Returned = h.now()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls = append(h.calls, c)
	h.counts[c.Verb+" "+c.Answer]++
}

// run has clients play for a time, and for longer if it takes longer until there
// were so many calls and so many faults.
func (h *history) run(clients int, lasts time.Duration, calls, faults int, play func(*player, string)) {
	players := make([]*player, clients)
	for i := range players {
		p := &player{history: h, id: i}
		config := h.pool.Config()
		config.MaxConns = 2
		config.ConnConfig.Tracer = &p.gate
		config.ConnConfig.RuntimeParams["application_name"] = "player"
		pool, err := pgxpool.NewWithConfig(h.t.Context(), config)
		if err != nil {
			h.t.Fatal(err)
		}
		h.t.Cleanup(pool.Close)
		p.pool, p.locks = pool, newClient(h.t, pool)
		players[i] = p
	}
	h.start = time.Now()
	over := func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		d := time.Since(h.start)
		return d > lasts && (len(h.calls) >= calls && h.faults >= faults || d > lasts+limit)
	}
	var wg sync.WaitGroup
	for _, p := range players {
		wg.Go(func() {
			for !over() {
				play(p, string('a'+rune(rand.N(5))))
			}
		})
	}
	for second := lasts / 60; faults > 0 && !over(); {
		wait(second + rand.N(2*second)) // 1 to 3 s of a minute
		h.fault(players[rand.N(len(players))])
	}
	wg.Wait()
}

// fault holds a client up, or ends a backend of one.
func (h *history) fault(p *player) {
	faults := 1
	if rand.N(2) == 0 && p.gate.TryLock() {
		time.AfterFunc(playTTL/4+rand.N(2*playTTL), p.gate.Unlock)
	} else if err := h.pool.QueryRow(context.Background(), `SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM (
		SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'player'
		ORDER BY random() LIMIT 1) p`).Scan(&faults); err != nil {
		h.t.Error(err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.faults += faults
}

// wait is for the times that clients take, and that faults take to come.
func wait(d time.Duration) { <-time.After(d) }

// clock reads the database's, in µs.
func (h *history) clock() int64 {
	var now time.Time
	if err := h.pool.QueryRow(context.Background(), `SELECT clock_timestamp()`).Scan(&now); err != nil {
		h.t.Error(err)
	}
	return now.UnixMicro()
}

// complete returns the calls as the checker takes them. A grant that nobody was
// told of is known from the database: it was made after its call began.
func (h *history) complete() []call {
	h.t.Helper()
	end := h.now()
	byID := map[int]call{}
	told := map[pglock.Token]int{}
	var calls []call
	for _, c := range h.calls {
		if c.Returned < c.Called {
			c.Returned = max(end, c.Called)
		}
		if c.id != 0 {
			byID[c.id] = c
		}
		if c.Verb != "acquire" || c.Answer != "unknown" {
			calls = append(calls, c)
		}
		if c.Verb == "acquire" && c.Answer == "granted" {
			told[c.Token] = len(calls) - 1
		}
	}
	if h.functions["acquire"] != "" {
		return calls // a mutant keeps no metadata; no grant's answer is lost there
	}
	rows, err := h.pool.Query(h.t.Context(), `SELECT name, token, call, acquired_at, expires_at FROM granted ORDER BY token`)
	if err != nil {
		h.t.Fatal(err)
	}
	var name string
	var token pglock.Token
	var id int
	var at, expires time.Time
	if _, err := pgx.ForEachRow(rows, []any{&name, &token, &id, &at, &expires}, func() error {
		c, known := byID[id]
		if !known || c.Name != name {
			h.t.Errorf("token %d of %q was granted, and nobody asked for it", token, name)
			return nil
		}
		i, ok := told[token]
		if !ok {
			i = len(calls)
			c.Answer, c.Token, c.Loose, c.Kept = "granted", token, c.Kept, false
			c.Returned = max(end, c.Called)
			calls = append(calls, c)
			h.counts["grants that nobody was told of"]++
		}
		calls[i].From, calls[i].To, calls[i].Expires = at.UnixMicro(), at.UnixMicro(), expires.UnixMicro()
		return nil
	}); err != nil {
		h.t.Fatal(err)
	}
	return calls
}

// Whatever clients are told, while backends are killed and clients held up, is
// what a lease would answer, one call after the other.
func TestHistory(t *testing.T) {
	t.Parallel()
	h := newHistory(t, nil)
	lasts := pgtest.Lasting(time.Minute, 3*time.Second, 2*time.Second)
	want := int(2000 * lasts / time.Minute)
	h.run(10, lasts, want, 20, (*player).play)
	calls := h.complete()
	t.Logf("%d calls and %d faults in %v: %v", len(h.calls), h.faults, time.Since(h.start), h.counts)
	if len(h.calls) < want || h.faults < 20 {
		t.Errorf("%d calls and %d faults, want %d and 20", len(h.calls), h.faults, want)
	}
	began := time.Now()
	wrong, result := judge(t, calls)
	t.Logf("judged in %v", time.Since(began))
	if result != porcupine.Ok {
		t.Errorf("the answers are not a lease's: %v", result)
		preserve(t, wrong)
	}
	if n := one[int](t, h.pool, `SELECT count(*) FROM (SELECT token < lag(token) OVER (PARTITION BY name ORDER BY nth) AS late FROM writes) w WHERE late`); n > 0 {
		t.Errorf("%d guarded writes came after those of a later holder", n)
	}
}
