package optimistic

import (
	"fmt"
	"reflect"
)

// A Key is the key of a row in a table whose key has several columns, in the
// order that WithKey names them:
//
//	lines := optimistic.NewTable[Line]("order_lines", optimistic.WithKey("order_id", "line"))
//	row, err := lines.Get(ctx, pool, optimistic.Key{17, 3})
type Key []any

// args is the key as the first parameters of a statement.
func (s *statements) args(key any) []any {
	if parts, ok := key.(Key); ok {
		return append(make([]any, 0, len(parts)+8), parts...)
	}
	return append(make([]any, 0, 8), key)
}

// checkKey refuses a key that can't be one of this table, before any SQL.
func (s *statements) checkKey(key any) error {
	parts, composite := key.(Key)
	if !composite {
		parts = Key{key}
	}
	switch {
	case !composite && len(s.keys) > 1:
		return fmt.Errorf("key %v is a %T: the key columns are %s, so pass an optimistic.Key with a value for each", key, key, quoteAll(s.keys))
	case len(parts) != len(s.keys):
		return fmt.Errorf("key %v has %d parts, the key columns are %s", key, len(parts), quoteAll(s.keys))
	}
	for i, part := range parts {
		if v := reflect.ValueOf(part); v.IsValid() && (v.Kind() != reflect.Pointer || !v.IsNil()) {
			continue
		}
		if composite {
			return fmt.Errorf("part %d of the key, %s, is nil (%T), which equals no key", i+1, quote(s.keys[i]), part)
		}
		return fmt.Errorf("key is nil (%T), which equals no key", key)
	}
	return nil
}
