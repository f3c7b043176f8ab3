package pglockotel

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/pawl-go/pawl/pglock"
)

// maxNames bounds how many names' last tenures are kept to be linked to.
const maxNames = 1000

// begin starts the span of a tenure. It links to the tenure before, not to the
// release that ended it: in one process a grant may be told before the release that
// made it.
func (o *Observer) begin(ctx context.Context, e pglock.Acquired) {
	class := o.classOf(e.Name)
	o.mu.Lock()
	defer o.mu.Unlock()
	opts := []trace.SpanStartOption{trace.WithAttributes(attributes(e.Name, attribute.Int64("pglock.lease.token", int64(e.Token)))...)}
	if before, ok := o.last[e.Name]; ok {
		opts = append(opts, trace.WithLinks(trace.Link{SpanContext: before}))
	}
	_, span := o.tracer.Start(ctx, "pglock.lease.hold", opts...)
	o.held[e.Lease] = tenure{span, class}
	o.classes[class] = struct{}{}
	if !span.SpanContext().IsValid() {
		return // nobody traces
	}
	if _, ok := o.last[e.Name]; !ok && len(o.last) >= maxNames {
		for name := range o.last { // any
			delete(o.last, name)
			break
		}
	}
	o.last[e.Name] = span.SpanContext()
}

// end ends it; lost is nil where it was released.
func (o *Observer) end(l *pglock.Lease, lost *pglock.LostError, more ...attribute.KeyValue) {
	o.mu.Lock()
	t, ok := o.held[l]
	delete(o.held, l)
	o.mu.Unlock()
	if !ok {
		return
	}
	if lost != nil {
		t.span.SetStatus(codes.Error, lost.Error())
	}
	t.span.SetAttributes(more...)
	t.span.End()
}

// wait makes the span of a wait that has ended.
func (o *Observer) wait(ctx context.Context, e pglock.Waited, outcome []attribute.KeyValue) {
	ended := time.Now()
	_, span := o.tracer.Start(ctx, "pglock.lease.wait",
		trace.WithTimestamp(ended.Add(-e.Waited)), trace.WithAttributes(attributes(e.Name, outcome...)...))
	if e.Err != nil && !e.GaveUp {
		span.SetStatus(codes.Error, e.Err.Error())
	}
	span.End(trace.WithTimestamp(ended))
}

func attributes(name string, more ...attribute.KeyValue) []attribute.KeyValue {
	return append(more, semconv.DBSystemNamePostgreSQL, attribute.String("pglock.lease.name", name))
}
