"""The inputs of the layers: their names and shapes, and checks of both."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.ops import arguments


class Input(NamedTuple):
    """Describes an input of a layer by the names of the layer's documentation.

    Attributes:
      layer: the layer's name.
      name: the argument's name.
      axes: the argument's shape, e.g. "[B, T, cand_features]".
      size: the axis whose size the parameters fix.
      letter: the letter of this axis in `linear_compression`; empty if it has none.
    """

    layer: str
    name: str
    axes: str
    size: str
    letter: str = ""

    def size_of(self, array: jax.Array) -> int:
        """Returns the size of axis `size`; raises ValueError if `array` has another rank."""
        axes = self.axes.strip("[]").split(", ")
        if not hasattr(array, "shape"):
            raise ValueError(
                f"{self.layer}: {self.name} must be an array of shape {self.axes}, but is "
                f"{arguments.describe(array)}"
            )
        if jnp.ndim(array) != len(axes):
            raise ValueError(
                f"{self.layer}: {self.name} must have shape {self.axes}, but has shape "
                f"{jnp.shape(array)}"
            )
        size: int = array.shape[axes.index(self.size)]
        return size

    def check(self, array: jax.Array, expected: int) -> None:
        """Raises ValueError, naming both sizes, unless axis `size` has the size `expected`."""
        size = self.size_of(array)
        if size != expected:
            wanted = f" ({self.letter}={expected})" if self.letter else ""
            found = f", {self.letter}={size}" if self.letter else ""
            raise ValueError(
                f"{self.layer} expects {self.size}={expected}{wanted}, "
                f"but {self.name} has shape {array.shape}{found}"
            )


E_USER = Input("LinearCompression", "e_user", "[U, user_rows, N]", "user_rows", "K")
E_CAND = Input("LinearCompression", "e_cand", "[B, cand_rows, N]", "cand_rows", "K")
X_CAND = Input("CandidateAttention", "x_cand", "[B, T, cand_features]", "cand_features")
X_USER = Input("CandidateAttention", "x_user", "[U, S, user_features]", "user_features")
PMA_X = Input("PMA", "x", "[total, in_features]", "in_features")
PFFN_X = Input("PFFN", "x", "[total, features]", "features")
PFFN_MEMORY = Input("PFFN", "memory", "[total_memory, memory_features]", "memory_features")
HSTU_X = Input("HSTU", "x", "[total, features]", "features")
