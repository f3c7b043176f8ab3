package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
)

var redisDurable = redisContender("redis-aof", "appendfsync always", "--appendonly", "yes", "--appendfsync", "always")

var redisMemory = redisContender("redis-memory", "nothing written to disk", "--appendonly", "no")

// redisContender is redsync on one Redis. It renews nothing by itself, and so
// takes no part in the holding.
func redisContender(name, durability string, args ...string) contender {
	return contender{
		name:  name,
		about: "redsync with its default delays, tries without end; one Redis, " + durability,
		in:    []string{"pairs", "losing", "handoff", "takeover"},
		start: func(ctx context.Context, h *host) (*server, error) { return startRedis(ctx, h, name, args) },
		dial: func(ctx context.Context, address string, goroutines int, ttl time.Duration) (client, error) {
			c := redis.NewClient(&redis.Options{Addr: address, PoolSize: goroutines})
			if err := c.Ping(ctx).Err(); err != nil {
				return nil, errors.Join(err, c.Close())
			}
			return &redisClient{c, redsync.New(goredis.NewPool(c)), ttl}, nil
		},
	}
}

type redisClient struct {
	client *redis.Client
	sync   *redsync.Redsync
	ttl    time.Duration
}

func (c *redisClient) acquire(ctx context.Context, name string) (func(context.Context) error, error) {
	mutex := c.sync.NewMutex(name, redsync.WithExpiry(c.ttl), redsync.WithTries(math.MaxInt))
	if err := mutex.LockContext(ctx); err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		_, err := mutex.UnlockContext(ctx)
		return err
	}, nil
}

func (c *redisClient) try(ctx context.Context, name string) (bool, error) {
	err := c.sync.NewMutex(name, redsync.WithExpiry(c.ttl)).TryLockContext(ctx)
	if _, taken := errors.AsType[*redsync.ErrTaken](err); taken {
		return false, nil
	}
	return err == nil, err
}

func (c *redisClient) remaining(ctx context.Context, name string) (time.Duration, error) {
	return c.client.PTTL(ctx, name).Result()
}

func (c *redisClient) close() { _ = c.client.Close() }

var redisVersion = regexp.MustCompile(`v=(\S+)`)

func startRedis(ctx context.Context, h *host, name string, args []string) (*server, error) {
	program, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, fmt.Errorf("%w: redis-server (apt-get install redis-server)", errAbsent)
	}
	said, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return nil, err
	}
	version := "Redis"
	if found := redisVersion.FindSubmatch(said); found != nil {
		version += " " + string(found[1])
	}
	dir, err := h.folder(name)
	if err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(program, append([]string{
		"--bind", "127.0.0.1", "--port", strconv.Itoa(port), "--dir", dir, "--save", "", "--daemonize", "no",
	}, args...)...)
	p, err := spawn(cmd, filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	address := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	if err := p.await(ctx, address, "PING\r\n", "+PONG"); err != nil {
		return nil, errors.Join(err, p.kill())
	}
	return &server{address: address, version: version, pid: cmd.Process.Pid, stop: p.kill}, nil
}
