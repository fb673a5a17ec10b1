"""Joins the arrays of several problems of a `vmap`, and splits results again."""

from typing import Any

import jax
import jax.numpy as jnp


def stack(size: int, array: jax.Array, is_batched: bool) -> jax.Array:
    """Gives `array` a leading axis of `size`; broadcasts it unless it is batched."""
    return array if is_batched else jnp.broadcast_to(array, (size, *array.shape))


def concatenate[A: (jax.Array, jax.Array | None)](size: int, array: A, is_batched: Any) -> A:
    """Joins the rows of `size` problems; each has a copy of what is not batched. None stays."""
    if array is None:
        return array
    return stack(size, array, bool(is_batched)).reshape(-1, *array.shape[1 + is_batched :])


def own_index(size: int, index: jax.Array, is_batched: bool, rows: int) -> jax.Array:
    """Joins the indices of `size` problems, each of which has `rows` rows of its own."""
    # Clamp before the offset is added: an index outside one problem's rows would otherwise point to
    # rows of another problem.
    inside = jnp.clip(stack(size, index, is_batched), 0, rows - 1)
    return (inside + jnp.arange(size, dtype=jnp.int32)[:, None] * rows).reshape(-1)


def unstack[R](size: int, results: R) -> R:
    """Splits results of a folded problem along a new leading axis of `size` problems."""
    return jax.tree.map(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]), results)
