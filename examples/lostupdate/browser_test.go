package main

import (
	"context"
	"fmt"
	"net/url"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// patience is with a browser on the slowest machine.
const patience = 3 * time.Minute

// browser is a real one without a window. It is the rig chromium.
type browser struct {
	testing.TB
	ctx context.Context
	*complaints
}

// complaints are errors, and requests for anything but a page.
type complaints struct {
	mu  sync.Mutex
	all []string
}

func newBrowser(t testing.TB) browser {
	t.Helper()
	program, err := findChromium()
	pgtest.Require(t, "chromium", err)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	// Its sandbox refuses root, and a page of this program is no stranger.
	ctx, _ = chromedp.NewContext(ctx, chromedp.WithAllocatorOptions(chromedp.ExecPath(program), chromedp.NoSandbox, chromedp.DisableGPU))
	b := browser{t, ctx, new(complaints)}
	if err := chromedp.Listen(ctx, b.hear); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := chromedp.Cancel(ctx); err != nil {
			t.Error(err)
		}
	})
	if _, err := chromedp.Call(ctx, network.Enable, network.EnableParams{}); err != nil {
		t.Fatal(err)
	}
	return b
}

func findChromium() (string, error) {
	names := []string{
		"chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome",
		"/Applications/Chromium.app/Contents/MacOS/Chromium",
		"/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
	}
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("looked for %s", strings.Join(names, ", "))
}

// on is the browser for a subtest.
func (b browser) on(t testing.TB) browser { return browser{t, b.ctx, b.complaints} }

func (c *complaints) hear(event any) {
	complaint := ""
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		complaint = "exception: " + e.ExceptionDetails.Text
		if e.ExceptionDetails.Exception != nil {
			complaint += " " + e.ExceptionDetails.Exception.Description
		}
	case *runtime.EventConsoleAPICalled:
		complaint = fmt.Sprintf("console: %s", e.Type)
	case *log.EventEntryAdded:
		complaint = "log: " + e.Entry.Text
	case *network.EventRequestWillBeSent:
		if e.Type != network.ResourceTypeDocument || !strings.HasPrefix(e.Request.URL, "file:") {
			complaint = "request: " + e.Request.URL
		}
	}
	if complaint != "" {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.all = append(c.all, complaint)
	}
}

// complained returns what there was to complain of since it was last asked.
func (c *complaints) complained() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	all := c.all
	c.all = nil
	return all
}

// screen is what the reader's device and settings are.
type screen struct {
	width, height int64
	dark, still   bool
}

var desktop = screen{width: 1280, height: 900}

// open shows a file.
func (b browser) open(path string, s screen) {
	b.Helper()
	scheme, motion := "light", "no-preference"
	if s.dark {
		scheme = "dark"
	}
	if s.still {
		motion = "reduce"
	}
	features := []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}, {Name: "prefers-reduced-motion", Value: motion}}
	if _, err := chromedp.Call(b.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: features}); err != nil {
		b.Fatal(err)
	}
	address := url.URL{Scheme: "file", Path: filepath.ToSlash(path)}
	b.do(chromedp.EmulateViewport(s.width, s.height), chromedp.Navigate(address.String()))
}

func (b browser) do(steps ...chromedp.Action[chromedp.Void]) {
	b.Helper()
	if err := chromedp.Do(b.ctx, steps...); err != nil {
		b.Fatal(err)
	}
}

// eval evaluates an expression in the page.
func eval[T any](b browser, expression string) T {
	b.Helper()
	answer, err := chromedp.Run(b.ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		b.Fatalf("%v: %s", err, expression)
	}
	return answer
}
