package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/pawl-go/pawl/internal/scratch"
)

// employ runs the workers until they find no more jobs. It kills some, each in
// the middle of its first lot, and replaces them. It returns how many jobs those
// had in hand.
func employ(ctx context.Context, how order) (interrupted int, err error) {
	var mu sync.Mutex
	left := kills
	doomed := func(jobs int) bool {
		mu.Lock()
		defer mu.Unlock()
		if left == 0 {
			return false
		}
		left--
		interrupted += jobs
		return true
	}
	crew, ctx := errgroup.WithContext(ctx)
	for range workers {
		crew.Go(func() error {
			for {
				if killed, err := watch(ctx, how, doomed); !killed {
					return err
				}
			}
		})
	}
	return interrupted, crew.Wait()
}

// watch runs one worker to its end. Each time that it is in the middle of a lot
// it may go on, unless it is doomed.
func watch(ctx context.Context, how order, doomed func(jobs int) bool) (killed bool, err error) {
	cmd, stdin, stdout, err := scratch.Again(ctx, workerCommand)
	if err != nil {
		return false, err
	}
	err = json.NewEncoder(stdin).Encode(how)
	for lines := bufio.NewScanner(stdout); err == nil && lines.Scan(); {
		jobs, _ := strconv.Atoi(lines.Text())
		if !killed && doomed(jobs) {
			killed = true
			err = cmd.Process.Kill()
			continue
		}
		_, err = fmt.Fprintln(stdin, "go on")
	}
	_ = stdin.Close() // a worker that is still there ends
	if ended := cmd.Wait(); !killed {
		err = errors.Join(err, ended)
	}
	return killed, err
}
