// Package pgserver starts a PostgreSQL of one's own, for the demo and the
// tests, from whatever the machine has to offer.
//
// A server started here ends with the process that started it, however that
// ends, unless Outlive said otherwise.
package pgserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// Kind says where a server came from.
type Kind string

const (
	Local    Kind = "local"    // binaries found on this machine
	Docker   Kind = "docker"   // a container
	Download Kind = "download" // binaries fetched for the purpose
)

// Server is a running PostgreSQL with a superuser postgres and a database of
// that name. Its methods may be called from several goroutines.
type Server struct {
	kind   Kind
	dsn    string
	engine engine

	stop    sync.Once
	stopErr error
}

// engine is what differs between a process of ours and a container.
type engine interface {
	dataDir() string
	binDir() string
	log() string
	kill(ctx context.Context) error
	shutdown(ctx context.Context) error
	restart(ctx context.Context) error
	remove() error
	stopCommand() string
}

// An Option changes how Start runs the server.
type Option func(*config)

type config struct {
	settings map[string]string
	scratch  bool
	outlive  bool
}

// With sets a parameter of postgresql.conf. The last one of a name wins.
func With(name, value string) Option {
	return func(c *config) { c.settings[name] = value }
}

// Fast trades durability and memory for speed: for tests, never for a
// benchmark. A crash of the machine may lose everything. One of the server
// loses nothing that was committed: synchronous_commit stays on, and without
// fsync it costs next to nothing.
func Fast() Option {
	return func(c *config) {
		c.scratch = true
		maps.Copy(c.settings, map[string]string{
			"fsync":            "off",
			"full_page_writes": "off",
			"shared_buffers":   "32MB",
			"max_wal_size":     "256MB",
			"jit":              "off",
			// In the data folder, and not where a killed server would leave it.
			"dynamic_shared_memory_type": "mmap",
		})
	}
}

// Outlive leaves the server running when the process ends without Stop, for
// somebody who wants to look at what a failure left behind.
func Outlive() Option {
	return func(c *config) { c.outlive = true }
}

// way is one manner of coming by a server.
type way struct {
	kind   Kind
	start  func(context.Context, config) (engine, string, error)
	remedy string
}

var ways = []way{
	{Local, startLocal, "install PostgreSQL 14 or newer (apt-get install postgresql, brew install postgresql), or name its folder in PGLOCK_PG_BIN"},
	{Docker, startDocker, "start Docker, or name its daemon in DOCKER_HOST"},
	{Download, startDownload, "connect to the internet, or put the archive into the folder that PGLOCK_PG_CACHE names"},
}

// Start runs a PostgreSQL: from binaries on this machine, else in Docker, else
// from binaries that it downloads. PGLOCK_PG=local, docker or download leaves
// only that one. After an error nothing is left running; it lists what was
// tried and what would help.
func Start(ctx context.Context, opts ...Option) (*Server, error) {
	c := config{settings: map[string]string{}}
	for _, opt := range opts {
		opt(&c)
	}
	try := ways
	if forced := os.Getenv("PGLOCK_PG"); forced != "" {
		i := slices.IndexFunc(ways, func(w way) bool { return string(w.kind) == forced })
		if i < 0 {
			return nil, fmt.Errorf("PGLOCK_PG=%q: want local, docker or download", forced)
		}
		try = ways[i : i+1]
	}
	var failed []error
	for _, w := range try {
		engine, dsn, err := w.start(ctx, c)
		if err == nil {
			return &Server{kind: w.kind, dsn: dsn, engine: engine}, nil
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("start PostgreSQL: %w", err)
		}
		failed = append(failed, fmt.Errorf("%s: %w\n\t%s", w.kind, err, w.remedy))
	}
	return nil, fmt.Errorf("no PostgreSQL could be started:\n%w", errors.Join(failed...))
}

// Kind says where the server came from.
func (s *Server) Kind() Kind { return s.kind }

// DSN is the URL of the database postgres for its superuser.
func (s *Server) DSN() string { return s.dsn }

// DataDir is the data folder, empty for a container.
func (s *Server) DataDir() string { return s.engine.dataDir() }

// BinDir is the folder of the server's binaries, empty for a container.
func (s *Server) BinDir() string { return s.engine.binDir() }

// Log is what the server has logged so far.
func (s *Server) Log() string { return s.engine.log() }

// Kill ends the server as a crash does, without a last word to anybody. Its
// data stays for Restart.
func (s *Server) Kill(ctx context.Context) error { return s.engine.kill(ctx) }

// Shutdown ends the server in good order: it ends its sessions and writes a
// checkpoint. Its data stays for Restart.
func (s *Server) Shutdown(ctx context.Context) error { return s.engine.shutdown(ctx) }

// Restart runs the server again on the same port, after a Shutdown if it still
// runs.
func (s *Server) Restart(ctx context.Context) error { return s.engine.restart(ctx) }

// Stop ends the server and removes everything that it left. A second call
// returns what the first did.
func (s *Server) Stop() error {
	s.stop.Do(func() { s.stopErr = s.engine.remove() })
	return s.stopErr
}

// StopCommand is for a shell to do what Stop does, after Outlive.
func (s *Server) StopCommand() string { return s.engine.stopCommand() }

// await returns once the server takes connections, with an error when over is
// closed or a minute has passed.
func await(ctx context.Context, dsn string, over <-chan struct{}) error {
	ctx, cancel := context.WithTimeoutCause(ctx, time.Minute, errors.New("the server takes no connections after a minute"))
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, dsn)
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-over:
			return errors.New("the server ended while starting")
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		case <-time.After(5 * time.Millisecond):
		}
	}
}
