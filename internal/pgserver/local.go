package pgserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// cluster is a server that runs as a child of this process, in a folder that
// is removed with it.
type cluster struct {
	binaries binaries
	who      account
	config   config
	dir      string
	owner    *os.File
	dsn      string
	port     int
	watchdog *watchdog

	mu  sync.Mutex
	run *process
}

func startLocal(ctx context.Context, c config) (engine, string, error) {
	b, err := findBinaries(ctx)
	if err != nil {
		return nil, "", err
	}
	return startCluster(ctx, b, c)
}

// startCluster runs a new cluster with the programs of b.
func startCluster(ctx context.Context, b binaries, c config) (_ engine, dsn string, err error) {
	who, err := serverAccount()
	if err != nil {
		return nil, "", err
	}
	if err := who.reach(b.dir); err != nil {
		return nil, "", err
	}
	base, err := root(who, c.scratch)
	if err != nil {
		return nil, "", err
	}
	s := &cluster{binaries: b, who: who, config: c}
	if s.dir, s.owner, err = newFolder(ctx, base); err != nil {
		return nil, "", err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.remove())
		}
	}()
	password, err := initialize(ctx, b, who, s.dataDir())
	if err != nil {
		return nil, "", err
	}
	if useWatchdog && !c.outlive {
		if s.watchdog, err = watch(s.dir); err != nil {
			return nil, "", err
		}
	}
	// Between the choice of a port and the server's bind another process may
	// take it.
	for range 5 {
		if s.port, err = freePort(); err != nil {
			return nil, "", err
		}
		s.dsn = dsnOf(password, net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)))
		if err = s.up(ctx); err == nil {
			return s, s.dsn, nil
		}
		if !strings.Contains(s.log(), "could not bind") {
			break
		}
	}
	return nil, "", fmt.Errorf("%w\n%s", err, s.log())
}

func dsnOf(password, host string) string {
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword("postgres", password),
		Host: host, Path: "/postgres", RawQuery: "sslmode=disable",
	}
	return u.String()
}

func freePort() (int, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return listener.Addr().(*net.TCPAddr).Port, listener.Close()
}

func (s *cluster) dataDir() string { return filepath.Join(s.dir, "data") }
func (s *cluster) binDir() string  { return s.binaries.dir }

func (s *cluster) log() string {
	text, _ := os.ReadFile(filepath.Join(s.dir, "log"))
	return string(text)
}

// up runs the server and returns when it takes connections.
func (s *cluster) up(ctx context.Context) error {
	log, err := os.OpenFile(filepath.Join(s.dir, "log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	// TCP only: a socket's path has room for 107 bytes, and what a test puts in
	// front of a server (a proxy, a pooler) wants a port.
	args := []string{"-D", s.dataDir(), "-p", strconv.Itoa(s.port), "-h", "127.0.0.1", "-c", "unix_socket_directories="}
	args = append(args, s.config.arguments()...)
	cmd := exec.Command(s.binaries.program("postgres"), args...)
	cmd.Dir = s.dir
	cmd.Env = serverEnv()
	cmd.Stdout, cmd.Stderr = log, log
	s.who.take(cmd)
	if !s.config.outlive && !useWatchdog {
		tie(cmd)
	}
	run, err := spawn(cmd)
	if err != nil {
		return err
	}
	s.run = run
	if err := await(ctx, s.dsn, run.done); err != nil {
		return errors.Join(err, s.end(context.Background(), os.Kill))
	}
	return nil
}

// arguments are the settings as postgres takes them on its command line.
func (c config) arguments() []string {
	var args []string
	for _, name := range slices.Sorted(maps.Keys(c.settings)) {
		args = append(args, "-c", name+"="+c.settings[name])
	}
	return args
}

// end signals the server, if it runs, and waits for its end.
func (s *cluster) end(ctx context.Context, how os.Signal) error {
	if s.run == nil {
		return nil
	}
	return s.run.signal(ctx, how)
}

func (s *cluster) kill(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.end(ctx, os.Kill)
}

func (s *cluster) shutdown(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.end(ctx, smart)
}

func (s *cluster) restart(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.end(ctx, smart); err != nil {
		return err
	}
	for {
		err := s.up(ctx)
		if err == nil || ctx.Err() != nil {
			return err
		}
		// The children of a killed postmaster end on their own, and until the
		// last has gone their shared memory keeps a new one from starting.
		if !strings.Contains(s.log(), "shared memory") {
			return fmt.Errorf("%w\n%s", err, s.log())
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("restart PostgreSQL: %w", ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (s *cluster) remove() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	if s.run != nil {
		err = s.run.stop() // nobody needs the checkpoint of an orderly end
	}
	return errors.Join(err, s.watchdog.dismiss(), removeAll(s.dir), s.owner.Close())
}

func (s *cluster) stopCommand() string {
	return fmt.Sprintf("kill -INT $(head -1 %s/postmaster.pid)", s.dataDir())
}

// removeAll removes a folder in which the last children of a killed server may
// still be writing.
func removeAll(dir string) error {
	var err error
	for range 50 {
		if err = os.RemoveAll(dir); err == nil {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return err
}
