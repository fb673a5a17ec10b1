"""The dispatch table, which chooses the configuration of a kernel: `table`, `sm90.json`."""
