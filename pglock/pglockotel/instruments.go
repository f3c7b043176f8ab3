package pglockotel

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgconn"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"

	"github.com/pawl-go/pawl/pglock"
)

// instruments are what New makes of a Meter, but for the count of held leases,
// which is asked for.
type instruments struct {
	acquired, released, lost, campaigns, renewals, fenced, fallbacks, conflicts metric.Int64Counter
	waited, hold                                                                metric.Float64Histogram
}

// Seconds: a hand-over takes a millisecond, and a leader may reign for a day.
var (
	waits = metric.WithExplicitBucketBoundaries(.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300)
	holds = metric.WithExplicitBucketBoundaries(.001, .005, .01, .05, .1, .5, 1, 5, 10, 30, 60, 300, 900, 3600, 14400, 86400)
)

func (i *instruments) make(meter metric.Meter, count metric.Int64Callback) error {
	_, failed := meter.Int64ObservableUpDownCounter("pglock.lease.count", metric.WithUnit("{lease}"),
		metric.WithDescription("Leases held at the moment."), metric.WithInt64Callback(count))
	errs := []error{failed}
	for _, c := range []struct {
		counter                 *metric.Int64Counter
		name, unit, description string
	}{
		{&i.acquired, "pglock.lease.acquired", "{lease}", "Leases granted."},
		{&i.released, "pglock.lease.released", "{lease}", "Leases released by their holder."},
		{&i.lost, "pglock.lease.lost", "{lease}", "Leases lost."},
		{&i.campaigns, "pglock.campaign.failures", "{campaign}", "Times that Elect could not stand for a lease; it tries again."},
		{&i.renewals, "pglock.renewals", "{statement}", "Renewal statements; those with error.type failed, and are tried again."},
		{&i.fenced, "pglock.write.fenced", "{write}", "Writes refused because their lease had ended."},
		{&i.fallbacks, "pglock.fallbacks", "{fallback}", "Times that notifications stopped coming, so that waiters look again every 50 ms."},
		{&i.conflicts, "optimistic.conflicts", "{conflict}", "Writes that came too late for their row's version, retried or not."},
	} {
		var err error
		*c.counter, err = meter.Int64Counter(c.name, metric.WithUnit(c.unit), metric.WithDescription(c.description))
		errs = append(errs, err)
	}
	var err error
	i.waited, err = meter.Float64Histogram("pglock.lease.wait.duration", metric.WithUnit("s"),
		metric.WithDescription("How long calls waited that had to."), waits)
	errs = append(errs, err)
	i.hold, err = meter.Float64Histogram("pglock.lease.hold.duration", metric.WithUnit("s"),
		metric.WithDescription("How long leases were held."), holds)
	return errors.Join(append(errs, err)...)
}

// count asks each lease whether it is held, which by its own clock it knows before
// anybody is told.
func (o *Observer) count(_ context.Context, to metric.Int64Observer) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	held := make(map[string]int64, len(o.classes))
	for l, tenure := range o.held {
		if l.Err() == nil {
			held[tenure.class]++
		}
	}
	for class := range o.classes {
		to.Observe(held[class], ofClass(class))
	}
	return nil
}

// of returns the attributes of a measurement of a lease.
func (o *Observer) of(name string, more ...attribute.KeyValue) metric.MeasurementOption {
	return ofClass(o.classOf(name), more...)
}

func ofClass(class string, more ...attribute.KeyValue) metric.MeasurementOption {
	if class != "" {
		more = append(more, attribute.String("pglock.lease.class", class))
	}
	return metric.WithAttributes(more...)
}

func (o *Observer) classOf(name string) string {
	if o.class == nil {
		return ""
	}
	return o.class(name)
}

// outcome says how a wait has ended. That its context ended is no error.
func outcome(e pglock.Waited) []attribute.KeyValue {
	const key = attribute.Key("pglock.wait.outcome")
	switch {
	case e.Err == nil:
		return []attribute.KeyValue{key.String("granted")}
	case e.GaveUp:
		return []attribute.KeyValue{key.String("gave_up")}
	}
	return append(errorType(e.Err), key.String("failed"))
}

// errorType returns error.type, or nothing where there is no error.
func errorType(err error) []attribute.KeyValue {
	if err == nil {
		return nil
	}
	if pg, ok := errors.AsType[*pgconn.PgError](err); ok {
		return []attribute.KeyValue{semconv.ErrorTypeKey.String(pg.Code)}
	}
	late, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](err)
	if ok && late.Timeout() || errors.Is(err, context.Canceled) {
		return []attribute.KeyValue{semconv.ErrorTypeKey.String("timeout")} // a bound of the client's own
	}
	return []attribute.KeyValue{semconv.ErrorTypeOther}
}
