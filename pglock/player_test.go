package pglock_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/pglock"
)

// player is a client whose calls are recorded.
type player struct {
	*history
	id    int
	gate  gate
	pool  *pgxpool.Pool
	locks *pglock.Client
}

// playTTL is the TTL of all leases in a history.
const playTTL = 400 * time.Millisecond

// play acquires a lease once, and does a few things as its holder.
func (p *player) play(name string) {
	if rand.N(2) == 0 {
		p.playBare(name)
	} else {
		p.playLease(name)
	}
}

// playBare has a lease without a keeper: it runs out.
func (p *player) playBare(name string) {
	token, ok := p.take(name)
	if !ok {
		p.think(playTTL / 40)
		return
	}
	for range rand.N(4) {
		if rand.N(10) == 0 {
			wait(playTTL)
		}
		if p.think(playTTL / 8); rand.N(2) == 0 {
			p.ask(name, token, "renew")
		} else {
			p.guarded(name, token, func(ctx context.Context, tx pgx.Tx) error { return pglock.Present(ctx, tx, name, token) })
		}
	}
	if rand.N(5) > 0 { // else it is left to run out
		p.ask(name, token, "release")
	}
}

// playLease has a lease that is renewed.
func (p *player) playLease(name string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c := p.begin("acquire", name, 0)
	c.Kept = true
	acquire := p.locks.Acquire
	if rand.N(2) == 0 {
		acquire = p.locks.TryAcquire
	}
	l, err := acquire(ctx, name, playTTL, pglock.WithMetadata(c.metadata()))
	held, refused := errors.AsType[*pglock.HeldError](err)
	switch {
	case err == nil:
		c.Answer, c.Token = "granted", l.Token() // and the database knows when
	case refused && ctx.Err() == nil && held.Token != 0:
		c.Answer, c.Token, c.Expires = "held", held.Token, held.ExpiresAt.UnixMicro()
	case refused && ctx.Err() == nil:
		c.Answer = "busy"
	}
	p.add(c)
	if err != nil {
		p.think(playTTL / 40)
		return
	}
	for range rand.N(3) {
		p.think(playTTL / 8)
		p.guarded(name, l.Token(), l.Guard)
	}
	for range 20 {
		c = p.begin("release", name, l.Token())
		err := l.Release(context.Background())
		lost, ended := errors.AsType[*pglock.LostError](err)
		switch {
		case err == nil:
			c.Answer, c.To = "released", forever
		case errors.Is(err, pglock.ErrLocked):
			c.Answer = "blocked"
		case ended && lost.Cause != pglock.Unreachable:
			c.Answer = "lost"
		}
		p.add(c)
		if c.Answer == "released" {
			return
		}
		if c.Answer != "blocked" {
			p.add(call{Client: p.id, Verb: "lapse", Name: name, Token: l.Token(), Called: int64(l.Deadline().Sub(p.start))})
			return
		}
	}
	p.t.Errorf("a release of %q with token %d was blocked 20 times", name, l.Token())
}

func (p *player) think(most time.Duration) { wait(rand.N(most)) }

func (p *player) begin(verb, name string, token pglock.Token) call {
	return call{Client: p.id, Verb: verb, Name: name, Token: token, Answer: "unknown", Called: p.now(), id: int(p.serial.Add(1))}
}

// take acquires a lease that nobody renews but ask.
func (p *player) take(name string) (pglock.Token, bool) {
	c := p.begin("acquire", name, 0)
	var granted bool
	var token *pglock.Token
	var expires *time.Time
	if _, err := p.send(&c, `SELECT granted, token, expires_at FROM `+p.function("acquire")+`(ARRAY[$1::text], $2::interval, metadata => $3)`,
		[]any{name, playTTL, c.metadata()}, &granted, &token, &expires); err == nil {
		c.Answer = "busy"
		if token != nil && expires != nil {
			c.Answer, c.Token, c.Expires = "held", *token, expires.UnixMicro()
		}
		if granted {
			c.Answer, c.To = "granted", expires.Add(-playTTL).UnixMicro()
			c.From = c.To
		}
	}
	p.add(c)
	return c.Token, granted && c.Answer == "granted"
}

// ask renews or releases.
func (p *player) ask(name string, token pglock.Token, verb string) {
	c := p.begin(verb, name, token)
	var state string
	expires, err := p.send(&c, `SELECT state FROM `+p.function(verb)+`(ARRAY[$1::text], ARRAY[$2::bigint])`, []any{name, token}, &state)
	if err == nil {
		c.Answer = state
	}
	if state == "held" && expires != nil {
		c.Expires = expires.UnixMicro()
	}
	p.add(c)
}

// send makes a call between two looks at the database's clock, in one
// transaction and one round trip, and returns the expiry that it leaves.
func (p *player) send(c *call, sql string, args []any, dest ...any) (expires *time.Time, err error) {
	var from, to time.Time
	batch := &pgx.Batch{}
	batch.Queue(`SELECT clock_timestamp()`).QueryRow(func(row pgx.Row) error { return row.Scan(&from) })
	batch.Queue(sql, args...).QueryRow(func(row pgx.Row) error { return row.Scan(dest...) })
	batch.Queue(`SELECT clock_timestamp(), (SELECT expires_at FROM pglock.leases WHERE name = $1 AND claim IS NOT NULL)`,
		c.Name).QueryRow(func(row pgx.Row) error { return row.Scan(&to, &expires) })
	err = p.pool.SendBatch(context.Background(), batch).Close()
	c.From, c.To, c.Returned = from.UnixMicro(), to.UnixMicro(), p.now()
	return expires, err
}

// guarded writes in a transaction that guard has admitted, and stays in it for
// a while, at times until after the expiry.
func (p *player) guarded(name string, token pglock.Token, guard func(context.Context, pgx.Tx) error) {
	ctx := context.Background()
	tx, err := p.pool.Begin(ctx)
	if err != nil {
		return
	}
	defer func() { _ = tx.Rollback(ctx) }() // no error once it has ended
	var from time.Time
	if err := tx.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&from); err != nil {
		return
	}
	stays := rand.N(playTTL / 8)
	if rand.N(20) == 0 {
		stays += playTTL
	}
	if err := pglock.SetHoldTimeout(ctx, tx, 4*playTTL); err != nil {
		return
	}
	c := p.begin("guard", name, token)
	c.From = from.UnixMicro()
	err = guard(ctx, tx)
	c.Returned = p.now()
	if lost, ok := errors.AsType[*pglock.LostError](err); ok {
		c.Answer = map[pglock.Cause]string{pglock.Expired: "expired", pglock.Taken: "taken", pglock.ForceReleased: "idle"}[lost.Cause]
		c.To = p.clock()
	} else if err == nil {
		c.Answer = "held"
	}
	if p.add(c); err != nil {
		return
	}
	wait(stays)
	_, err = tx.Exec(ctx, `INSERT INTO writes (name, token) VALUES ($1, $2)`, name, token)
	leave := call{Client: p.id, Verb: "leave", Name: name, Token: token, Called: p.now()}
	if err == nil {
		err = tx.Commit(ctx)
		leave.Returned = p.now()
	}
	if err != nil { // it was ended at some time since, or will be
		leave.Called, leave.Returned = c.Returned, 0
	}
	p.add(leave)
}
