package pgserver

// UseWatchdog ties servers to this process by a watchdog, as it is done where
// the kernel does not do it.
func UseWatchdog() { useWatchdog = true }
