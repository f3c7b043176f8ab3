package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"
)

var zookeeper = contender{
	name:  "zookeeper",
	about: "zk.Lock, a connection for each client; one node, forceSync as by default, tickTime 1000 so that a session of 2 s is allowed",
	in:    []string{"pairs", "handoff", "holding", "takeover"},
	start: startZooKeeper,
	dial: func(ctx context.Context, address string, _ int, ttl time.Duration) (client, error) {
		conn, events, err := zk.Connect([]string{address}, ttl, zk.WithLogger(silent{}))
		if err != nil {
			return nil, err
		}
		for {
			select {
			case event := <-events:
				if event.State == zk.StateHasSession {
					return &zooKeeperClient{conn}, nil
				}
			case <-ctx.Done():
				conn.Close()
				return nil, ctx.Err()
			}
		}
	},
}

type silent struct{}

func (silent) Printf(string, ...any) {}

type zooKeeperClient struct{ conn *zk.Conn }

// acquire gives the whole connection up when ctx ends: zk.Lock knows no context.
func (c *zooKeeperClient) acquire(ctx context.Context, name string) (func(context.Context) error, error) {
	lock := zk.NewLock(c.conn, "/"+name, zk.WorldACL(zk.PermAll))
	defer context.AfterFunc(ctx, c.conn.Close)()
	if err := lock.Lock(); err != nil {
		return nil, errors.Join(err, ctx.Err())
	}
	return func(context.Context) error { return lock.Unlock() }, nil
}

func (c *zooKeeperClient) close() { c.conn.Close() }

// zooKeeperJar is where Debian's package has it.
const zooKeeperJar = "/usr/share/java/zookeeper.jar"

// zooKeeperVersion is what the name of a second file beside the jar tells.
func zooKeeperVersion() string {
	found, _ := filepath.Glob("/usr/share/java/zookeeper-[0-9]*.jar")
	for _, file := range found {
		return "ZooKeeper " + strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "zookeeper-"), ".jar")
	}
	return "ZooKeeper"
}

func startZooKeeper(ctx context.Context, h *host) (*server, error) {
	java, err := exec.LookPath("java")
	if err != nil {
		return nil, fmt.Errorf("%w: java (apt-get install zookeeper)", errAbsent)
	}
	if _, err := os.Stat(zooKeeperJar); err != nil {
		return nil, fmt.Errorf("%w: %s (apt-get install zookeeper)", errAbsent, zooKeeperJar)
	}
	dir, err := h.folder("zookeeper")
	if err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	config := filepath.Join(dir, "zoo.cfg")
	text := fmt.Sprintf("tickTime=1000\ndataDir=%s\nclientPort=%d\nclientPortAddress=127.0.0.1\nmaxClientCnxns=0\nadmin.enableServer=false\n", dir, port)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	// Perf data would leave a file in /tmp when it is killed.
	cmd := exec.Command(java, "-cp", dir+":"+zooKeeperJar, "-Xmx512m", "-XX:-UsePerfData", "org.apache.zookeeper.server.quorum.QuorumPeerMain", config)
	p, err := spawn(cmd, filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	if err := p.await(ctx, address, "srvr", "Zookeeper version"); err != nil {
		return nil, errors.Join(err, p.kill())
	}
	return &server{address: address, version: zooKeeperVersion(), pid: cmd.Process.Pid, stop: p.kill}, nil
}
