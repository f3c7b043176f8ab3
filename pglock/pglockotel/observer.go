package pglockotel

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/pawl-go/pawl/optimistic"
	"github.com/pawl-go/pawl/pglock"
)

// Observer records what it is told. It is a pglock.Observer and an
// optimistic.Observer, and one is enough for
// a program: for several databases take several, since names of one are not those
// of another.
type Observer struct {
	instruments
	tracer trace.Tracer
	class  func(name string) string

	mu      sync.Mutex
	held    map[*pglock.Lease]tenure
	classes map[string]struct{}          // of the leases there were
	last    map[string]trace.SpanContext // of the last tenure, by name
}

type tenure struct {
	span  trace.Span
	class string
}

// Option sets what New leaves at its default.
type Option func(*config)

type config struct {
	meters  metric.MeterProvider
	tracers trace.TracerProvider
	class   func(string) string
}

// WithMeterProvider sets where metrics go. The default is the global one, as it
// is when New is called.
func WithMeterProvider(p metric.MeterProvider) Option { return func(c *config) { c.meters = p } }

// WithTracerProvider sets where spans go. The default is the global one, as it is
// when New is called.
func WithTracerProvider(p trace.TracerProvider) Option { return func(c *config) { c.tracers = p } }

// WithClass gives metrics the attribute pglock.lease.class, by a function that
// turns the name of a lease into one of a few: "accounts/42" into "accounts". A lease of the class "" has no attribute. The
// default is none for all.
func WithClass(class func(name string) string) Option { return func(c *config) { c.class = class } }

const scope = "github.com/pawl-go/pawl/pglock/pglockotel"

// New returns an Observer. An error is the MeterProvider's, which could not make an
// instrument.
func New(opts ...Option) (*Observer, error) {
	c := config{meters: otel.GetMeterProvider(), tracers: otel.GetTracerProvider()}
	for _, opt := range opts {
		opt(&c)
	}
	o := &Observer{
		tracer: c.tracers.Tracer(scope),
		class:  c.class,
		held:   map[*pglock.Lease]tenure{},
		// Shown from the start, as 0.
		classes: map[string]struct{}{},
		last:    map[string]trace.SpanContext{},
	}
	if c.class == nil {
		o.classes[""] = struct{}{}
	}
	if err := o.make(c.meters.Meter(scope), o.count); err != nil {
		return nil, fmt.Errorf("pglockotel: %w", err)
	}
	return o, nil
}

// Observe records an event.
func (o *Observer) Observe(ctx context.Context, event pglock.Event) {
	switch e := event.(type) {
	case pglock.Acquired:
		o.acquired.Add(ctx, 1, o.of(e.Name))
		o.begin(ctx, e)
	case pglock.Waited:
		ended := outcome(e)
		o.waited.Record(ctx, e.Waited.Seconds(), o.of(e.Name, ended...))
		o.wait(ctx, e, ended)
	case pglock.CampaignFailed:
		o.campaigns.Add(ctx, 1, o.of(e.Name, errorType(e.Err)...))
	case pglock.Renewed:
		kind := attribute.String("pglock.renewal.kind", "lease")
		if e.Tickets > 0 {
			kind = attribute.String("pglock.renewal.kind", "ticket")
		}
		o.renewals.Add(ctx, 1, metric.WithAttributes(append(errorType(e.Err), kind)...))
	case pglock.Lost:
		cause := attribute.String("pglock.lost.cause", strings.ReplaceAll(string(e.Err.Cause), " ", "_"))
		o.lost.Add(ctx, 1, o.of(e.Name, cause))
		o.hold.Record(ctx, e.Held.Seconds(), o.of(e.Name))
		o.end(e.Lease, e.Err, cause)
	case pglock.Released:
		o.released.Add(ctx, 1, o.of(e.Name))
		o.hold.Record(ctx, e.Held.Seconds(), o.of(e.Name))
		o.end(e.Lease, nil)
	case pglock.Fenced:
		o.fenced.Add(ctx, 1, o.of(e.Name))
	case pglock.Fallback:
		o.fallbacks.Add(ctx, 1)
	}
}

// Conflict records a conflict.
func (o *Observer) Conflict(ctx context.Context, conflict optimistic.Conflict) {
	o.conflicts.Add(ctx, 1, metric.WithAttributes(semconv.DBCollectionName(conflict.Table)))
}
