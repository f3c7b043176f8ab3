package pgserver

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"
	"github.com/testcontainers/testcontainers-go/modules/postgres"
)

// image is what runs in Docker unless PGLOCK_PG_IMAGE names another.
const image = "postgres:18-alpine"

// container is a server in Docker.
type container struct {
	name     string
	ctr      *postgres.PostgresContainer
	watchdog *watchdog
}

func startDocker(ctx context.Context, c config) (_ engine, dsn string, err error) {
	log.SetDefault(log.NewNoopLogger())
	if err := healthy(ctx); err != nil {
		return nil, "", err
	}
	s := &container{name: "pawl-" + strings.ToLower(rand.Text())}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.remove())
		}
	}()
	if !c.outlive {
		// Testcontainers has a reaper for this, but it is a second image to pull,
		// often turned off, and takes ten seconds to notice.
		if s.watchdog, err = watch("container:" + s.name); err != nil {
			return nil, "", err
		}
	}
	options := []testcontainers.ContainerCustomizer{
		testcontainers.WithName(s.name),
		testcontainers.WithCmd(append([]string{"postgres"}, c.arguments()...)...),
		postgres.WithPassword(rand.Text()),
		postgres.BasicWaitStrategies(),
	}
	if c.scratch {
		options = append(options,
			testcontainers.WithTmpfs(map[string]string{"/scratch": "mode=1777"}),
			testcontainers.WithEnv(map[string]string{"PGDATA": "/scratch/data"}))
	}
	s.ctr, err = postgres.Run(ctx, cmp.Or(os.Getenv("PGLOCK_PG_IMAGE"), image), options...)
	if err != nil {
		return nil, "", err
	}
	if dsn, err = s.ctr.ConnectionString(ctx, "sslmode=disable"); err != nil {
		return nil, "", err
	}
	return s, dsn, await(ctx, dsn, nil)
}

// healthy returns an error if no Docker daemon answers. On the way Testcontainers
// panics where it can't make out the daemon's socket.
func healthy(ctx context.Context) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%v", r)
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	docker, err := testcontainers.NewDockerClientWithOpts(ctx)
	if err != nil {
		return err
	}
	defer docker.Close()
	_, err = docker.Ping(ctx, client.PingOptions{})
	return err
}

// removeContainer removes a container for a process that may have been killed
// while the daemon was still making it, or before.
func removeContainer(ctx context.Context, name string) error {
	log.SetDefault(log.NewNoopLogger())
	docker, err := testcontainers.NewDockerClientWithOpts(ctx)
	if err != nil {
		return err
	}
	defer docker.Close()
	for range 50 {
		_, err = docker.ContainerRemove(ctx, name, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
		if !errdefs.IsNotFound(err) {
			return err
		}
		time.Sleep(100 * time.Millisecond)
	}
	return nil // it never was, or is gone
}

func (s *container) dataDir() string { return "" }
func (s *container) binDir() string  { return "" }

func (s *container) log() string {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	logs, err := s.ctr.Logs(ctx)
	if err != nil {
		return err.Error()
	}
	defer logs.Close()
	text, _ := io.ReadAll(logs)
	return string(text)
}

// A container comes back on another port, and what would go through a fault
// and come back is what these are for.
var errContainer = fmt.Errorf("a server in Docker can't be killed and restarted in place, only a local one: %w", errors.ErrUnsupported)

func (s *container) kill(context.Context) error     { return errContainer }
func (s *container) shutdown(context.Context) error { return errContainer }
func (s *container) restart(context.Context) error  { return errContainer }

func (s *container) remove() error {
	var err error
	if s.ctr != nil {
		// Asked politely the server would wait for its clients to go.
		err = testcontainers.TerminateContainer(s.ctr, testcontainers.StopTimeout(0))
	}
	return errors.Join(err, s.watchdog.dismiss())
}

func (s *container) stopCommand() string { return "docker rm -f -v " + s.name }
