"""Flax layers that hold parameters and call the ops: `nnx` and `linen`, with the same names.

`functional` holds the same layers as functions, for models that keep parameters in a plain pytree.
"""
