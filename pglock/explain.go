package pglock

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// SQLSTATEs that the schema's functions and triggers raise.
const (
	codeFenced      = "PW001" // a higher token was accepted
	codeLost        = "PW002" // the tenure has ended
	codeUnpresented = "PW004" // a protected table, and no lease was presented
	codeMismatch    = "PW005" // a protected table, and none of those matches
	codeCutOff      = "25P03" // idle_in_transaction_session_timeout, which Guard and Fence lower
)

// Explain turns the error with which a protected table refused a statement into
// this package's: a *FencedError (ErrFenced) if a later holder has been granted
// the lease that was presented, a *LostError (ErrLost) if it ended otherwise,
// and ErrUnpresented if no lease was presented, or none that matches the
// table's pattern. Any other error it returns as it is.
func Explain(err error) error {
	pg, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || errors.Is(err, ErrFenced) || errors.Is(err, ErrLost) {
		return err
	}
	switch pg.Code {
	case codeFenced:
		if pg.TableName == "" { // pglock.fence, called by hand
			_, name, _ := strings.Cut(pg.Message, `"`)
			return fenced(name[:max(0, strings.LastIndex(name, `"`))], pg, err)
		}
		return fenced(pg.SchemaName+"."+pg.TableName, pg, err)
	case codeLost:
		lost := &LostError{Cause: guardCause(pg.Detail), Err: err}
		if m := notHeld.FindStringSubmatch(pg.Message); m != nil {
			lost.Name = m[1]
			n, _ := strconv.ParseInt(m[2], 10, 64)
			lost.Token = Token(n)
		}
		return lost
	case codeUnpresented, codeMismatch:
		return fmt.Errorf("%w: %w. %s %s", ErrUnpresented, err, pg.Detail, pg.Hint)
	case codeCutOff:
		return fmt.Errorf("pglock: the transaction was idle for longer than the lease's TTL, and was cut off (SetHoldTimeout, first thing in it, sets another bound): %w", err)
	}
	return err
}

// notHeld finds the lease and the token in what guards and triggers say.
var notHeld = regexp.MustCompile(`(?s)lease "(.*)" with token (-?\d+) is not held$`)

// guardCause reads the first word of the server's detail.
func guardCause(detail string) Cause {
	switch word, _, _ := strings.Cut(detail, ":"); word {
	case "taken":
		return Taken
	case "idle":
		return ForceReleased
	}
	return Expired
}
