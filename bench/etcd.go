package main

import (
	"bufio"
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

	"go.etcd.io/etcd/api/v3/version"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"
)

var etcd = contender{
	name:  "etcd",
	about: "concurrency.Mutex, a session for each client; one node with its defaults, fsync included",
	in:    []string{"pairs", "losing", "handoff", "holding", "takeover"},
	start: startEtcd,
	dial: func(ctx context.Context, address string, _ int, ttl time.Duration) (client, error) {
		c, err := clientv3.New(clientv3.Config{
			Endpoints: []string{address}, DialTimeout: 10 * time.Second, Logger: zap.NewNop(),
		})
		if err != nil {
			return nil, err
		}
		lease, err := c.Grant(ctx, int64(ttl.Round(time.Second).Seconds()))
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		session, err := concurrency.NewSession(c, concurrency.WithLease(lease.ID))
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		return &etcdClient{c, session}, nil
	},
}

type etcdClient struct {
	client  *clientv3.Client
	session *concurrency.Session
}

func (c *etcdClient) acquire(ctx context.Context, name string) (func(context.Context) error, error) {
	mutex := concurrency.NewMutex(c.session, name)
	if err := mutex.Lock(ctx); err != nil {
		return nil, err
	}
	return mutex.Unlock, nil
}

func (c *etcdClient) try(ctx context.Context, name string) (bool, error) {
	err := concurrency.NewMutex(c.session, name).TryLock(ctx)
	if errors.Is(err, concurrency.ErrLocked) {
		return false, nil
	}
	return err == nil, err
}

func (c *etcdClient) close() {
	_ = c.session.Close()
	_ = c.client.Close()
}

// startEtcd runs this program again as etcd.
func startEtcd(ctx context.Context, h *host) (*server, error) {
	dir, err := h.folder("etcd")
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	client, err := freePort()
	if err != nil {
		return nil, err
	}
	peer, err := freePort()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "etcd", filepath.Join(dir, "data"), strconv.Itoa(client), strconv.Itoa(peer))
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p, err := spawn(cmd, filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	ready := make(chan bool, 1)
	go func() {
		line, _ := bufio.NewReader(out).ReadString('\n')
		ready <- strings.TrimSpace(line) == "ready"
	}()
	select {
	case ok := <-ready:
		if !ok {
			return nil, errors.Join(fmt.Errorf("etcd did not start:\n%s", p.log()), p.kill())
		}
	case <-ctx.Done():
		return nil, errors.Join(ctx.Err(), p.kill())
	}
	return &server{
		address: net.JoinHostPort("127.0.0.1", strconv.Itoa(client)),
		version: "etcd " + version.Version, pid: cmd.Process.Pid, stop: p.kill,
	}, nil
}
