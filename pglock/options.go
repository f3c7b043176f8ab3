package pglock

import (
	"fmt"
	"os"
	"path/filepath"
)

// Option sets what New leaves at its default.
type Option func(*Client)

// WithOwner sets the text that others read when they ask who holds a lease. It
// identifies nobody: two clients may share it. The default is host/pid/program.
func WithOwner(owner string) Option {
	return func(c *Client) { c.owner = owner }
}

// WithObserver adds somebody who is told what happens to the client's leases,
// after those of earlier WithObserver options: who blocks keeps the news from
// the others too. The default is nobody.
func WithObserver(observer Observer) Option {
	return func(c *Client) {
		if observer == nil {
			return
		}
		if c.teller == nil {
			c.teller = &teller{}
		}
		c.teller.observers = append(c.teller.observers, observer)
	}
}

// WithPolling has Lock and WithLock try again and again, every 50 ms on average,
// instead of waiting in the server. A session that waits there holds a snapshot,
// and CREATE INDEX CONCURRENTLY waits for all of those: where the holder of a lock
// builds an index so, and others wait for that lock, neither goes on until the
// server ends one of them. A call that polls has no connection to itself and no
// place in the line: whoever waits in the server comes before it, and
// lock_timeout doesn't concern it. The default is to wait in the server.
func WithPolling() Option {
	return func(c *Client) { c.polling = true }
}

func defaultOwner() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown-host"
	}
	return fmt.Sprintf("%s/%d/%s", host, os.Getpid(), filepath.Base(os.Args[0]))
}

// LeaseOption sets what Acquire and its kin leave at their default.
type LeaseOption func(*request)

// WithMetadata stores a few strings beside the lease, for people who ask who
// holds it: at most 4 KiB as JSON. The default is none.
func WithMetadata(metadata map[string]string) LeaseOption {
	return func(r *request) { r.metadata = metadata }
}
