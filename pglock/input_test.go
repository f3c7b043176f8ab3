package pglock_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

const day = 24 * time.Hour

// Bad input is refused before a connection is opened.
func TestInput_L12_RefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	pool, spy := spied(t, pgtest.DSN(t))
	long := strings.Repeat("x", 1025)
	for _, tt := range []struct {
		what  string
		owner string
		name  string
		ttl   time.Duration
		meta  map[string]string
		want  []string // in the error
	}{
		{"empty name", "o", "", time.Second, nil, []string{"empty lease name"}},
		{"long name", "o", long, time.Second, nil, []string{`"xxxx`, "1025", "1024"}},
		{"name with a NUL", "o", "a\x00b", time.Second, nil, []string{`"a\x00b"`, "NUL"}},
		{"name that is not UTF-8", "o", "a\xffb", time.Second, nil, []string{`"a\xffb"`, "UTF-8"}},
		{"name cut within a character", "o", "a\xc3", time.Second, nil, []string{`"a\xc3"`, "UTF-8"}},
		{"TTL of zero", "o", "n", 0, nil, []string{"TTL 0s", "100ms", "24h"}},
		{"negative TTL", "o", "n", -time.Second, nil, []string{"TTL -1s"}},
		{"TTL of 99 ms", "o", "n", 99 * time.Millisecond, nil, []string{"TTL 99ms"}},
		{"TTL just too short", "o", "n", 100*time.Millisecond - 1, nil, []string{"TTL 99.999999ms"}},
		{"TTL just too long", "o", "n", day + 1, nil, []string{"TTL 24h0m0.000000001s"}},
		{"huge TTL", "o", "n", 1<<63 - 1, nil, []string{"TTL 2562047h"}},
		{"empty owner", "", "n", time.Second, nil, []string{"empty owner"}},
		{"long owner", long, "n", time.Second, nil, []string{"owner", `"xxxx`, "1025"}},
		{"owner with a NUL", "o\x00", "n", time.Second, nil, []string{"owner", `"o\x00"`}},
		{"owner that is not UTF-8", "o\xff", "n", time.Second, nil, []string{"owner", `"o\xff"`}},
		{"much metadata", "o", "n", time.Second, map[string]string{"k": strings.Repeat("x", 4096)}, []string{"metadata", "4104", "4096"}},
		{"metadata key with a NUL", "o", "n", time.Second, map[string]string{"k\x00": "v"}, []string{"metadata", `"k\x00"`}},
		{"metadata value with a NUL", "o", "n", time.Second, map[string]string{"k": "v\x00"}, []string{"metadata", `"v\x00"`}},
		{"metadata that is not UTF-8", "o", "n", time.Second, map[string]string{"k": "v\xff"}, []string{"metadata", `"v\xff"`}},
	} {
		c := newClient(t, pool, pglock.WithOwner(tt.owner))
		_, tried := c.TryAcquire(t.Context(), tt.name, tt.ttl, pglock.WithMetadata(tt.meta))
		_, waited := c.Acquire(t.Context(), tt.name, tt.ttl, pglock.WithMetadata(tt.meta))
		run := c.WithLease(t.Context(), tt.name, tt.ttl, func(context.Context, *pglock.Lease) error {
			t.Errorf("%s: WithLease ran its function", tt.what)
			return nil
		}, pglock.WithMetadata(tt.meta))
		for verb, err := range map[string]error{"TryAcquire": tried, "Acquire": waited, "WithLease": run} {
			if err == nil || errors.Is(err, pglock.ErrLocked) {
				t.Errorf("%s: %s says %v", tt.what, verb, err)
				continue
			}
			for _, part := range tt.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%s: %s says %q, which lacks %s", tt.what, verb, err, part)
				}
			}
		}
	}
	if connects, statements := spy.used(); connects != 0 || statements != 0 {
		t.Errorf("%d connections were opened and %d statements sent", connects, statements)
	}

	// The control: the spy hears what passes.
	acquire(t, newClient(t, pool), "passes", time.Minute)
	if connects, statements := spy.used(); connects == 0 || statements == 0 {
		t.Errorf("the spy heard nothing of a good call: this test shows nothing")
	}
}

// Fence looks at its input before it touches the transaction.
func TestInput_L12_Fence(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		resource string
		token    pglock.Token
		want     string
	}{
		{"", 1, "empty resource name"},
		{strings.Repeat("x", 1025), 1, "1025"},
		{"a\x00", 1, `"a\x00"`},
		{"a\xff", 1, `"a\xff"`},
		{"r", 0, "token 0"},
		{"r", -7, "token -7"},
	} {
		if err := pglock.Fence(t.Context(), nil, tt.resource, tt.token); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("Fence(%.20q, %d) says %v, which lacks %s", tt.resource, tt.token, err, tt.want)
		}
	}
}

// Another language gets the same refusals from the functions themselves.
func TestInput_L12_TheFunctionsRefuseTheSame(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	long := "repeat('x', 1025)"
	for sql, want := range map[string]string{
		`SELECT pglock.acquire('{""}', '1 s')`:                   "22023",
		`SELECT pglock.acquire('{NULL}', '1 s')`:                 "22023",
		`SELECT pglock.acquire('{a,""}', '1 s')`:                 "22023",
		`SELECT pglock.acquire(ARRAY[` + long + `], '1 s')`:      "22023",
		`SELECT pglock.acquire('{a,a}', '1 s')`:                  "22023",
		`SELECT pglock.acquire('{a}', '0')`:                      "22023",
		`SELECT pglock.acquire('{a}', '-1 s')`:                   "22023",
		`SELECT pglock.acquire('{a}', '99 ms')`:                  "22023",
		`SELECT pglock.acquire('{a}', '24:00:00.000001')`:        "22023",
		`SELECT pglock.acquire('{a}', NULL)`:                     "22023",
		`SELECT pglock.acquire('{a}', '1 s', NULL)`:              "22023",
		`SELECT pglock.renew(NULL, '{1}')`:                       "22023",
		`SELECT pglock.renew('{a}', '{1,2}')`:                    "22023",
		`SELECT pglock.release('{a,b}', '{1}')`:                  "22023",
		`SELECT pglock.release('{a}', NULL)`:                     "22023",
		`SELECT pglock.guard('', 1)`:                             "22023",
		`SELECT pglock.guard(NULL, 1)`:                           "22023",
		`SELECT pglock.guard(` + long + `, 1)`:                   "22023",
		`SELECT pglock.fence('', 1)`:                             "22023",
		`SELECT pglock.fence(` + long + `, 1)`:                   "22023",
		`SELECT pglock.fence('r', 0)`:                            "22023",
		`SELECT pglock.fence('r', NULL)`:                         "22023",
		`SELECT pglock.acquire(ARRAY[E'a\x00'], '1 s')`:          "22021", // the server's own encoding check
		`SELECT pglock.acquire(ARRAY[E'a\xff'], '1 s')`:          "22021",
		`SELECT pglock.acquire('{fine}', '100 ms')`:              "",
		`SELECT pglock.acquire('{fine too}', '24 h')`:            "",
		`SELECT pglock.acquire(ARRAY[repeat('x', 1024)], '1 s')`: "",
	} {
		if _, err := pool.Exec(t.Context(), sql); sqlState(err) != want || (err == nil) != (want == "") {
			t.Errorf("%s says %v, want SQLSTATE %q", sql, err, want)
		}
	}
	if got := one[[]string](t, pool, `SELECT array_agg(left(name, 10) ORDER BY name) FROM pglock.leases`); len(got) != 3 {
		t.Errorf("rows exist for %q: refused calls wrote", got)
	}
}

// Names are bytes. What arrays, patterns or humans would treat as special is
// acquired, renewed, guarded and released like any other, whatever way pgx
// sends its arguments.
func TestInput_L12_NamesAreBytes(t *testing.T) {
	t.Parallel()
	names := []string{
		"x", " ", " x ", "NULL", "null", "{}", "{a,b}", `"quoted"`, "it's", `back\slash`, `\`, "a,b", "(1)",
		"line\nfeed", "carriage\r\nreturn", "tab\t", "percent%_", "$1", "accounts/42", "--", "/*", ";",
		"🔒", "caf\u00e9", "cafe\u0301", "\u200b", "\u202egnip", "\ufffd", "\U0010ffff", "\x01\x7f", "ÄÖÜ", "äöü",
		strings.Repeat("x", 1024), strings.Repeat("é", 512),
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			pool := poolBy(t, pgtest.DSN(t), func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
			c := newClient(t, pool, pglock.WithOwner(`{"o", 'w\`))
			var held []*pglock.Lease
			for _, name := range names {
				l, err := c.TryAcquire(t.Context(), name, 10*time.Second, pglock.WithMetadata(map[string]string{name: name}))
				if err != nil {
					t.Fatalf("%q: %v", name, err)
				}
				if !one[bool](t, pool, `SELECT token = $2 AND metadata->>$1 = $1 AND holder = $3 FROM pglock.leases WHERE name = $1`,
					name, int64(l.Token()), l.Owner()) {
					t.Errorf("%q: the row says otherwise", name)
				}
				held = append(held, l)
			}
			until(t, pool, "every lease renewed", `SELECT bool_and(expires_at > acquired_at + ttl) FROM pglock.leases`)
			for _, l := range held {
				inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
					if err := l.Guard(t.Context(), tx); err != nil {
						t.Errorf("%q: %v", l.Name(), err)
					}
					if err := pglock.Fence(t.Context(), tx, l.Name(), l.Token()); err != nil {
						t.Errorf("%q: %v", l.Name(), err)
					}
				})
				if err := l.Release(t.Context()); err != nil {
					t.Errorf("%q: %v", l.Name(), err)
				}
			}
			if n := one[int64](t, pool, `SELECT count(*) FROM pglock.leases WHERE claim IS NOT NULL`); n != 0 {
				t.Errorf("%d leases are still held", n)
			}
			if n := one[int64](t, pool, `SELECT count(*) FROM pglock.leases`); n != int64(len(names)) {
				t.Errorf("%d names became %d rows", len(names), n)
			}
		})
	}
}

func TestInput_L12_LimitsPass(t *testing.T) {
	t.Parallel()
	c := newClient(t, pgtest.Pool(t), pglock.WithOwner(strings.Repeat("o", 1024)))
	acquire(t, c, "longest", day)
	if _, err := c.TryAcquire(t.Context(), "shortest", 100*time.Millisecond); err != nil && !errors.Is(err, pglock.ErrLost) { // the answer may come late
		t.Error(err)
	}
	most := map[string]string{"k": strings.Repeat("x", 4096-len(`{"k":""}`))}
	if _, err := c.TryAcquire(t.Context(), "richest", time.Minute, pglock.WithMetadata(most)); err != nil {
		t.Error(err)
	}
}

// A context that has ended, and a client that was closed, are told apart from
// each other and from a lease that somebody has; neither sends anything.
func TestInput_EndedBefore(t *testing.T) {
	t.Parallel()
	pool, spy := spied(t, pgtest.DSN(t))
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	late, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	open, closed := newClient(t, pool), newClient(t, pool)
	if err := closed.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		what string
		c    *pglock.Client
		ctx  context.Context
		want error
	}{
		{"cancelled context", open, cancelled, context.Canceled},
		{"context past its deadline", open, late, context.DeadlineExceeded},
		{"closed client", closed, t.Context(), pglock.ErrClosed},
	} {
		calls := map[string]func() error{
			"TryAcquire": func() error { _, err := tt.c.TryAcquire(tt.ctx, "n", time.Minute); return err },
			"Acquire":    func() error { _, err := tt.c.Acquire(tt.ctx, "n", time.Minute); return err },
			"WithLease": func() error {
				return tt.c.WithLease(tt.ctx, "n", time.Minute, func(context.Context, *pglock.Lease) error { return nil })
			},
			"Lock":    func() error { _, err := tt.c.Lock(tt.ctx, pglock.KeyOf("n")); return err },
			"TryLock": func() error { _, err := tt.c.TryLock(tt.ctx, pglock.KeyOf("n")); return err },
		}
		for verb, call := range calls {
			if err := call(); !errors.Is(err, tt.want) || errors.Is(err, pglock.ErrLocked) {
				t.Errorf("%s with a %s says %v, want %v", verb, tt.what, err, tt.want)
			}
		}
	}
	if connects, statements := spy.used(); connects != 0 || statements != 0 {
		t.Errorf("%d connections were opened and %d statements sent", connects, statements)
	}
}
