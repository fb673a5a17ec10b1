"""Layers that hold parameters and call the ops: `nnx`, `linen` and `keras`, with the same names.

`functional` holds the same layers as functions, for models that keep parameters in a plain pytree;
`hstu_layer` is the one for HSTU. `attention_fn` makes Flax's own attention layers call the op.
"""

from ikbo_jax.layers.functional import attention_fn
from ikbo_jax.layers.hstu import HstuCache, hstu_layer

__all__ = ["HstuCache", "attention_fn", "hstu_layer"]
