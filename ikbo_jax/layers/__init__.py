"""Flax layers that hold parameters and call the ops: `nnx` and, with the same names, `linen`.

`functional` holds what they compute, for those who keep parameters in a pytree of their own.
"""
