package main

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// version says which program this is and which schema belongs to it.
func version() string {
	program := "(devel)"
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		program = info.Main.Version
	}
	return fmt.Sprintf("%s, schema %d, %s", program, newestMigration(), runtime.Version())
}
