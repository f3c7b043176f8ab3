package pglock

import (
	"context"
	"log/slog"
)

// LogTo returns an Observer that writes to a log. A loss, a refused write, a failed
// campaign and the fallback are warnings, for somebody should look at them; all
// else is at the level of debugging, a wait that its context ended included. The
// attributes are lease, token, waited, held, took, leases, tickets, cause and error.
// A nil logger is slog.Default, as it is then.
func LogTo(logger *slog.Logger) Observer {
	if logger == nil {
		logger = slog.Default()
	}
	return logbook{logger}
}

type logbook struct{ *slog.Logger }

func (b logbook) Observe(ctx context.Context, event Event) {
	switch e := event.(type) {
	case Acquired:
		b.LogAttrs(ctx, slog.LevelDebug, "pglock: lease acquired",
			slog.String("lease", e.Name), slog.Int64("token", int64(e.Token)), slog.Duration("waited", e.Waited))
	case Waited:
		attrs := []slog.Attr{slog.String("lease", e.Name), slog.Duration("waited", e.Waited)}
		switch {
		case e.Err == nil: // followed by its Acquired
		case e.GaveUp:
			b.LogAttrs(ctx, slog.LevelDebug, "pglock: gave up waiting for lease", attrs...)
		default:
			b.LogAttrs(ctx, slog.LevelDebug, "pglock: waiting for lease failed", append(attrs, slog.Any("error", e.Err))...)
		}
	case CampaignFailed:
		b.LogAttrs(ctx, slog.LevelWarn, "pglock: campaign failed, it is tried again", slog.String("lease", e.Name), slog.Any("error", e.Err))
	case Renewed:
		attrs := []slog.Attr{slog.Int("leases", e.Leases), slog.Int("tickets", e.Tickets), slog.Duration("took", e.Took)}
		if e.Err == nil {
			b.LogAttrs(ctx, slog.LevelDebug, "pglock: renewed", attrs...)
		} else {
			b.LogAttrs(ctx, slog.LevelDebug, "pglock: renewal failed", append(attrs, slog.Any("error", e.Err))...)
		}
	case Lost:
		b.LogAttrs(ctx, slog.LevelWarn, "pglock: lease lost",
			slog.String("lease", e.Name), slog.Int64("token", int64(e.Token)), slog.Duration("held", e.Held),
			slog.String("cause", string(e.Err.Cause)), slog.Any("error", e.Err))
	case Released:
		b.LogAttrs(ctx, slog.LevelDebug, "pglock: lease released",
			slog.String("lease", e.Name), slog.Int64("token", int64(e.Token)), slog.Duration("held", e.Held))
	case Fenced:
		b.LogAttrs(ctx, slog.LevelWarn, "pglock: write refused",
			slog.String("lease", e.Name), slog.Int64("token", int64(e.Token)), slog.Any("error", e.Err))
	case Fallback:
		b.LogAttrs(ctx, slog.LevelWarn, "pglock: no notifications, waiters look again every 50 ms", slog.Any("error", e.Err))
	}
}
