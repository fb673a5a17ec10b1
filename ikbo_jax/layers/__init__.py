"""Flax layers that hold parameters and call the ops: `nnx` and, with the same names, `linen`."""
