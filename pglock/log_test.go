package pglock_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/pawl-go/pawl/pglock"
)

// Each kind of event has its line: what somebody should look at is a warning, and
// what a cancelled context ended is no error.
func TestLogTo(t *testing.T) {
	t.Parallel()
	lost := &pglock.LostError{Name: "a", Token: 7, Cause: pglock.Taken}
	for _, tt := range []struct {
		event pglock.Event
		want  string
	}{
		{pglock.Acquired{Name: "a", Token: 7, Waited: time.Second}, `level=DEBUG msg="pglock: lease acquired" lease=a token=7 waited=1s`},
		{pglock.Waited{Name: "a", Waited: time.Second}, ""}, // Acquired has said it
		{pglock.Waited{Name: "a", Waited: time.Second, Err: context.Canceled, GaveUp: true}, `level=DEBUG msg="pglock: gave up waiting for lease" lease=a waited=1s`},
		{pglock.Waited{Name: "a", Waited: time.Second, Err: errors.New("no")}, `level=DEBUG msg="pglock: waiting for lease failed" lease=a waited=1s error=no`},
		{pglock.CampaignFailed{Name: "a", Err: errors.New("no")}, `level=WARN msg="pglock: campaign failed, it is tried again" lease=a error=no`},
		{pglock.Renewed{Leases: 3, Took: time.Second}, `level=DEBUG msg="pglock: renewed" leases=3 tickets=0 took=1s`},
		{pglock.Renewed{Tickets: 2, Took: time.Second, Err: errors.New("no")}, `level=DEBUG msg="pglock: renewal failed" leases=0 tickets=2 took=1s error=no`},
		{pglock.Lost{Name: "a", Token: 7, Held: time.Minute, Err: lost}, `level=WARN msg="pglock: lease lost" lease=a token=7 held=1m0s cause=taken error="pglock: lease \"a\" with token 7 lost: taken"`},
		{pglock.Released{Name: "a", Token: 7, Held: time.Minute}, `level=DEBUG msg="pglock: lease released" lease=a token=7 held=1m0s`},
		{pglock.Fenced{Name: "a", Token: 7, Err: lost}, `level=WARN msg="pglock: write refused" lease=a token=7 error="pglock: lease \"a\" with token 7 lost: taken"`},
		{pglock.Fallback{Err: errors.New("no")}, `level=WARN msg="pglock: no notifications, waiters look again every 50 ms" error=no`},
	} {
		var out bytes.Buffer
		logger := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}}))
		pglock.LogTo(logger).Observe(t.Context(), tt.event)
		if tt.want != "" {
			tt.want += "\n"
		}
		if diff := cmp.Diff(tt.want, out.String()); diff != "" {
			t.Errorf("%T (-want +got):\n%s", tt.event, diff)
		}
	}
	pglock.LogTo(nil).Observe(t.Context(), pglock.Renewed{})
}
