//go:build unix

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/scratch"
	"github.com/pawl-go/pawl/pglock"
)

// writerCommand, alone, makes the program a writer.
const writerCommand = "writer"

// A brief is the line by which a writer learns what to do. Another line has it
// go on to write.
type brief struct {
	Name, DSN, URL, Lease string
	TTL                   time.Duration
}

// An event is the line by which it says what it has done.
type event struct {
	Token  pglock.Token
	Status int // of its write; 0: it has the lease and has read
	Answer string
}

// write is a writer: it acquires the lease, reads the file, adds a line to what
// it has read, and puts that back with its token. Between the two it waits to be
// told, which is where it can be paused. It doesn't ask its lease again: a pause
// right after the question would be the same.
func write(ctx context.Context, in io.Reader, out io.Writer) error {
	lines, events := json.NewDecoder(in), json.NewEncoder(out)
	var b brief
	if err := lines.Decode(&b); err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, b.DSN)
	if err != nil {
		return err
	}
	defer pool.Close()
	client := pglock.New(pool, pglock.WithOwner(b.Name))
	defer client.Close(context.WithoutCancel(ctx))

	lease, err := client.Acquire(ctx, b.Lease, b.TTL)
	if err != nil {
		return err
	}
	var text string
	if _, err := send(ctx, http.MethodGet, b.URL, 0, &text); err != nil {
		return err
	}
	if err := events.Encode(event{Token: lease.Token()}); err != nil {
		return err
	}
	var on bool
	if err := lines.Decode(&on); err != nil {
		return err
	}
	text += "a line by " + b.Name + "\n"
	e := event{Token: lease.Token()}
	if e.Status, err = send(ctx, http.MethodPut, b.URL, lease.Token(), &text); err != nil {
		e.Answer = err.Error()
	}
	return events.Encode(e)
}

// send gets or puts a text. A file that isn't there yet is an empty one.
func send(ctx context.Context, method, url string, token pglock.Token, text *string) (status int, err error) {
	body, err := json.Marshal(*text)
	if err != nil {
		return 0, err
	}
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set(tokenHeader, strconv.FormatInt(int64(token), 10))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusNotFound && method == http.MethodGet:
		return resp.StatusCode, nil
	case resp.StatusCode != http.StatusOK:
		answer, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10)) // for the message only
		return resp.StatusCode, fmt.Errorf("%s: %s", resp.Status, bytes.TrimSpace(answer))
	}
	return resp.StatusCode, json.NewDecoder(resp.Body).Decode(text)
}

// process is a writer, seen from the program that started it.
type process struct {
	*exec.Cmd
	lines  *json.Encoder
	events chan event
}

// start runs this program again as a writer.
func start(b brief) (*process, error) {
	cmd, stdin, stdout, err := scratch.Again(context.Background(), writerCommand)
	if err != nil {
		return nil, err
	}
	p := &process{cmd, json.NewEncoder(stdin), make(chan event, 2)}
	go func() {
		var e event
		for lines := json.NewDecoder(stdout); lines.Decode(&e) == nil; { // all have been heard when Wait closes it
			p.events <- e
		}
	}()
	return p, p.lines.Encode(b)
}

// hear is what the writer says next.
func (p *process) hear(ctx context.Context) (event, error) {
	select {
	case e := <-p.events:
		return e, nil
	case <-ctx.Done():
		return event{}, fmt.Errorf("wait for a writer: %w", context.Cause(ctx))
	}
}

// write has the writer go on, and returns what became of its write.
func (p *process) write(ctx context.Context) (event, error) {
	if err := p.lines.Encode(true); err != nil {
		return event{}, err
	}
	return p.hear(ctx)
}

// end ends the writer, stopped or not, and waits for that.
func (p *process) end() {
	_ = p.Process.Kill() // it may have ended by itself
	_ = p.Wait()         // it says that it was killed
}
