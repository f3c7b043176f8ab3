package pglock_test

import (
	"context"
	"errors"
	"net"
	osexec "os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// blackHole loses every packet between a server and the port of one of its
// clients, until the test ends. It is the rig iptables.
func blackHole(t *testing.T, server uint16, client int32) {
	t.Helper()
	port := func(option string, n int) []string { return []string{option, strconv.Itoa(n)} }
	for _, way := range [][2]string{{"--sport", "--dport"}, {"--dport", "--sport"}} {
		rule := append(append([]string{"INPUT", "-i", "lo", "-p", "tcp"}, port(way[0], int(server))...), port(way[1], int(client))...)
		rule = append(rule, "-j", "DROP")
		out, err := osexec.Command("iptables", append([]string{"-w", "-I"}, rule...)...).CombinedOutput()
		if err != nil {
			err = errors.Join(err, errors.New(string(out)))
		}
		pgtest.Require(t, "iptables", err)
		t.Cleanup(func() {
			if out, err := osexec.Command("iptables", append([]string{"-w", "-D"}, rule...)...).CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

// A client that is gone from the network, without a word, knows that its locks
// are lost before the server frees them, which it does in 15 s. With a server's
// own settings they stay.
func TestLock_BlackHole(t *testing.T) {
	t.Parallel()
	// Of its own: a port that is lost to one server is soon somebody's to another.
	pool := pgtest.PoolOn(t, pgtest.Server(t).DSN())
	config := pool.Config().ConnConfig
	c := newClient(t, pool)
	key := pglock.KeyOf("leader")
	l := lock(t, c, key)
	plain := newConn(t, pool)
	exec(t, plain, `SELECT pg_advisory_lock(1)`)
	port := func(pid int32) int32 {
		return one[int32](t, pool, `SELECT coalesce(client_port, -1) FROM pg_stat_activity WHERE pid = $1`, pid)
	}
	if local, ok := plain.PgConn().Conn().LocalAddr().(*net.TCPAddr); !ok || !local.IP.IsLoopback() || int32(local.Port) != port(int32(plain.PgConn().PID())) {
		t.Fatal("the server is not on this machine's loopback: no packet to it can be lost")
	}
	server := holder(t, pool, key)
	exec(t, newConn(t, pool), `SELECT pg_advisory_lock(2)`)
	waited := make(chan error, 1)
	go func() {
		_, err := c.Lock(context.WithoutCancel(t.Context()), pglock.KeyInt64(2))
		waited <- err
	}()
	until(t, pool, "the waiter in line", waiters(1))
	// What it has sent is acknowledged within 40 ms. It would be sent again and
	// again otherwise, for longer than anybody asks whether the server is there.
	exec(t, pool, `SELECT pg_sleep(0.3)`)
	blackHole(t, config.Port, port(one[int32](t, pool, `SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)))
	blackHole(t, config.Port, port(int32(plain.PgConn().PID())))
	blackHole(t, config.Port, port(server))
	begun := time.Now()

	err := ended(t, l.Context())
	known := time.Since(begun)
	if !errors.Is(err, pglock.ErrLost) {
		t.Errorf("lost with %v", err)
	}
	if !one[bool](t, pool, `SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND locktype = 'advisory')`, server) {
		t.Error("the server freed it before the holder knew")
	}
	until(t, pool, "the server free the lock", `SELECT NOT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND locktype = 'advisory')`, server)
	freed := time.Since(begun)
	t.Logf("the holder knew after %v, the server freed the lock after %v", known, freed)
	if freed > 30*time.Second {
		t.Errorf("the server freed the lock after %v, want 15 s", freed)
	}
	select {
	case err := <-waited:
		t.Logf("the waiter knew after %v: %v", time.Since(begun), err)
		if err == nil || errors.Is(err, pglock.ErrLocked) {
			t.Errorf("a wait that was cut off: %v", err)
		}
	case <-time.After(limit):
		t.Error("a waiter that was cut off waits on")
	}
	until(t, pool, "the waiter leave the line", waiters(0))
	if !one[bool](t, pool, `SELECT EXISTS (SELECT FROM pg_locks WHERE pid = $1 AND locktype = 'advisory')`, int32(plain.PgConn().PID())) {
		t.Error("the server freed a lock whose connection has its own settings: this test shows nothing")
	}
	exec(t, pool, `SELECT pg_terminate_backend($1)`, int32(plain.PgConn().PID()))
}
