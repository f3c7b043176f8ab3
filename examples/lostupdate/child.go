package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/pglock"
)

// brief is what a client is told when its process starts, on its standard
// input: the command line could be read by others, and the DSN may have a
// password in it.
type brief struct {
	Name   string
	DSN    string
	Schema string
	TTL    time.Duration
	Amount int64
	Fenced bool
}

// command is one line on a client's standard input, answered by one event on
// its standard output. So the program orders what two processes do without any
// clock.
type command string

// child is one client of a story in a process of its own. It ends when its
// standard input does, which it does with the parent.
func child(in io.Reader, out io.Writer) int {
	// Ctrl-C goes to every process of the terminal; the parent sees to this one.
	signal.Ignore(os.Interrupt, syscall.SIGHUP)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	lines, events := json.NewDecoder(in), json.NewEncoder(out)
	answer := func(e event, err error) error {
		if err != nil {
			e = event{Kind: failed, Error: err.Error(), At: now()}
		}
		return errors.Join(err, events.Encode(e))
	}

	var b brief
	if err := lines.Decode(&b); err != nil {
		return 1
	}
	w, err := newWriter(ctx, b)
	if answer(w.happened(ready), err) != nil {
		return 1
	}
	defer w.close()

	commands := make(chan command)
	go func() {
		defer close(commands)
		defer cancel() // what is under way, a wait for the lease perhaps
		for {
			var c command
			if lines.Decode(&c) != nil {
				return
			}
			commands <- c
		}
	}()
	for c := range commands {
		if answer(w.obey(ctx, c)) != nil {
			return 1
		}
	}
	return 0
}

// writer is a client that withdraws an amount under the lease.
type writer struct {
	brief
	account account
	pool    *pgxpool.Pool
	locks   *pglock.Client
	lease   *pglock.Lease
	balance int64 // as it read it
}

func newWriter(ctx context.Context, b brief) (*writer, error) {
	w := &writer{brief: b, account: accountIn(b.Schema)}
	var err error
	if w.pool, err = connect(ctx, b.DSN, 1); err != nil {
		return w, err
	}
	if err := w.pool.Ping(ctx); err != nil {
		w.pool.Close()
		return w, err
	}
	w.locks = pglock.New(w.pool, pglock.WithOwner(b.Name))
	return w, nil
}

func (w *writer) close() {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	_ = w.locks.Close(ctx) // the stale lease is lost, and that is the story
	w.pool.Close()
}

func (w *writer) happened(k kind) event {
	e := event{At: now(), Actor: w.Name, Kind: k, Fenced: w.Fenced}
	if w.lease != nil {
		e.Token = w.lease.Token()
	}
	return e
}

const (
	try      command = "try"
	acquire  command = "acquire"
	look     command = "look"
	ask      command = "ask"
	write    command = "write"
	withdraw command = "withdraw"
	release  command = "release"
)

func (w *writer) obey(ctx context.Context, c command) (event, error) {
	switch c {
	case try:
		return w.try(ctx)
	case acquire:
		return w.acquire(ctx)
	case look:
		return w.look(ctx)
	case ask:
		return w.ask()
	case write:
		return w.write(ctx)
	case withdraw:
		return w.withdraw(ctx)
	case release:
		err := w.lease.Release(ctx)
		return w.happened(released), err
	}
	return event{}, fmt.Errorf("no command %q", c)
}

// try takes the lease, or says who has it and for how long.
func (w *writer) try(ctx context.Context) (event, error) {
	var err error
	w.lease, err = w.locks.TryAcquire(ctx, w.account.name, w.TTL)
	var other *pglock.HeldError
	if !errors.As(err, &other) {
		return w.happened(granted), err
	}
	var now time.Time
	if err := w.pool.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&now); err != nil {
		return event{}, err
	}
	e := w.happened(held)
	e.Token, e.Holder, e.Left = other.Token, other.Owner, other.ExpiresAt.Sub(now)
	return e, nil
}

func (w *writer) acquire(ctx context.Context) (event, error) {
	var err error
	w.lease, err = w.locks.Acquire(ctx, w.account.name, w.TTL)
	return w.happened(granted), err
}

// look reads the balance, behind the fence where there is one: what was
// accepted before is in what it reads, and what has a lower token comes too
// late.
func (w *writer) look(ctx context.Context) (event, error) {
	err := pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) (err error) {
		if err := w.present(ctx, tx); err != nil {
			return err
		}
		w.balance, err = w.account.read(ctx, tx)
		return err
	})
	e := w.happened(read)
	e.Read = w.balance
	return e, err
}

func (w *writer) present(ctx context.Context, tx pgx.Tx) error {
	if !w.Fenced {
		return nil
	}
	return pglock.Fence(ctx, tx, w.account.name, w.lease.Token())
}

// ask is the check before the write, which is true when it is made and says
// nothing about the moment of the write.
func (w *writer) ask() (event, error) {
	if err := w.lease.Err(); err != nil {
		e := w.happened(lost)
		e.Error = err.Error()
		return e, nil
	}
	return w.happened(believed), nil
}

// write writes what follows from the balance that was read, however long ago
// that was. It looks at nothing that would hold it back, not even at the answer
// of the fence: whether it comes too late is the account's to say.
func (w *writer) write(ctx context.Context) (event, error) {
	tx, err := w.pool.Begin(ctx)
	if err != nil {
		return event{}, err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // after COMMIT it does nothing
	fenceErr := w.present(ctx, tx)
	var late *pglock.FencedError
	if fenceErr != nil && !errors.As(fenceErr, &late) {
		return event{}, fenceErr
	}
	var aborted *pgconn.PgError
	if err := w.account.write(ctx, tx, w.balance-w.Amount); err != nil && !errors.As(err, &aborted) {
		return event{}, err
	}
	err = tx.Commit(ctx)
	e := w.happened(accepted)
	e.Written = w.balance - w.Amount
	if late != nil && aborted != nil && errors.Is(err, pgx.ErrTxCommitRollback) {
		e.Kind, e.Accepted, e.Error, e.State, err = refused, late.Highest, late.Error(), aborted.Code, nil
	}
	return e, err
}

// withdraw reads and writes in one transaction, as it should be done.
func (w *writer) withdraw(ctx context.Context) (event, error) {
	err := pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) (err error) {
		if err := w.present(ctx, tx); err != nil {
			return err
		}
		if w.balance, err = w.account.read(ctx, tx); err != nil {
			return err
		}
		return w.account.write(ctx, tx, w.balance-w.Amount)
	})
	e := w.happened(accepted)
	e.Read, e.Written = w.balance, w.balance-w.Amount
	return e, err
}
