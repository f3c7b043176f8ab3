package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
)

// A lockService grants name until the process ends, or is silent for
// takeoverTTL, and returns the number of the grant.
type lockService func(ctx context.Context, address, name string) (pglock.Token, error)

var lockServices = map[string]lockService{
	"etcd":      lockEtcd,
	"zookeeper": lockZooKeeper,
	"redis":     lockRedis,
}

// lockEtcd's token is the store's revision when the lock was granted. Each
// change of the store has a higher one, and the next holder is granted only
// after the deletion of this one's key, which is a change. The key's version is
// no token: it is 1 for every holder.
func lockEtcd(ctx context.Context, address, name string) (pglock.Token, error) {
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{address}, DialTimeout: patience, Logger: zap.NewNop()})
	if err != nil {
		return 0, err
	}
	session, err := concurrency.NewSession(c, concurrency.WithTTL(int(takeoverTTL.Seconds())))
	if err != nil {
		return 0, err
	}
	mutex := concurrency.NewMutex(session, name)
	if err := mutex.Lock(ctx); err != nil {
		return 0, err
	}
	return pglock.Token(mutex.Header().Revision), nil
}

// lockZooKeeper's token is the czxid of the lock's node: the transaction that
// created it, of all in the ensemble's one order, with the leader's epoch in the
// upper half. Nodes are served in the order in which they were created. The
// number at the end of the node's name is no token: it is the parent's counter,
// of 32 bits, and begins at 0 again when the parent was deleted and made anew.
func lockZooKeeper(ctx context.Context, address, name string) (pglock.Token, error) {
	c, err := zookeeper.dial(ctx, address, 1, takeoverTTL)
	if err != nil {
		return 0, err
	}
	if _, err := c.acquire(ctx, name); err != nil {
		return 0, err
	}
	conn := c.(*zooKeeperClient).conn
	nodes, _, err := conn.Children("/" + name)
	if err != nil {
		return 0, err
	}
	// The client keeps its node's name to itself. A session has one at the most.
	for _, node := range nodes {
		exists, stat, err := conn.Exists("/" + name + "/" + node)
		if err != nil {
			return 0, err
		}
		if exists && stat.EphemeralOwner == conn.SessionID() {
			return pglock.Token(stat.Czxid), nil
		}
	}
	return 0, fmt.Errorf("%q was lost before its node was read", name)
}

// grantScript takes and counts in one step. In two, a holder that is paused between
// them would draw the higher number after its successor.
var grantScript = redis.NewScript(`
	if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
		return redis.call('INCR', KEYS[2])
	end
	return 0`)

// lockRedis's token is a counter beside the lock that never expires. It goes
// only up where Redis forgets nothing: with appendfsync always, and no failover
// to a replica that lags.
func lockRedis(ctx context.Context, address, name string) (pglock.Token, error) {
	c := redis.NewClient(&redis.Options{Addr: address})
	for {
		token, err := grantScript.Run(ctx, c, []string{name, name + "/token"}, os.Getpid(), takeoverTTL.Milliseconds()).Int64()
		if err != nil || token > 0 {
			return pglock.Token(token), err
		}
		select { // Redis has no queue: clients look again
		case <-time.After(20 * time.Millisecond):
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

func TestFence_EtcdRevision(t *testing.T)   { t.Parallel(); refuseLate(t, "etcd", etcd) }
func TestFence_ZooKeeperCzxid(t *testing.T) { t.Parallel(); refuseLate(t, "zookeeper", zookeeper) }
func TestFence_RedisCounter(t *testing.T)   { t.Parallel(); refuseLate(t, "redis", redisDurable) }

// refuseLate has a process take the lock and stop, a second one take over, and
// the first one write when it wakes. With Fence that write is refused; the
// control: without, it wins.
func refuseLate(t *testing.T, service string, c contender) {
	r, _ := up(t, c)
	for _, fenced := range []bool{true, false} {
		t.Run(fmt.Sprintf("fenced=%v", fenced), func(t *testing.T) {
			t.Parallel()
			ctx := bounded(t)
			dsn := pgtest.DSN(t)
			pool := pgtest.PoolOn(t, dsn)
			if _, err := pool.Exec(ctx, `CREATE TABLE files (content text); INSERT INTO files VALUES ('')`); err != nil {
				t.Fatal(err)
			}
			name := fmt.Sprintf("file-%v", fenced)
			a := pause(t, service, r.server.address, name, dsn, fenced)

			// The event that ends the wait is the grant: a is silent, and its time runs out.
			token, err := lockServices[service](ctx, r.server.address, name)
			if err != nil {
				t.Fatal(err)
			}
			if token <= a.token {
				t.Fatalf("the second token is %d, the first was %d", token, a.token)
			}
			conn, err := pgx.Connect(ctx, dsn)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close(context.WithoutCancel(ctx))
			if err := put(ctx, conn, token, "second", fenced); err != nil {
				t.Fatal(err)
			}

			said := a.wake(t)
			var content string
			if err := pool.QueryRow(ctx, `SELECT content FROM files`).Scan(&content); err != nil {
				t.Fatal(err)
			}
			wantSaid, wantContent := fmt.Sprintf("fenced: %d below %d", a.token, token), "second"
			if !fenced {
				wantSaid, wantContent = "written", "first"
			}
			if said != wantSaid || content != wantContent {
				t.Errorf("the late writer said %q, the content is %q; want %q, %q", said, content, wantSaid, wantContent)
			}
		})
	}
}

// put writes under a token, fenced or not.
func put(ctx context.Context, conn *pgx.Conn, token pglock.Token, content string, fenced bool) error {
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if fenced {
			if err := pglock.Fence(ctx, tx, "files", token); err != nil {
				return err
			}
		}
		_, err := tx.Exec(ctx, `UPDATE files SET content = $1`, content)
		return err
	})
}

// writeLate is the holder's process: it takes the lock, says its token, and
// writes when it is told to.
func writeLate(args []string) error {
	if len(args) != 5 {
		return fmt.Errorf("late %q: want service, address, name, DSN and fenced", args)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := pgx.Connect(ctx, args[3])
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	token, err := lockServices[args[0]](ctx, args[1], args[2])
	if err != nil {
		return err
	}
	fmt.Println(token)
	if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
		return err
	}
	err = put(ctx, conn, token, "first", args[4] == "true")
	if refused, ok := errors.AsType[*pglock.FencedError](err); ok {
		fmt.Printf("fenced: %d below %d\n", refused.Token, refused.Highest)
		return nil
	}
	if err == nil {
		fmt.Println("written")
	}
	return err
}

// paused is a holder that has been stopped.
type paused struct {
	*process
	token pglock.Token
	out   *bufio.Reader
	in    *os.File
}

// pause starts a holder and stops it when it has the lock.
func pause(t *testing.T, service, address, name, dsn string, fenced bool) *paused {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "late", service, address, name, dsn, strconv.FormatBool(fenced))
	stdin, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close() })
	cmd.Stdin = stdin
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p, err := spawn(cmd, filepath.Join(t.TempDir(), "log"))
	stdin.Close()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.kill() })
	a := &paused{process: p, out: bufio.NewReader(out), in: in}
	line, err := a.out.ReadString('\n')
	if err != nil {
		t.Fatalf("the first got no lock: %v: %s", err, p.log())
	}
	token, err := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	a.token = pglock.Token(token)
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	return a
}

// wake has it go on, and returns what became of its write.
func (a *paused) wake(t *testing.T) string {
	t.Helper()
	if _, err := a.in.WriteString("\n"); err != nil {
		t.Fatal(err)
	}
	if err := a.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	line, err := a.out.ReadString('\n')
	if err != nil {
		t.Fatalf("the first said nothing: %v: %s", err, a.log())
	}
	return strings.TrimSpace(line)
}
