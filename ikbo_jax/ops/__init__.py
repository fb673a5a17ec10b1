"""The public ops: each checks its arguments, chooses an implementation and defines a gradient."""
