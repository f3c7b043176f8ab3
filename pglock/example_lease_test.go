package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pawl-go/pawl/pglock"
)

// The caller holds the handle, and decides when to release.
func ExampleClient_Acquire() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()
	client := pglock.New(pool)
	defer client.Close(ctx)

	waiting, cancel := context.WithTimeout(ctx, time.Minute) // for the lease, not for holding it
	defer cancel()
	lease, err := client.Acquire(waiting, "reports/daily", 30*time.Second, pglock.WithMetadata(map[string]string{"build": "v1.2"}))
	if errors.Is(err, pglock.ErrLocked) {
		fmt.Println("others had it all the time")
		return
	}
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(lease.Name(), lease.Err())
	err = lease.Release(ctx)
	fmt.Println(err, errors.Is(lease.Err(), pglock.ErrReleased))
	// Output:
	// reports/daily <nil>
	// <nil> true
}

// A transfer wants both accounts or none. AcquireAll would wait for them, in an
// order in which no two callers wait for each other.
func ExampleClient_TryAcquireAll() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()
	client := pglock.New(pool, pglock.WithOwner("worker 1"))
	defer client.Close(ctx)

	leases, err := client.TryAcquireAll(ctx, []string{"accounts/42", "accounts/43"}, 30*time.Second)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(len(leases), "leases")

	_, err = client.TryAcquireAll(ctx, []string{"accounts/44", "accounts/43"}, 30*time.Second)
	if held, ok := errors.AsType[*pglock.HeldError](err); ok {
		fmt.Println(held.Name, "is held by", held.Owner)
	}
	_, err = client.TryAcquire(ctx, "accounts/44", 30*time.Second) // was not taken alone
	fmt.Println(err)
	// Output:
	// 2 leases
	// accounts/43 is held by worker 1
	// <nil>
}

// One process of many leads, and when it is gone another does. Here there is
// one, which leads once and leaves.
func ExampleClient_Elect() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()
	client := pglock.New(pool)
	defer client.Close(ctx)

	err := client.Elect(ctx, "scheduler", 30*time.Second, func(ctx context.Context, lease *pglock.Lease) error {
		// ctx ends when another may lead: return then, and Elect campaigns again.
		return lease.InTx(ctx, pool, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `UPDATE accounts SET balance = balance + 1`)
			return err
		})
	})
	fmt.Println("left:", err)
	// Output: left: <nil>
}

// On SIGTERM the leader stops, and the next one leads at once: Elect releases
// when its function has returned, and Close whatever else is held.
func ExampleClient_Close() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()
	client := pglock.New(pool)
	report := func(ctx context.Context, lease *pglock.Lease) error { return nil }

	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, os.Interrupt)
	defer stop()
	err := client.Elect(ctx, "reports", 30*time.Second, report)
	if ctx.Err() != nil {
		err = nil // it was asked to end
	}

	closing, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	err = errors.Join(err, client.Close(closing))
	fmt.Println(err)
	_, err = client.TryAcquire(context.Background(), "reports", time.Minute)
	fmt.Println(errors.Is(err, pglock.ErrClosed))
	// Output:
	// <nil>
	// true
}

// Who has what, and an operator who takes it away.
func ExampleClient_ForceRelease() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()
	client := pglock.New(pool, pglock.WithOwner("worker 1"))
	defer client.Close(ctx)
	lease, err := client.Acquire(ctx, "reports/daily", time.Hour)
	if err != nil {
		log.Fatal(err)
	}

	held, err := client.Leases(ctx)
	if err != nil {
		log.Fatal(err)
	}
	for _, info := range held {
		fmt.Println(info.Owner, "has", info.Name)
		if err := client.ForceRelease(ctx, info.Name, info.Token); err != nil {
			log.Fatal(err)
		}
	}
	// The holder learns it with its next renewal, and from the database at once.
	err = lease.InTx(ctx, pool, func(context.Context, pgx.Tx) error { return nil })
	fmt.Println(errors.Is(err, pglock.ErrLost))
	// Output:
	// worker 1 has reports/daily
	// true
}

// Who holds a lease, as it changes.
func ExampleClient_Observe() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	pool, done := examplePool()
	defer done()
	client := pglock.New(pool, pglock.WithOwner("worker 1"))
	defer client.Close(ctx)

	holders := client.Observe(ctx, "reports/daily")
	fmt.Println("token", (<-holders).Token)
	lease, err := client.Acquire(ctx, "reports/daily", time.Minute)
	if err != nil {
		log.Fatal(err)
	}
	now := <-holders
	fmt.Println(now.Owner, now.Token == lease.Token())
	// Output:
	// token 0
	// worker 1 true
}

// A table that takes no write without a lease, and what becomes of one that
// forgets.
func ExamplePresent() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()
	client := pglock.New(pool)
	defer client.Close(ctx)
	if _, err := pool.Exec(ctx, `SELECT pglock.protect('accounts', 'accounts/%')`); err != nil {
		log.Fatal(err)
	}
	lease, err := client.Acquire(ctx, "accounts/42", time.Minute)
	if err != nil {
		log.Fatal(err)
	}

	withdraw := func(present bool) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if present {
				if err := pglock.Present(ctx, tx, lease.Name(), lease.Token()); err != nil {
					return err
				}
			}
			_, err := tx.Exec(ctx, `UPDATE accounts SET balance = balance - 10 WHERE id = 42`)
			return pglock.Explain(err)
		})
	}
	fmt.Println(withdraw(true))
	fmt.Println(errors.Is(withdraw(false), pglock.ErrUnpresented))
	// Output:
	// <nil>
	// true
}

// counter is an Observer that counts what matters for an alarm.
type counter struct{ acquired, lost int }

func (c *counter) Observe(_ context.Context, event pglock.Event) {
	switch event.(type) {
	case pglock.Acquired:
		c.acquired++
	case pglock.Lost:
		c.lost++
	}
}

// Metrics of your own. Here all events come on one goroutine.
func ExampleWithObserver() {
	ctx := context.Background()
	pool, done := examplePool()
	defer done()
	var count counter
	client := pglock.New(pool, pglock.WithObserver(&count))

	for range 3 {
		err := client.WithLease(ctx, "reports/daily", time.Minute, func(context.Context, *pglock.Lease) error { return nil })
		if err != nil {
			log.Fatal(err)
		}
	}
	if err := client.Close(ctx); err != nil {
		log.Fatal(err)
	}
	fmt.Println(count.acquired, "acquired,", count.lost, "lost")
	// Output: 3 acquired, 0 lost
}
