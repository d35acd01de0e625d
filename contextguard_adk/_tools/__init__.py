"""The command line: `contextguard demo`, `check`, `replay` and `report`."""
