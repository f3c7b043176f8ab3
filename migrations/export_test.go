package migrations

// LockKey is the advisory lock of a run.
const LockKey = lockKey

// UpFiles is Up with other migrations.
var UpFiles = up
