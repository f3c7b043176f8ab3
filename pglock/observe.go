package pglock

import (
	"context"
	"time"
)

// Observe sends who holds a lease: at once, and then whenever that changes; a
// LeaseInfo without a token says that nobody does. It looks once a second and
// when a lease runs out, so that a change shorter than that may be missed. The
// channel is closed when ctx or the client ends, and at once for what can't be a
// name; while the server can't be asked (it is away, the schema or a grant is
// missing) nothing is sent: Leases says why.
func (c *Client) Observe(ctx context.Context, name string) <-chan LeaseInfo {
	const look = time.Second
	changes := make(chan LeaseInfo)
	if checkName("lease", name) != nil {
		close(changes)
		return changes
	}
	ctx, leave, err := c.enter(ctx)
	if err != nil {
		close(changes)
		return changes
	}
	go func() {
		defer leave()
		defer close(changes)
		var last *LeaseInfo
		for {
			pause := look
			var infos []LeaseInfo
			err := c.calls.timed(ctx, func(ctx context.Context) (err error) {
				infos, err = c.leases(ctx, &name)
				return err
			})
			if err == nil {
				now := LeaseInfo{Name: name}
				if len(infos) == 1 && infos[0].Remaining > 0 {
					now = infos[0]
					pause = min(pause, now.Remaining+time.Millisecond)
				}
				if last == nil || last.Token != now.Token {
					select {
					case changes <- now:
						last = &now
					case <-ctx.Done():
						return
					}
				}
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
		}
	}()
	return changes
}
