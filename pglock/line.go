package pglock

import "time"

// kept is what the keeper keeps alive: a lease or a ticket.
type kept interface {
	pulse() *beat
	span() time.Duration // its TTL
}

// beat is the keeper's state of what it keeps.
type beat struct {
	next  time.Duration // of the next event, since the keeper's start
	index int           // in the line; -1: not in it
	asked bool          // a renewal is due or under way
	err   error         // of the last renewal
}

func (l *Lease) pulse() *beat  { return &l.beat }
func (t *ticket) pulse() *beat { return &t.beat }

func (l *Lease) span() time.Duration  { return l.ttl }
func (t *ticket) span() time.Duration { return t.request.ttl }

// line is a heap of what is kept, by the next event.
type line []kept

func (q line) Len() int           { return len(q) }
func (q line) Less(i, j int) bool { return q[i].pulse().next < q[j].pulse().next }
func (q line) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].pulse().index, q[j].pulse().index = i, j
}

func (q *line) Push(x any) {
	one := x.(kept)
	one.pulse().index = len(*q)
	*q = append(*q, one)
}

func (q *line) Pop() any {
	old := *q
	one := old[len(old)-1]
	old[len(old)-1] = nil
	*q = old[:len(old)-1]
	one.pulse().index = -1
	return one
}
