//go:build unix

package pglock_test

import (
	"encoding/json"
	"io"
	"math/rand/v2"
	"os"
	osexec "os/exec"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pawl-go/pawl/internal/pgtest"
)

// society is five members, one of whom is stopped now and then for longer than
// its lease lasts.
type society struct {
	pool      *pgxpool.Pool
	members   []*process
	hangUps   []io.Closer
	listeners sync.WaitGroup

	mu    sync.Mutex
	told  []added
	stops int
}

func found(t *testing.T, write string, ttl time.Duration) *society {
	dsn := pgtest.DSN(t)
	s := &society{pool: pgtest.PoolOn(t, dsn)}
	exec(t, s.pool, `CREATE TABLE sets (elements int[] NOT NULL); INSERT INTO sets VALUES ('{}')`)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for id := range 5 {
		cmd := osexec.Command(self)
		cmd.Env = append(os.Environ(), memberEnv+"=1")
		cmd.Stderr = os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // see spawn
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Kill() // it may have ended
			_ = cmd.Wait()
		})
		p := &process{t: t, cmd: cmd, in: json.NewEncoder(stdin), out: json.NewDecoder(stdout)}
		if err := p.in.Encode(membership{DSN: dsn, ID: id, TTL: ttl, Section: ttl, Write: write}); err != nil {
			t.Fatal(err)
		}
		s.members, s.hangUps = append(s.members, p), append(s.hangUps, stdin)
		s.listeners.Go(func() {
			for {
				var a added
				if err := p.out.Decode(&a); err != nil {
					return
				}
				s.mu.Lock()
				s.told = append(s.told, a)
				s.mu.Unlock()
			}
		})
	}
	return s
}

// enough says whether enough members were told that their element is in.
func (s *society) enough() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	in := 0
	for _, a := range s.told {
		if a.Err == "" {
			in++
		}
	}
	return in >= 5
}

// stop stops the holder of the moment.
func (s *society) stop(t *testing.T, lasts time.Duration) {
	const holding = `SELECT coalesce((SELECT holder FROM pglock.leases WHERE name = 'set' AND expires_at > clock_timestamp()), '')`
	var holder string
	for end := time.Now().Add(limit); holder == ""; holder = one[string](t, s.pool, holding) {
		if time.Now().After(end) {
			t.Fatal("nobody ever holds the lease")
		}
	}
	id, err := strconv.Atoi(holder)
	if err != nil {
		t.Fatal(err)
	}
	s.members[id].stop()
	wait(lasts)
	s.members[id].wake()
	s.stops++
}

// end lets the members finish, and returns which elements are not in the set
// though they were told so.
func (s *society) end(t *testing.T) (added, refused int, lost []int) {
	for _, end := range s.hangUps {
		if err := end.Close(); err != nil {
			t.Error(err)
		}
	}
	s.listeners.Wait()
	in := map[int]bool{}
	for _, element := range one[[]int](t, s.pool, `SELECT elements FROM sets`) {
		in[element] = true
	}
	for _, a := range s.told {
		switch {
		case a.Refused:
			refused++
		case a.Err == "":
			added++
			if !in[a.Element] {
				lost = append(lost, a.Element)
			}
		}
	}
	return added, refused, lost
}

// Five processes add to a set by reading and writing the whole of it, and
// whoever holds the lease is stopped for longer than it lasts, again and again.
// Without a check at the resource elements are lost; with Fence or InTx none.
func TestLease_SetOfPausedProcesses(t *testing.T) {
	t.Parallel()
	ttl := pgtest.Lasting(2*time.Second, 300*time.Millisecond, 300*time.Millisecond)
	every := ttl * 5 / 2
	lasts := every * pgtest.Lasting[time.Duration](24, 6, 4)
	var wg sync.WaitGroup
	for write, safe := range map[string]bool{"unchecked": false, "after Fence": true, "in InTx": true} {
		wg.Go(func() {
			t.Run(write, func(t *testing.T) {
				s := found(t, write, ttl)
				for end := time.Now().Add(lasts); time.Now().Before(end) || s.stops < 5 || !s.enough() && time.Now().Before(end.Add(limit)); {
					stands := ttl*5/4 + rand.N(ttl)
					wait(every - stands)
					s.stop(t, stands)
				}
				added, refused, lost := s.end(t)
				t.Logf("%d stops; %d elements added, of which %d were lost; %d refused, %d failed otherwise",
					s.stops, added, len(lost), refused, len(s.told)-added-refused)
				switch {
				case added < 5:
					t.Errorf("%d elements were added", added)
				case safe && len(lost) > 0:
					t.Errorf("lost %v", lost)
				case !safe && len(lost) == 0:
					t.Error("nothing was lost: this test shows nothing")
				}
			})
		})
	}
	wg.Wait()
}
