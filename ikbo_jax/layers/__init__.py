"""Flax layers that hold parameters and call the ops: `nnx` and `linen`, with the same names.

`functional` holds the same layers as functions, for models that keep parameters in a plain pytree;
`hstu_layer` is the one for HSTU.
"""

from ikbo_jax.layers.hstu import HstuCache, hstu_layer

__all__ = ["HstuCache", "hstu_layer"]
