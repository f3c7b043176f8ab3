package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// audit has the database itself record the grants, in the order in which they
// happened: the trigger runs while the row is locked, so that the entries of
// one name can't overtake each other. With alwaysExpired every grant has run
// out as soon as it is made.
func audit(t *testing.T, pool *pgxpool.Pool, alwaysExpired bool) {
	t.Helper()
	exec(t, pool, `CREATE TABLE grants (nth bigserial PRIMARY KEY, name text, token bigint);
		CREATE FUNCTION note_grant() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO public.grants (name, token) VALUES (NEW.name, NEW.token);
			RETURN NULL;
		END $$;
		CREATE TRIGGER note_created AFTER INSERT ON pglock.leases FOR EACH ROW
			WHEN (NEW.claim IS NOT NULL) EXECUTE FUNCTION note_grant();
		CREATE TRIGGER note_taken AFTER UPDATE ON pglock.leases FOR EACH ROW
			WHEN (NEW.claim IS NOT NULL AND NEW.token <> OLD.token) EXECUTE FUNCTION note_grant()`)
	if alwaysExpired {
		exec(t, pool, `CREATE FUNCTION expire_grant() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN NEW.expires_at := clock_timestamp(); RETURN NEW; END $$;
			CREATE TRIGGER expire_grant BEFORE INSERT OR UPDATE ON pglock.leases
				FOR EACH ROW EXECUTE FUNCTION expire_grant()`)
	}
}

// inversions counts the grants whose token is not above the one before.
func inversions(t *testing.T, pool *pgxpool.Pool) (grants, inverted int64) {
	t.Helper()
	return one[int64](t, pool, `SELECT count(*) FROM grants`),
		one[int64](t, pool, `SELECT count(*) FROM (SELECT token <= lag(token) OVER (PARTITION BY name ORDER BY nth) AS down FROM grants) g WHERE down`)
}

// takeovers has many connections take one lease, so many times each, by a
// function of that schema.
func takeovers(t *testing.T, pool *pgxpool.Pool, schema string, conns, times int, thenRelease bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*limit)
	defer cancel()
	var g errgroup.Group
	for range conns {
		conn := newConn(t, pool)
		g.Go(func() error {
			for won := 0; won < times; {
				var granted bool
				var token *int64
				err := conn.QueryRow(ctx, `SELECT granted, token FROM `+schema+`.acquire('{order}', '1 h')`).Scan(&granted, &token)
				if err != nil && !errors.Is(err, pgx.ErrNoRows) {
					return err
				}
				if granted {
					won++
					if thenRelease {
						if _, err := conn.Exec(ctx, `SELECT `+schema+`.release('{order}', ARRAY[$1::bigint])`, *token); err != nil {
							return err
						}
					}
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
}

func TestLease_L1_TokensRiseInTheOrderOfGrants(t *testing.T) {
	t.Parallel()
	conns, times := scale(64, 16), scale(200, 50)
	for _, tt := range []struct {
		name        string
		mutant      []string
		thenRelease bool
	}{
		{"taken at expiry", nil, false},
		{"taken after release", nil, true},
		{"mutant: token of the proposed row", []string{takeExcluded}, false},
		{"mutant: token drawn in a CTE", []string{takeEarly}, false},
		{"mutant: released by DELETE", []string{takeInserting, releaseDeleting}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			audit(t, pool, !tt.thenRelease)
			schema := "pglock"
			for _, sql := range tt.mutant {
				schema = "mutant"
				mutate(t, pool, sql)
			}
			exec(t, pool, `SELECT pglock.create_names('{order}')`)
			if tt.thenRelease && tt.mutant != nil {
				exec(t, pool, `DELETE FROM pglock.leases`)
			}
			conns, times := conns, times
			if tt.thenRelease { // the losers' tries slow the one that makes progress
				conns, times = 8, 50
			}
			takeovers(t, pool, schema, conns, times, tt.thenRelease)
			grants, inverted := inversions(t, pool)
			rounds := 1
			for ; tt.mutant != nil && inverted == 0 && rounds < 20; rounds++ {
				takeovers(t, pool, schema, conns, times, tt.thenRelease)
				grants, inverted = inversions(t, pool)
			}
			t.Logf("%d grants, %d tokens not above the one before", grants, inverted)
			if want := int64(rounds * conns * times); grants != want {
				t.Errorf("the database recorded %d grants, want %d", grants, want)
			}
			if tt.mutant == nil && inverted != 0 {
				t.Errorf("%d tokens are not above the one before", inverted)
			}
			if tt.mutant != nil && inverted == 0 {
				t.Error("no inversion seen: this test shows nothing")
			}
		})
	}
}

// A token is not handed out twice, whatever becomes of the rows.
func TestLease_L47_TokensOutliveTheirRows(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	c := newClient(t, pool)
	first := acquire(t, c, "purged", time.Minute)
	if err := first.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `DELETE FROM pglock.leases`)
	if again := acquire(t, c, "purged", time.Minute); again.Token() <= first.Token() {
		t.Errorf("token %d after the row was purged, want more than %d", again.Token(), first.Token())
	}
}

// A grant gets its whole TTL, counted from when it is made: the transaction may
// have begun long before (design: the start of the transaction is no clock).
func TestLease_Fact4_TimeIsTakenAfterTheLock(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	exec(t, pool, `SELECT pglock.create_names('{right, wrong}')`)
	mutate(t, pool, takeNow)
	left := func(schema, name string) (left time.Duration) {
		inTx(t, pool, pgx.ReadCommitted, func(tx pgx.Tx) {
			exec(t, tx, `SELECT pg_sleep(0.3)`)
			left = one[time.Duration](t, tx, fmt.Sprintf(`SELECT expires_at - clock_timestamp() FROM %s.acquire('{%s}', '1 h')`, schema, name))
		})
		return left
	}
	const almost = time.Hour - 200*time.Millisecond
	if left := left("pglock", "right"); left < almost {
		t.Errorf("a lease of 1 h has %v left when it is granted", left)
	}
	if left := left("mutant", "wrong"); left >= almost {
		t.Errorf("the mutant's lease has %v left: this test shows nothing", left)
	}
}
