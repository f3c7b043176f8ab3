package optimistic_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/pawl-go/pawl/optimistic"
)

func TestETag(t *testing.T) {
	t.Parallel()
	for _, version := range []int64{0, 7, -7, 1 << 53} {
		tag := optimistic.ETag(version)
		m, err := optimistic.IfMatch(http.Header{"If-Match": {tag}})
		if err != nil || len(m.Versions) != 1 || m.Versions[0] != version {
			t.Errorf("%s came back as %+v, %v", tag, m, err)
		}
	}
}

func TestIfMatch(t *testing.T) {
	t.Parallel()
	type match = optimistic.Match
	for _, c := range []struct {
		lines       []string
		match, none match // of If-Match, of If-None-Match
		bad         bool
	}{
		{[]string{"*"}, match{Any: true}, match{Any: true}, false},
		{[]string{" * "}, match{Any: true}, match{Any: true}, false},
		{[]string{`"1"`}, match{Versions: []int64{1}}, match{Versions: []int64{1}}, false},
		{[]string{`"1", "2",,"3"`}, match{Versions: []int64{1, 2, 3}}, match{Versions: []int64{1, 2, 3}}, false},
		{[]string{`"1"`, `"2"`}, match{Versions: []int64{1, 2}}, match{Versions: []int64{1, 2}}, false},
		{[]string{`W/"1"`}, match{}, match{Versions: []int64{1}}, false},
		{[]string{`W/"1", "2"`}, match{Versions: []int64{2}}, match{Versions: []int64{1, 2}}, false},
		{[]string{`"a,b", "2"`}, match{Versions: []int64{2}}, match{Versions: []int64{2}}, false},
		{[]string{`"007", "+7", "7 ", "", "99999999999999999999"`}, match{}, match{}, true}, // a blank inside
		{[]string{`"007", "+7", "", "99999999999999999999"`}, match{}, match{}, false},
		{[]string{``}, match{}, match{}, true},
		{[]string{`1`}, match{}, match{}, true},
		{[]string{`"1`}, match{}, match{}, true},
		{[]string{`"1" "2"`}, match{}, match{}, true},
		{[]string{`"1"*`}, match{}, match{}, true},
		{[]string{`"1", *`}, match{}, match{}, true},
		{[]string{`w/"1"`}, match{}, match{}, true},
		{[]string{`W/`}, match{}, match{}, true},
	} {
		m, err := optimistic.IfMatch(http.Header{"If-Match": c.lines})
		none, noneErr := optimistic.IfNoneMatch(http.Header{"If-None-Match": c.lines})
		if diff := cmp.Diff([]match{c.match, c.none}, []match{m, none}); diff != "" {
			t.Errorf("%q: %s", c.lines, diff)
		}
		if errors.Is(err, optimistic.ErrBadPrecondition) != c.bad || errors.Is(noneErr, optimistic.ErrBadPrecondition) != c.bad || !c.bad && err != nil {
			t.Errorf("%q: %v, %v", c.lines, err, noneErr)
		}
	}
	_, err := optimistic.IfMatch(http.Header{})
	want(t, err, optimistic.ErrPreconditionRequired)
	none, err := optimistic.IfNoneMatch(http.Header{})
	if err != nil || none.Has(0) {
		t.Errorf("without a header: %+v, %v", none, err)
	}
}

func TestMatch_Version(t *testing.T) {
	t.Parallel()
	unread := func() (int64, error) { t.Error("read"); return 0, nil }
	is := func(version int64, err error) func() (int64, error) {
		return func() (int64, error) { return version, err }
	}
	for _, c := range []struct {
		match   optimistic.Match
		current func() (int64, error)
		version int64
		err     error
	}{
		{optimistic.Match{Versions: []int64{5}}, unread, 5, nil},
		{optimistic.Match{}, unread, 0, optimistic.ErrPreconditionFailed},
		{optimistic.Match{Versions: []int64{5, 6}}, is(6, nil), 6, nil},
		{optimistic.Match{Versions: []int64{5, 6}}, is(7, nil), 7, optimistic.ErrPreconditionFailed},
		{optimistic.Match{Any: true}, is(7, nil), 7, nil},
		{optimistic.Match{Any: true}, is(0, optimistic.ErrNotFound), 0, optimistic.ErrNotFound},
	} {
		version, err := c.match.Version(c.current)
		if version != c.version || !errors.Is(err, c.err) || c.err == nil && err != nil {
			t.Errorf("%+v: %d, %v", c.match, version, err)
		}
	}
}

func TestStatus(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		code int
	}{
		{nil, 200},
		{&optimistic.ConflictError{}, 412},
		{optimistic.ErrPreconditionFailed, 412},
		{optimistic.ErrPreconditionRequired, 428},
		{optimistic.ErrBadPrecondition, 400},
		{optimistic.ErrNotFound, 404},
		{optimistic.ErrVetoed, 403},
		{fmt.Errorf("%w: %w", optimistic.ErrExhausted, optimistic.ErrConflict), 503},
		{fmt.Errorf("%w: %w", optimistic.ErrUnknownCommit, optimistic.ErrConflict), 500},
		{errors.New("mine"), 500},
	} {
		if code := optimistic.Status(c.err); code != c.code {
			t.Errorf("%v: %d, want %d", c.err, code, c.code)
		}
	}
}
