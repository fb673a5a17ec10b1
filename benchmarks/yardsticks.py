"""Attention by other libraries; NotImplementedError says why one cannot run here."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ikbo_jax.models.strategies import move

#: Moves rows: all arrays of rows [rows, N, H] to sequences [batch, longest, N, H], or back.
Move = Callable[[jax.Array], jax.Array]
#: Returns a library's softmax attention, or raises NotImplementedError.
Library = Callable[[], Callable[..., jax.Array]]


def padding(offsets: jax.Array, total: int, longest: int) -> tuple[Move, Move]:
    """Makes functions that pad the sequences at `offsets` of `total` rows, and the reverse.

    Both are gathers, and so are their derivatives.
    """
    batch = offsets.size - 1
    column = jnp.arange(longest, dtype=jnp.int32)
    is_row = column[None] < (offsets[1:] - offsets[:-1])[:, None]
    # The row of every slot [batch · longest], and the slot of every row [total].
    number = jnp.arange(batch * longest, dtype=jnp.int32)
    rows = jnp.where(is_row, offsets[:-1, None] + column[None], 0).reshape(-1)
    # Slots without a row have different numbers, too: they are declared to be unique.
    rows = jnp.where(is_row.reshape(-1), rows, total + number)
    slots = jnp.full(total, batch * longest, jnp.int32)
    slots = slots.at[rows].set(number, unique_indices=True, mode="drop")

    def pad(x: jax.Array) -> jax.Array:
        return move(x, rows, slots, 0.0).reshape(batch, longest, *x.shape[1:])

    def unpad(x: jax.Array) -> jax.Array:
        return move(x.reshape(-1, *x.shape[2:]), slots, rows, 0.0)

    return pad, unpad


def cudnn() -> Callable[..., jax.Array]:
    """Returns `jax.nn.dot_product_attention` by cuDNN."""
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"cuDNN needs a GPU, but this is a {jax.default_backend()}")
    return functools.partial(jax.nn.dot_product_attention, implementation="cudnn")


def tokamax() -> Callable[..., jax.Array]:
    """Returns tokamax's attention for Hopper GPUs."""
    if importlib.util.find_spec("tokamax") is None:
        raise NotImplementedError("tokamax is not installed")
    if jax.default_backend() != "gpu":
        raise NotImplementedError(f"its kernel needs a GPU, not a {jax.default_backend()}")
    tokamax = importlib.import_module("tokamax")

    return functools.partial(tokamax.dot_product_attention, implementation="mosaic")
