package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"
)

// takeoverTTL is the shortest that etcd and a ZooKeeper with tickTime 1000 allow.
const takeoverTTL = 2 * time.Second

var takeover = scenario{
	name:  "takeover",
	title: "Takeover from a holder that was killed",
	says: fmt.Sprintf("A process of its own holds the name with a TTL or session of %v, another client waits, the process gets SIGKILL. "+
		"Took: from the kill to the grant. Beyond: what of that came after the time that was left at the kill, where the server tells it.", takeoverTTL),
	metrics: []metric{{"took, ms", 0, ""}, {"beyond, ms", 1, ""}},
	rounds:  func(p plan) int { return p.takeovers },
	trials: func(_ context.Context, b *bench) []trial {
		return b.each("takeover", fmt.Sprintf("TTL %v", takeoverTTL), slack, func(ctx context.Context, r running) (sample, error) {
			return takeOver(ctx, r, b.host)
		})
	},
}

var takeoverCount atomic.Int64

func takeOver(ctx context.Context, r running, h *host) (sample, error) {
	name := fmt.Sprintf("taken-%d", takeoverCount.Add(1))
	// One connection for the wait, one for the question.
	c, err := r.dial(ctx, r.server.address, 2, takeoverTTL)
	if err != nil {
		return nil, err
	}
	defer c.close()
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(self, "holder", r.name, r.server.address, takeoverTTL.String(), name)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	defer out.Close()
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	defer in.Close()
	p, err := spawn(cmd, filepath.Join(h.dir, "holder.log"))
	if err != nil {
		return nil, err
	}
	defer p.kill()
	defer context.AfterFunc(ctx, func() { _ = p.kill() })()
	if line, _ := bufio.NewReader(out).ReadString('\n'); strings.TrimSpace(line) != "held" {
		return nil, errors.Join(ctx.Err(), fmt.Errorf("the holder did not get %q: %s", name, p.log()))
	}

	type outcome struct {
		at      time.Time
		release func(context.Context) error
		err     error
	}
	granted := make(chan outcome, 1)
	go func() {
		release, err := c.acquire(ctx, name)
		granted <- outcome{time.Now(), release, err}
	}()
	// Anywhere between two renewals, and late enough for the other to be in line.
	select {
	case o := <-granted:
		return nil, errors.Join(o.err, fmt.Errorf("%q was granted while its holder lived", name))
	case <-time.After(takeoverTTL/4 + rand.N(takeoverTTL/3)):
	}
	killed := time.Now()
	if err := p.kill(); err != nil {
		return nil, err
	}
	var due time.Time
	asked, knows := c.(remainer)
	if knows {
		left, err := asked.remaining(ctx, name)
		if err != nil {
			return nil, err
		}
		due = time.Now().Add(left)
	}
	o := <-granted
	if o.err != nil {
		return nil, o.err
	}
	s := sample{"took, ms": ms(o.at.Sub(killed))}
	if knows {
		s["beyond, ms"] = ms(o.at.Sub(due))
	}
	return s, o.release(ctx)
}
