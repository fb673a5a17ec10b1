"""Lookups of users' rows and sums by user in plain jnp."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def look_up(user: jax.Array, cand_to_user: jax.Array) -> jax.Array:
    """Looks up each candidate's row of `user` [U, ...]: [B, ...]; indices are clamped."""
    index = jnp.clip(cand_to_user, 0, user.shape[0] - 1)
    return user.at[index].get(mode="promise_in_bounds")


def segment_sum(
    values: jax.Array, cand_to_user: jax.Array, users: int, *, is_sorted: bool = False
) -> jax.Array:
    """Sums each user's rows of `values` [B, ...]: [U, ...] f32, in the same order in every run.

    Indices are clamped. On a GPU, XLA's scatter adds in any order, so rows are sorted there and
    added in pairs.
    """
    if users == 1:
        return jnp.sum(values, axis=0, keepdims=True, dtype=jnp.float32)
    index = jnp.clip(cand_to_user, 0, users - 1)

    def scatter(values: jax.Array, index: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values.astype(jnp.float32), index, users)

    def in_pairs(values: jax.Array, index: jax.Array) -> jax.Array:
        if not is_sorted:
            order = jnp.argsort(index)
            values, index = values[order], index[order]
        return _sums_of_runs(values.astype(jnp.float32), index, users)

    return lax.platform_dependent(values, index, default=scatter, cuda=in_pairs, rocm=in_pairs)


def _sums_of_runs(values: jax.Array, index: jax.Array, users: int) -> jax.Array:
    """Sums by a sorted index: after step n, a row holds the sum of its user's last 2^n rows."""
    place = jnp.arange(index.shape[0], dtype=jnp.int32)

    def before(distance: jax.Array) -> jax.Array:
        return jnp.maximum(place - distance, 0)

    def has_earlier(distance: jax.Array) -> jax.Array:
        return (place >= distance) & (index[before(distance)] == index)

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        distance, sums = carry
        wanted = jnp.expand_dims(has_earlier(distance), tuple(range(1, sums.ndim)))
        earlier = jnp.where(wanted, sums[before(distance)], jnp.zeros_like(sums))
        return distance * 2, sums + earlier

    def is_left(carry: tuple[jax.Array, jax.Array]) -> Any:
        return jnp.any(has_earlier(carry[0]))

    _, sums = lax.while_loop(is_left, step, (jnp.int32(1), values))
    user = jnp.arange(users, dtype=jnp.int32)
    last = jnp.zeros_like(user).at[index].max(place)
    has_any = index[last] == user
    has_any = jnp.expand_dims(has_any, tuple(range(1, values.ndim)))
    return jnp.where(has_any, sums[last], jnp.zeros((), sums.dtype))
