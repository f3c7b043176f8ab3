package optimistic

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// ETag is a row's version as the strong entity tag of an HTTP response (RFC
// 9110, section 8.8.3): "1732895836000001", quotes included. It fits where one
// URL gives one representation; who negotiates content or compresses needs tags
// that differ between them.
func ETag(version int64) string { return `"` + strconv.FormatInt(version, 10) + `"` }

// A Match is what a request says of the versions it expects.
type Match struct {
	Any      bool    // the request said *: whatever version there is
	Versions []int64 // those of its tags that ETag can have made
}

// IfMatch reads If-Match (RFC 9110, section 13.1.1), by which a client says on
// which version its change was made. Without the header the error is
// ErrPreconditionRequired, and with one that isn't a list of tags
// ErrBadPrecondition. Weak tags and tags of other makes never match.
func IfMatch(h http.Header) (Match, error) {
	m, err := parseMatch(h, "If-Match", false)
	if err == nil && !m.Any && m.Versions == nil && len(h.Values("If-Match")) == 0 {
		err = fmt.Errorf("%w: send If-Match with the ETag of the last GET", ErrPreconditionRequired)
	}
	return m, err
}

// IfNoneMatch reads If-None-Match (RFC 9110, section 13.1.2). Any, the asterisk,
// is a PUT that creates and never overwrites: take Insert, and answer 412 where
// it didn't create. The versions are a GET that wants an answer only if there is
// something new: answer 304 where Has says true. Weak tags count here. Without
// the header the Match is the zero one, which has nothing.
func IfNoneMatch(h http.Header) (Match, error) { return parseMatch(h, "If-None-Match", true) }

// Has says whether the version is among those of the request.
func (m Match) Has(version int64) bool { return m.Any || slices.Contains(m.Versions, version) }

// Version is the version to hand to CompareAndSet, Touch or Delete. One tag is
// it, and nothing needs to be read. For several, and for the asterisk, current
// tells which one the row has, and its error is returned; the error is
// ErrPreconditionFailed when no tag of the request has it.
func (m Match) Version(current func() (int64, error)) (int64, error) {
	switch {
	case !m.Any && len(m.Versions) == 0:
		return 0, fmt.Errorf("%w: no tag of If-Match is one of ours", ErrPreconditionFailed)
	case !m.Any && len(m.Versions) == 1:
		return m.Versions[0], nil
	}
	version, err := current()
	if err == nil && !m.Has(version) {
		err = fmt.Errorf("%w: it is at version %d", ErrPreconditionFailed, version)
	}
	return version, err
}

// Status is the HTTP status that says what err says: 412 for a row that has
// changed, 428 for a missing If-Match, 400 for one that can't be read, 404, 403
// for a veto, 503 for what may go well later, 200 for nil, and 500 for everything
// else, ErrUnknownCommit included.
func Status(err error) int {
	for _, s := range statuses {
		if errors.Is(err, s.err) {
			return s.code
		}
	}
	if err == nil {
		return http.StatusOK
	}
	return http.StatusInternalServerError
}

// The order counts: an ErrExhausted holds an ErrConflict, and is no client's
// doing.
var statuses = []struct {
	err  error
	code int
}{
	{ErrUnknownCommit, http.StatusInternalServerError},
	{ErrExhausted, http.StatusServiceUnavailable},
	{ErrRetryOutside, http.StatusServiceUnavailable},
	{ErrConflict, http.StatusPreconditionFailed},
	{ErrPreconditionFailed, http.StatusPreconditionFailed},
	{ErrPreconditionRequired, http.StatusPreconditionRequired},
	{ErrBadPrecondition, http.StatusBadRequest},
	{ErrNotFound, http.StatusNotFound},
	{ErrVetoed, http.StatusForbidden},
}

// parseMatch reads a list of entity tags: several headers count as one, and
// empty elements don't count. A comma may stand inside a tag, so that splitting
// at commas won't do.
func parseMatch(h http.Header, name string, weak bool) (m Match, err error) {
	rest := strings.Trim(strings.Join(h.Values(name), ","), " \t")
	if rest == "*" {
		return Match{Any: true}, nil
	}
	bad := func() (Match, error) {
		return Match{}, fmt.Errorf("%w: %s: %q", ErrBadPrecondition, name, strings.Join(h.Values(name), ", "))
	}
	if rest == "" && len(h.Values(name)) > 0 {
		return bad()
	}
	for {
		rest = strings.TrimLeft(rest, " \t,")
		if rest == "" {
			return m, nil
		}
		isWeak := strings.HasPrefix(rest, "W/")
		rest = strings.TrimPrefix(rest, "W/")
		if rest == "" || rest[0] != '"' {
			return bad()
		}
		end := strings.IndexByte(rest[1:], '"')
		if end < 0 || strings.ContainsFunc(rest[1:end+1], func(r rune) bool { return r <= ' ' || r == 0x7f }) {
			return bad()
		}
		tag := rest[:end+2]
		rest = strings.TrimLeft(rest[end+2:], " \t")
		if rest != "" && rest[0] != ',' {
			return bad()
		}
		// Tags are compared as text: "007" is not version 7.
		version, err := strconv.ParseInt(tag[1:len(tag)-1], 10, 64)
		if err == nil && ETag(version) == tag && (weak || !isWeak) {
			m.Versions = append(m.Versions, version)
		}
	}
}
