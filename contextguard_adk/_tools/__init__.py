"""The command line: `contextguard check`, `demo` and `replay`."""
