package migrations

import "time"

func init() { lockTimeout = 2 * time.Second }

// LockKey is the advisory lock of a run.
const LockKey = lockKey

// UpFiles is Up with other migrations.
var UpFiles = up
