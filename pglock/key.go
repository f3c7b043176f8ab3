package pglock

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
)

// Key is what an advisory lock is taken on: a number that every client of one
// database understands alike. Keys of different databases never meet. The zero
// Key is invalid; make one with KeyOf, KeyInt64 or KeyPair. Keys are comparable.
//
// A Key is exclusive unless made Shared.
type Key struct {
	space  space
	number int64
	hashed bool   // by KeyOf
	name   string // what KeyOf was given
	shared bool
}

// space tells PostgreSQL's two spaces of advisory keys apart, which never
// collide. Its value is objsubid in pg_locks; 0 is the zero Key's.
type space uint8

const (
	spaceInt64 space = 1
	spacePair  space = 2
)

// namespace comes before every name in the hash, closed by the one byte that no
// name can hold: no name in this namespace is another one in a later namespace.
const namespace = "pglock/v1\x00"

// KeyOf returns the key of a name, for example "accounts/42": the first 64 bits
// of the SHA-256 of "pglock/v1", a zero byte and the name in UTF-8, read as a
// big-endian signed integer. Of a million names two share a key with a
// probability of 1 in 37 million. PostgreSQL computes the same:
//
//	SELECT ('x' || encode(substr(sha256('pglock/v1\000'::bytea || convert_to($1, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint
//
// which is pglock.advisory_key($1) where the schema is installed; nothing here
// needs it. And so does a shell, in hexadecimal:
//
//	printf 'pglock/v1\0%s' "$1" | sha256sum | head -c 16
//
// A name that is empty, longer than 1,024 bytes, not UTF-8 or has a zero byte
// in it makes a key that every function refuses before any SQL.
func KeyOf(name string) Key {
	sum := sha256.Sum256([]byte(namespace + name))
	return Key{space: spaceInt64, number: int64(binary.BigEndian.Uint64(sum[:])), hashed: true, name: name}
}

// KeyInt64 returns the key that PostgreSQL's pg_advisory_lock(bigint) takes, to
// share locks with code that chose its own numbers.
func KeyInt64(n int64) Key { return Key{space: spaceInt64, number: n} }

// KeyPair returns the key that PostgreSQL's pg_advisory_lock(int, int) takes.
// No pair is the same key as any KeyInt64 or KeyOf.
func KeyPair(a, b int32) Key {
	return Key{space: spacePair, number: int64(a)<<32 | int64(uint32(b))}
}

// Shared returns the same key to be locked in shared mode: any number may hold
// it at once, and none while somebody holds it exclusively.
func (k Key) Shared() Key {
	k.shared = true
	return k
}

// Int64 returns the number: what pg_advisory_lock(bigint) takes, and what
// pg_locks shows in two halves, the upper one in classid and the lower one in
// objid. Of a KeyPair it returns both numbers, the first in the upper half.
func (k Key) Int64() int64 { return k.number }

// String returns the name or the number, for people to read.
func (k Key) String() string {
	var s string
	switch {
	case k.hashed:
		s = k.name
	case k.space == spaceInt64:
		s = strconv.FormatInt(k.number, 10)
	case k.space == spacePair:
		a, b := k.halves()
		s = fmt.Sprintf("(%d, %d)", int32(a), int32(b))
	default:
		return "invalid key"
	}
	if k.shared {
		s += " (shared)"
	}
	return s
}

func (k Key) check() error {
	if k.space == 0 {
		return errors.New("pglock: the zero Key: make one with KeyOf, KeyInt64 or KeyPair")
	}
	if k.hashed {
		return checkName("key", k.name)
	}
	return nil
}

// call returns a SELECT of one of PostgreSQL's advisory lock functions, whose
// names all come in the same four forms. The casts are for pgx's simple
// protocol, where the lowest bigint would be read as a numeric.
func (k Key) call(function string) (sql string, args []any) {
	if k.shared {
		function += "_shared"
	}
	high, low := k.halves()
	if k.space == spacePair {
		return "SELECT " + function + "($1::int, $2::int)", []any{int32(high), int32(low)}
	}
	return "SELECT " + function + "($1::bigint)", []any{k.number}
}

// halves returns the key as pg_locks shows it, in classid and objid.
func (k Key) halves() (classid, objid uint32) {
	return uint32(uint64(k.number) >> 32), uint32(uint64(k.number))
}

// lockID is what the server tells keys apart by, whatever they are called.
type lockID struct {
	space  space
	number int64
}

func (k Key) id() lockID { return lockID{k.space, k.number} }

// place returns the key as arguments for what asks pg_locks.
func (k Key) place() []any {
	classid, objid := k.halves()
	return []any{int64(classid), int64(objid), int32(k.space)}
}

// what returns the key as an error calls it.
func (k Key) what() string { return fmt.Sprintf("advisory lock %q", k) }

// keyInLocks returns the key that pg_locks shows.
func keyInLocks(objsubid int16, classid, objid uint32, shared bool) Key {
	return Key{space: space(objsubid), number: int64(uint64(classid)<<32 | uint64(objid)), shared: shared}
}

// inOrder checks keys and returns them sorted by value, each once and in the
// stronger of the modes asked for, so that two callers never wait for each
// other. A key asked for in both modes is taken exclusively at once: to raise a
// shared lock later deadlocks with whoever does the same.
func inOrder(keys []Key) ([]Key, error) {
	for _, k := range keys {
		if err := k.check(); err != nil {
			return nil, err
		}
	}
	sorted := slices.SortedFunc(slices.Values(keys), func(a, b Key) int {
		return cmp.Or(cmp.Compare(a.space, b.space), cmp.Compare(a.number, b.number), shareds(a)-shareds(b))
	})
	return slices.CompactFunc(sorted, func(a, b Key) bool { return a.space == b.space && a.number == b.number }), nil
}

func shareds(k Key) int {
	if k.shared {
		return 1
	}
	return 0
}
