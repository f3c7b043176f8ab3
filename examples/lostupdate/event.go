package main

import (
	"time"

	"github.com/pawl-go/pawl/pglock"
)

// event is one thing that happened in a story, as the client that it happened
// to saw it: that client's process writes it, and the program collects it.
type event struct {
	At       time.Time     `json:"at"`
	Actor    string        `json:"actor"` // A, B, or lease
	Kind     kind          `json:"kind"`
	Token    pglock.Token  `json:"token,omitempty"`    // the actor's, or the one that expires
	Accepted pglock.Token  `json:"accepted,omitempty"` // refused: what the account accepted before
	Holder   string        `json:"holder,omitempty"`   // held: who has it
	Left     time.Duration `json:"left_ns,omitempty"`  // held: for how long, by the database's clock
	Read     int64         `json:"read,omitempty"`
	Written  int64         `json:"written,omitempty"` // refused: what would have been
	Fenced   bool          `json:"fenced,omitempty"`  // the token was presented with it
	State    string        `json:"state,omitempty"`   // refused: the SQLSTATE of the write
	Error    string        `json:"error,omitempty"`   // failed, refused, lost: in words
}

// now is what the clock on the wall shows, which all processes of a story read
// alike. time.Now carries this process's monotonic clock too, and Sub goes by
// that where both times have one: what the program itself did would stand
// beside what the clients did by another clock, and differ from its own JSON.
func now() time.Time { return time.Now().Round(0) }

type kind string

const (
	ready     kind = "ready"     // the process is connected
	granted   kind = "granted"   // the lease was
	held      kind = "held"      // the lease is somebody else's
	read      kind = "read"      // the balance
	believed  kind = "believed"  // the lease to be its own
	lost      kind = "lost"      // the lease, and knows it
	stopped   kind = "stopped"   // by SIGSTOP
	expired   kind = "expired"   // the token
	continued kind = "continued" // by SIGCONT
	accepted  kind = "accepted"  // the write was, and is committed
	refused   kind = "refused"   // the write was
	released  kind = "released"  // the lease
	failed    kind = "failed"    // nothing of this was to happen
)
