package pglockotel_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/pawl-go/pawl/internal/pgtest"
	"github.com/pawl-go/pawl/pglock"
	"github.com/pawl-go/pawl/pglock/pglockotel"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// limit is long enough for the slowest machine: a test that reaches it hangs.
const limit = time.Minute

// scene is an Observer and what it gave to OpenTelemetry.
type scene struct {
	*pglockotel.Observer
	reader *sdkmetric.ManualReader
	spans  *tracetest.SpanRecorder
}

func watch(t testing.TB, opts ...pglockotel.Option) *scene {
	t.Helper()
	s := &scene{reader: sdkmetric.NewManualReader(), spans: tracetest.NewSpanRecorder()}
	var err error
	s.Observer, err = pglockotel.New(append(opts,
		pglockotel.WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(s.reader))),
		pglockotel.WithTracerProvider(trace.NewTracerProvider(trace.WithSpanProcessor(s.spans))))...)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// series reads every metric: its values by name, unit and attributes. Of a
// histogram it is how many there are.
func (s *scene) series(t testing.TB) map[string]int64 {
	t.Helper()
	series := map[string]int64{}
	for _, m := range s.metrics(t) {
		note := func(attrs attribute.Set, value int64) {
			series[fmt.Sprintf("%s %s %s", m.Name, m.Unit, attrs.Encoded(attribute.DefaultEncoder()))] = value
		}
		switch data := m.Data.(type) {
		case metricdata.Sum[int64]:
			for _, point := range data.DataPoints {
				note(point.Attributes, point.Value)
			}
		case metricdata.Histogram[float64]:
			for _, point := range data.DataPoints {
				note(point.Attributes, int64(point.Count))
			}
		default:
			t.Fatalf("%s is a %T", m.Name, m.Data)
		}
	}
	return series
}

func (s *scene) metrics(t testing.TB) (metrics []metricdata.Metrics) {
	t.Helper()
	var read metricdata.ResourceMetrics
	if err := s.reader.Collect(context.Background(), &read); err != nil {
		t.Fatal(err)
	}
	for _, scope := range read.ScopeMetrics {
		metrics = append(metrics, scope.Metrics...)
	}
	return metrics
}

func (s *scene) metric(t testing.TB, name string) metricdata.Aggregation {
	t.Helper()
	for _, m := range s.metrics(t) {
		if m.Name == name {
			return m.Data
		}
	}
	t.Fatalf("there is no %s", name)
	return nil
}

// held reads the count of held leases.
func (s *scene) held(t testing.TB) (n int64) {
	t.Helper()
	for name, value := range s.series(t) {
		if strings.HasPrefix(name, "pglock.lease.count ") {
			n += value
		}
	}
	return n
}

// tells waits until a metric has a value: it is told shortly after.
func (s *scene) tells(t testing.TB, name string, want int64) {
	t.Helper()
	for end := time.Now().Add(limit); s.series(t)[name] != want; {
		if time.Now().After(end) {
			t.Fatalf("%q was never %d: %v", name, want, s.series(t))
		}
	}
}

func newClient(t testing.TB, pool *pgxpool.Pool, opts ...pglock.Option) *pglock.Client {
	t.Helper()
	c := pglock.New(pool, opts...)
	t.Cleanup(func() {
		if err := c.Close(context.Background()); err != nil && !errors.Is(err, pglock.ErrLost) {
			t.Errorf("close: %v", err)
		}
	})
	return c
}

func acquire(t testing.TB, c *pglock.Client, name string, ttl time.Duration) *pglock.Lease {
	t.Helper()
	l, err := c.TryAcquire(t.Context(), name, ttl)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func exec(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(context.Background(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

// waiting waits until somebody waits for a lease.
func waiting(t testing.TB, pool *pgxpool.Pool, name string) {
	t.Helper()
	for end, found := time.Now().Add(limit), false; !found; {
		if err := pool.QueryRow(context.Background(), `SELECT EXISTS (SELECT FROM pglock.waiters WHERE name = $1)`, name).Scan(&found); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(end) {
			t.Fatalf("never saw a ticket for %q", name)
		}
	}
}
