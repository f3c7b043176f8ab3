package pglock_test

import (
	"context"
	"testing"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// A repeat of enqueue that comes while its first ticket is being granted draws
// no second one.
func TestQueue_L5_ARepeatBesideItsGrant(t *testing.T) {
	t.Parallel()
	pool := pgtest.Pool(t)
	const enqueue = `SELECT granted FROM pglock.enqueue('again', '1 h', '00000000-0000-4000-8000-000000000001', 'nobody')`
	token := one[int64](t, pool, `SELECT token FROM pglock.acquire('{again}', '1 h')`)
	if one[bool](t, pool, enqueue) {
		t.Fatal("a held lease was granted")
	}
	release, repeat := newConn(t, pool), newConn(t, pool)
	exec(t, release, `BEGIN`)
	exec(t, release, `SELECT pglock.release('{again}', ARRAY[$1::bigint])`, token)
	granted := make(chan bool, 1)
	go func() {
		var g bool
		if err := repeat.QueryRow(context.Background(), enqueue).Scan(&g); err != nil {
			t.Error(err)
		}
		granted <- g
	}()
	blockedBy(t, pool, release.PgConn().PID())
	exec(t, release, `COMMIT`)
	if !<-granted {
		t.Error("the repeat was not told of the grant")
	}
	if n := one[int64](t, pool, `SELECT count(*) FROM pglock.waiters`); n != 0 {
		t.Errorf("%d tickets are left over", n)
	}
}
