"""The public ops: each checks, chooses an implementation, calls it, and has a gradient."""
