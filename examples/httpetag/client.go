package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
)

// edit has the editors add their lines to the page at once, and returns how
// often one was told that it had changed. All have fetched the page before the
// first puts it back, so that they do meet.
func edit(ctx context.Context, url string, o options, looking bool) (told int64, err error) {
	if err := put(ctx, url, page{}, "If-None-Match", "*"); err != nil {
		return 0, err
	}
	var again atomic.Int64
	var fetched, done sync.WaitGroup
	fetched.Add(o.editors)
	errs := make([]error, o.editors)
	for i := range o.editors {
		done.Go(func() {
			arrived := sync.OnceFunc(func() { fetched.Done(); fetched.Wait() })
			defer arrived()
			for n := 0; n < o.edits && errs[i] == nil; n++ {
				errs[i] = addLine(ctx, url, fmt.Sprintf("editor %d, line %d\n", i, n), looking, arrived, &again)
			}
		})
	}
	done.Wait()
	return again.Load(), errors.Join(errs...)
}

// addLine fetches, adds and puts, and does it again when somebody was faster.
func addLine(ctx context.Context, url, line string, looking bool, fetched func(), again *atomic.Int64) error {
	for {
		p, tag, err := get(ctx, url)
		if err != nil {
			return err
		}
		fetched()
		p.Body += line
		if !looking {
			tag = "*"
		}
		err = put(ctx, url, p, "If-Match", tag)
		for !looking && errors.Is(err, errChanged) {
			// The page changed while the server itself looked. Who doesn't look
			// puts the same once more.
			err = put(ctx, url, p, "If-Match", tag)
		}
		if !errors.Is(err, errChanged) {
			return err
		}
		again.Add(1)
	}
}

// errChanged is 412.
var errChanged = errors.New("the page has changed")

func get(ctx context.Context, url string) (p page, tag string, err error) {
	resp, err := send(ctx, http.MethodGet, url, nil, "", "")
	if err != nil {
		return p, "", err
	}
	defer resp.Body.Close()
	return p, resp.Header.Get("ETag"), json.NewDecoder(resp.Body).Decode(&p)
}

func put(ctx context.Context, url string, p page, header, tag string) error {
	body, err := json.Marshal(p)
	if err != nil {
		return err
	}
	resp, err := send(ctx, http.MethodPut, url, body, header, tag)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// send returns the answer to a request that did well.
func send(ctx context.Context, method, url string, body []byte, header, tag string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if header != "" {
		req.Header.Set(header, tag)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode < 300 {
		return resp, nil
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10)) // for the message only
	err = fmt.Errorf("%s %s: %s: %s", method, url, resp.Status, strings.TrimSpace(string(text)))
	if resp.StatusCode == http.StatusPreconditionFailed {
		err = fmt.Errorf("%w: %w", errChanged, err)
	}
	return nil, err
}

// lines counts the lines of the page.
func lines(ctx context.Context, url string) (int, error) {
	p, _, err := get(ctx, url)
	return strings.Count(p.Body, "\n"), err
}
