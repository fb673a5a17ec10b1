"""Joins the arrays of several problems of a `vmap`, and splits results again."""

import jax
import jax.numpy as jnp


def stack(size: int, array: jax.Array, is_batched: bool) -> jax.Array:
    """Gives `array` a leading axis of `size`; broadcasts it unless it is batched."""
    return array if is_batched else jnp.broadcast_to(array, (size, *array.shape))


def concatenate(size: int, array: jax.Array, is_batched: bool) -> jax.Array:
    """Joins the rows of `size` problems; each has a copy of what is not batched."""
    return stack(size, array, is_batched).reshape(-1, *array.shape[1 + is_batched :])


def unstack[R](size: int, results: R) -> R:
    """Splits results of a folded problem along a new leading axis of `size` problems."""
    return jax.tree.map(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]), results)
