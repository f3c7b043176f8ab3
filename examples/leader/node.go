package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/scratch"
	"github.com/pawl-go/pawl/pglock"
)

// nodeCommand, alone, makes the program a candidate.
const nodeCommand = "node"

const createDecisions = `CREATE TABLE decisions (id bigserial PRIMARY KEY, token bigint NOT NULL, node text NOT NULL)`

// A brief is the line by which a candidate learns who it is.
type brief struct{ Node, DSN string }

// A term is the line by which it says that it leads and has decided something.
type term struct {
	Node  string
	Token pglock.Token
}

// stand is a candidate: it campaigns, and leads when it is elected, until its
// standard input ends, which it does with the program that started it.
func stand(ctx context.Context, in io.Reader, out io.Writer) error {
	var b brief
	if err := json.NewDecoder(in).Decode(&b); err != nil {
		return err
	}
	ctx, leave := context.WithCancel(ctx)
	defer leave()
	go func() { _, _ = io.Copy(io.Discard, in); leave() }()

	pool, err := pgxpool.New(ctx, b.DSN)
	if err != nil {
		return err
	}
	defer pool.Close()
	client := pglock.New(pool, pglock.WithOwner(b.Node))
	err = client.Elect(ctx, "examples/leader", ttl, func(ctx context.Context, lease *pglock.Lease) error {
		return lead(ctx, pool, lease, func() error { return json.NewEncoder(out).Encode(term{b.Node, lease.Token()}) })
	})
	if errors.Is(err, context.Canceled) {
		err = nil // it was asked to leave
	}
	return errors.Join(err, client.Close(context.WithoutCancel(ctx)))
}

// lead decides until its context ends: with the lease, or when it is to leave. It
// tells of its term when it has decided for the first time.
func lead(ctx context.Context, pool *pgxpool.Pool, lease *pglock.Lease, tell func() error) error {
	tick := time.Tick(ttl / 10)
	for told := false; ; told = true {
		err := lease.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO decisions (token, node) VALUES ($1, $2)`, lease.Token(), lease.Owner())
			return err
		})
		if err == nil && !told {
			err = tell()
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return err
		}
		select {
		case <-tick:
		case <-ctx.Done():
			return nil
		}
	}
}

// node is a candidate, seen from the program that started it.
type node struct {
	cmd   *exec.Cmd
	stdin io.Closer
	ended bool
}

// start runs this program again as a candidate, whose terms go to terms.
func start(name, dsn string, terms chan<- term) (*node, error) {
	cmd, stdin, stdout, err := scratch.Again(context.Background(), nodeCommand)
	if err != nil {
		return nil, err
	}
	go func() {
		var t term
		for lines := json.NewDecoder(stdout); lines.Decode(&t) == nil; { // all that matter have come when Wait closes it
			terms <- t
		}
	}()
	n := &node{cmd: cmd, stdin: stdin}
	return n, json.NewEncoder(stdin).Encode(brief{name, dsn})
}

// kill ends a node as a crash would. It releases nothing.
func (n *node) kill() error {
	n.ended = true
	if err := n.cmd.Process.Kill(); err != nil {
		return err
	}
	_ = n.cmd.Wait() // it says that it was killed
	return nil
}

// leave asks a node to end, and waits until it has.
func (n *node) leave() error {
	if n.ended {
		return nil
	}
	n.ended = true
	_ = n.stdin.Close() // it may have ended
	late := time.AfterFunc(bound, func() { _ = n.cmd.Process.Kill() })
	defer late.Stop()
	if err := n.cmd.Wait(); err != nil {
		return fmt.Errorf("node: %w", err)
	}
	return nil
}
