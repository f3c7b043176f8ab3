package pglock_test

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"github.com/anishathalye/porcupine"

	"github.com/pawl-go/pawl/pglock"
)

// call is an entry of a history: what a client asked about a name, and what it
// was told. Times of the calls are by the test's clock, in ns since the start;
// those of the leases by the database's, in µs. Two entries are no calls to a
// lease: leave is the COMMIT of a guarded transaction, and lapse says from when
// on a lease may have expired whose keeper renews it no more.
type call struct {
	Client  int
	Verb    string // acquire, renew, release, guard, leave or lapse
	Name    string
	Token   pglock.Token // of the tenure, or of the grant; for a call that was refused, the holder's
	Answer  string
	Expires int64 // of the grant, of the renewal or of the holder

	From, To int64 // between which the server looked at its clock
	Kept     bool  // by a keeper, whose renewals are not in the history
	Loose    bool  // granted to nobody who knows, and perhaps taken back

	Called, Returned int64
	id               int
}

// metadata is what an acquire stores for the record.
func (c call) metadata() map[string]string { return map[string]string{"call": strconv.Itoa(c.id)} }

func (c call) String() string {
	s := fmt.Sprintf("%s %d: %s", c.Verb, c.Token, c.Answer)
	if c.Expires != 0 {
		s += fmt.Sprintf(" until %d", c.Expires)
	}
	return s
}

// tenure is the state of one name: the last grant, and what is known of it.
type tenure struct {
	token  pglock.Token
	held   bool  // not released, though it may have expired
	lo, hi int64 // between which it expires
	kept   bool  // a keeper moves the expiry on
	loose  bool  // it may be free: a release of it is not known to have failed
	guards int   // transactions that nobody may be granted the lease beside
}

// forever is later than any time.
const forever = math.MaxInt64

// step says whether a lease can answer so, and what it is like then. What is
// not known makes it more permissive, never less: an answer that this refuses
// is wrong. A row that another transaction has locked counts as held.
func (s tenure) step(c call) (tenure, bool) {
	own := s.token == c.Token
	alive := own && s.held && c.From < s.hi
	switch c.Verb + " " + c.Answer {
	case "acquire granted":
		ended := !s.held || s.loose || !s.kept && s.lo <= c.To
		ok := c.Token > s.token && s.guards == 0 && ended
		s = tenure{token: c.Token, held: true, lo: c.Expires, hi: c.Expires, kept: c.Kept, loose: c.Loose}
		if c.Kept {
			s.hi = forever
		}
		return s, ok
	case "acquire held":
		return s, own && s.held && s.lo <= c.Expires && c.Expires <= s.hi
	case "acquire busy": // nobody had it
		return s, !s.held || s.loose

	case "renew held":
		s.lo, s.hi = c.Expires, c.Expires
		return s, alive
	case "renew unknown":
		if own {
			s.hi = forever
		}
		return s, true

	case "release released":
		ok := alive && s.guards == 0
		s.held, s.loose = false, false
		return s, ok
	case "release lost": // and what was left of it may have been freed
		ok := !own || !s.held || s.loose || !s.kept
		s.loose = s.loose || own
		return s, ok
	case "release unknown":
		s.loose = s.loose || own
		return s, true

	case "guard held":
		s.guards++
		return s, alive
	case "guard unknown": // its transaction can't commit
		return s, true
	case "leave ":
		s.guards--
		return s, own && s.guards >= 0
	case "lapse ":
		s.kept = s.kept && !own
		return s, true
	}
	switch c.Answer { // to whatever was asked about a tenure
	case "busy", "blocked":
		return s, alive
	case "expired":
		return s, own && s.held && !s.kept && s.lo <= c.To
	case "taken":
		return s, !own
	case "idle":
		ok := own && (!s.held || s.loose)
		s.held, s.loose = false, false
		return s, ok
	}
	return s, false
}

var leaseModel = porcupine.Model{
	Init: func() any { return tenure{} },
	Step: func(state, input, _ any) (bool, any) {
		next, ok := state.(tenure).step(input.(call))
		return ok, next
	},
	DescribeOperation: func(input, _ any) string { return input.(call).String() },
	DescribeState:     func(state any) string { return fmt.Sprintf("%+v", state) },
}

// judge checks a history, each name by itself, and returns what the calls are
// about that no lease answers like that, and porcupine's result.
func judge(t testing.TB, history []call) (wrong []porcupine.Operation, _ porcupine.CheckResult) {
	t.Helper()
	byName := map[string][]porcupine.Operation{}
	for _, c := range history {
		op := porcupine.Operation{ClientId: c.Client, Input: c, Call: c.Called, Return: c.Returned}
		byName[c.Name] = append(byName[c.Name], op)
	}
	for _, ops := range byName {
		if result := porcupine.CheckOperationsTimeout(leaseModel, ops, limit); result != porcupine.Ok {
			return ops, result
		}
	}
	return nil, porcupine.Ok
}

// preserve writes calls that don't pass to files, one for programs and one for
// people, and logs where they are.
func preserve(t testing.TB, ops []porcupine.Operation) {
	t.Helper()
	folder, err := os.MkdirTemp("", "pawl-history-*")
	if err != nil {
		t.Fatal(err)
	}
	file, err := os.Create(filepath.Join(folder, "calls.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	lines := json.NewEncoder(file)
	for _, op := range ops {
		if err := lines.Encode(op.Input); err != nil {
			t.Error(err)
		}
	}
	if err := file.Close(); err != nil {
		t.Error(err)
	}
	_, found := porcupine.CheckOperationsVerbose(leaseModel, ops, limit)
	if err := porcupine.VisualizePath(leaseModel, found, filepath.Join(folder, "calls.html")); err != nil {
		t.Error(err)
	}
	t.Logf("the calls, and a picture of them, are in %s", folder)
}

// The checker itself: what it passes and what it doesn't.
func TestHistory_Model(t *testing.T) {
	t.Parallel()
	granted := func(token pglock.Token, at, expires int64) call {
		return call{Verb: "acquire", Answer: "granted", Token: token, From: at, To: at, Expires: expires}
	}
	kept := granted(1, 10, 20)
	kept.Kept = true
	about := func(verb, answer string, token pglock.Token, from, to int64) call {
		return call{Verb: verb, Answer: answer, Token: token, From: from, To: to, Expires: to + 10}
	}
	for name, tt := range map[string]struct {
		calls []call // one after the other
		ok    bool
	}{
		"taken at expiry":               {[]call{granted(1, 10, 20), granted(2, 20, 30)}, true},
		"taken before expiry":           {[]call{granted(1, 10, 20), granted(2, 19, 30)}, false},
		"taken after release":           {[]call{granted(1, 10, 20), about("release", "released", 1, 12, 13), granted(2, 14, 24)}, true},
		"taken after a lost answer":     {[]call{granted(1, 10, 20), about("release", "unknown", 1, 12, 13), granted(2, 14, 24)}, true},
		"token that fell":               {[]call{granted(2, 10, 20), granted(1, 20, 30)}, false},
		"token twice":                   {[]call{granted(1, 10, 20), granted(1, 20, 30)}, false},
		"renewed":                       {[]call{granted(1, 10, 20), about("renew", "held", 1, 18, 19), granted(2, 29, 39)}, true},
		"taken after a renewal":         {[]call{granted(1, 10, 20), about("renew", "held", 1, 18, 19), granted(2, 25, 35)}, false},
		"revived":                       {[]call{granted(1, 10, 20), about("renew", "held", 1, 20, 21)}, false},
		"lost while held":               {[]call{granted(1, 10, 20), about("renew", "expired", 1, 18, 19)}, false},
		"lost when expired":             {[]call{granted(1, 10, 20), about("renew", "expired", 1, 18, 20)}, true},
		"taken by nobody":               {[]call{granted(1, 10, 20), about("guard", "taken", 1, 25, 26)}, false},
		"idle while held":               {[]call{granted(1, 10, 20), about("release", "idle", 1, 12, 13)}, false},
		"nobody while held":             {[]call{granted(1, 10, 20), about("acquire", "busy", 0, 12, 13)}, false},
		"kept past its first expiry":    {[]call{kept, about("guard", "held", 1, 50, 51), about("leave", "", 1, 0, 0)}, true},
		"taken while kept":              {[]call{kept, granted(2, 50, 60)}, false},
		"taken when lapsed":             {[]call{kept, about("lapse", "", 1, 0, 0), granted(2, 50, 60)}, true},
		"taken beside a guard":          {[]call{granted(1, 10, 20), about("guard", "held", 1, 12, 13), granted(2, 30, 40)}, false},
		"released beside a guard":       {[]call{granted(1, 10, 20), about("guard", "held", 1, 12, 13), about("release", "released", 1, 14, 15)}, false},
		"taken after a guard":           {[]call{granted(1, 10, 20), about("guard", "held", 1, 12, 13), about("leave", "", 1, 0, 0), granted(2, 30, 40)}, true},
		"guarded by a former holder":    {[]call{granted(1, 10, 20), granted(2, 20, 30), about("guard", "held", 1, 21, 22)}, false},
		"released by a former holder":   {[]call{granted(1, 10, 20), granted(2, 20, 30), about("release", "released", 1, 21, 22)}, false},
		"former holder told that it is": {[]call{granted(1, 10, 20), granted(2, 20, 30), about("release", "taken", 1, 21, 22)}, true},
	} {
		for i := range tt.calls {
			tt.calls[i].Called, tt.calls[i].Returned = int64(2*i), int64(2*i+1)
		}
		if _, result := judge(t, tt.calls); (result == porcupine.Ok) != tt.ok {
			t.Errorf("%s: %v", name, result)
		}
	}
	// The same calls in another order, or at the same time.
	late := []call{granted(2, 20, 30), granted(1, 10, 20)}
	late[0].Called, late[0].Returned, late[1].Returned = 0, 9, 9
	if _, result := judge(t, slices.Clone(late)); result != porcupine.Ok {
		t.Errorf("two grants at the same time: %v", result)
	}
}
