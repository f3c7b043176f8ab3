package main

import (
	"context"
	"errors"
	"time"
)

// A contender is a lock service, and the client that a Go program would use for
// it. One is a file: its contender value, listed in contenders, and its client.
type contender struct {
	name  string
	about string   // for the report: client, durability, what is not at its default
	in    []string // scenarios in which it can take part

	// start runs its server. errAbsent: this machine doesn't have it.
	start func(ctx context.Context, h *host) (*server, error)

	// dial is what one process does at its start. A client serves that many
	// goroutines, and what it holds ends by itself a TTL after it was last heard of.
	dial func(ctx context.Context, address string, goroutines int, ttl time.Duration) (client, error)
}

// contenders, in the order of the tables.
var contenders = []contender{pawl, floor, advisory, etcd, zookeeper, redisDurable, redisMemory}

// errAbsent says that a server is not installed.
var errAbsent = errors.New("not installed")

// A server is running.
type server struct {
	address string
	version string
	pid     int // the root of its processes
	stop    func() error

	// Where they aren't nil: the address at which statements are counted, and
	// how many there were.
	counted    string
	statements func(context.Context) (int64, error)
}

// A client is safe for concurrent use.
type client interface {
	// acquire waits until it holds name. release frees it.
	acquire(ctx context.Context, name string) (release func(context.Context) error, err error)
	close()
}

// A trier can ask for a name without waiting. It is told false for a name that
// somebody else holds.
type trier interface {
	try(ctx context.Context, name string) (won bool, err error)
}

// A remainer knows how long a name will be held yet if its holder is silent.
type remainer interface {
	remaining(ctx context.Context, name string) (time.Duration, error)
}
