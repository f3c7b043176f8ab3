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
