"""Weights of linear compression whose rows are padded once, instead of in every call."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from ikbo_jax.ops import arguments
from ikbo_jax.problems.packed_compression import WEIGHT_ALIGNMENT


@dataclasses.dataclass(frozen=True)
class PaddedWeight:
    """A weight [M, K] whose rows are padded with zeros, as the kernel reads them; by `pad_weight`.

    A pytree with the one leaf `rows`. Its gradient is a `PaddedWeight`, too, whose padding is zero:
    an optimiser that leaves a parameter of 0 with a gradient of 0 as it is leaves the padding zero.
    The padding must stay finite, and only zeros are the same on every path.

    Attributes:
      rows: [M, columns], K or more columns.
      k: K.
    """

    rows: jax.Array
    k: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.shape[0], self.k

    @property
    def ndim(self) -> int:
        return 2

    @property
    def dtype(self) -> Any:
        return self.rows.dtype

    @property
    def weight(self) -> jax.Array:
        """The weight [M, K], without padding."""
        return self.rows[:, : self.k]

    def astype(self, dtype: Any) -> PaddedWeight:
        """Converts the weight to another dtype."""
        if jnp.dtype(dtype) == self.dtype:
            return self
        return pad_weight(self.weight.astype(dtype))


# Unflattening checks nothing, since JAX puts other things than arrays in the leaf's place.
jax.tree_util.register_dataclass(PaddedWeight, data_fields=["rows"], meta_fields=["k"])
jax.export.register_pytree_node_serialization(
    PaddedWeight,
    serialized_name="ikbo_jax.PaddedWeight",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)


def pad_weight(weight: jax.Array | PaddedWeight) -> PaddedWeight:
    """Pads the rows of a weight of linear compression to multiples of 128 bytes.

    Tensor Memory Access reads no rows of, say, K = 866 bfloat16 values, so the kernel of
    `linear_compression` and `multilevel_linear_compression` copies such weights in every call. Both
    functions take a `PaddedWeight` in place of a weight and return the same bits:

        layer = {name: ikbo_jax.pad_weight(w) for name, w in layer.items()}  # once

    Args:
      weight: [M, K], bfloat16, float16 or float32; a `PaddedWeight` is returned as it is.

    Raises:
      ValueError: the weight has another rank or dtype, or no values.
    """
    if isinstance(weight, PaddedWeight):
        return weight
    arguments.check_array("weight", weight, "[M, K]")
    arguments.check_runnable("pad_weight", weight)
    k, multiple = weight.shape[1], WEIGHT_ALIGNMENT // weight.dtype.itemsize
    return PaddedWeight(pad_columns(weight, -(-k // multiple) * multiple), k)


def pad_columns(weight: jax.Array, columns: int) -> jax.Array:
    """Adds columns of zeros to a matrix."""
    missing = columns - weight.shape[1]
    return jnp.pad(weight, ((0, 0), (0, missing))) if missing else weight
