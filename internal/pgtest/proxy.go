package pgtest

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/Shopify/toxiproxy/v2"
	"github.com/jackc/pgx/v5"
	"github.com/rs/zerolog"
)

// Wire is a network between a test and a server on which faults can be made.
// Each fault concerns the connections there are and those to come, and comes
// on top of those before it, until Heal.
type Wire struct {
	t     testing.TB
	dsn   string
	proxy *toxiproxy.Proxy
}

// Proxy puts a wire in front of a DSN. It is cut at the end of the test.
func Proxy(t testing.TB, dsn string) *Wire {
	t.Helper()
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	upstream := net.JoinHostPort(config.Host, strconv.Itoa(int(config.Port)))
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	proxy := toxiproxy.NewProxy(server, t.Name(), "127.0.0.1:0", upstream)
	if err := proxy.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(proxy.Stop)
	through, err := onHost(dsn, proxy.Listen)
	if err != nil {
		t.Fatal(err)
	}
	return &Wire{t: t, dsn: through, proxy: proxy}
}

// DSN leads to the server through the wire.
func (w *Wire) DSN() string { return w.dsn }

// Silence loses what either side sends. Nobody is told: connections stay open,
// new ones open and hear nothing. Heal ends those that were silenced.
func (w *Wire) Silence() {
	w.t.Helper()
	w.add("timeout", "upstream", `"timeout": 0`)
	w.add("timeout", "downstream", `"timeout": 0`)
}

// DropReplies loses what the server sends, and lets through what it is sent.
// Heal ends the connections concerned.
func (w *Wire) DropReplies() {
	w.t.Helper()
	w.add("timeout", "downstream", `"timeout": 0`)
}

// Delay holds each reply of the server back for d. Heal delivers at once what
// is still held back.
func (w *Wire) Delay(d time.Duration) {
	w.t.Helper()
	w.add("latency", "downstream", fmt.Sprintf(`"latency": %d`, d.Milliseconds()))
}

func (w *Wire) add(toxic, stream, attributes string) {
	w.t.Helper()
	_, err := w.proxy.Toxics.AddToxicJson(strings.NewReader(
		fmt.Sprintf(`{"type": %q, "stream": %q, "attributes": {%s}}`, toxic, stream, attributes)))
	if err != nil {
		w.t.Fatalf("%s %s: %v", toxic, stream, err)
	}
}

// Reset ends all connections; new ones can be made.
func (w *Wire) Reset() {
	w.t.Helper()
	w.Cut()
	w.start()
}

// Cut ends all connections and refuses new ones.
func (w *Wire) Cut() { w.proxy.Stop() }

// Heal ends every fault.
func (w *Wire) Heal() {
	w.t.Helper()
	w.proxy.Toxics.ResetToxics(context.Background())
	if !w.proxy.Enabled {
		w.start()
	}
}

func (w *Wire) start() {
	w.t.Helper()
	if err := w.proxy.Start(); err != nil {
		w.t.Fatal(err)
	}
}
