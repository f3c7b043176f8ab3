package pglock

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// maxName is how many bytes a name has at most: it stands in an index.
const maxName = 1024

// checkName refuses what can't be the name of a lease, a resource, a key or an
// owner, before any SQL. The schema's functions refuse the same.
func checkName(kind, name string) error {
	switch {
	case name == "":
		return fmt.Errorf("pglock: empty %s name", kind)
	case len(name) > maxName:
		return fmt.Errorf("pglock: %s name %q... is %d bytes long: it has at most %d, hash a longer one", kind, name[:40], len(name), maxName)
	case strings.ContainsRune(name, 0):
		return fmt.Errorf("pglock: %s name %q has a NUL: encode it", kind, name)
	case !utf8.ValidString(name):
		return fmt.Errorf("pglock: %s name %q is not UTF-8: encode it", kind, name)
	}
	return nil
}
