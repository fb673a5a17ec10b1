"""The order in which candidates are worked on, and where it is cut: [B] int32 arrays, made by XLA.

Counting all against all takes XLA one small kernel and no memory.  A sort or a prefix sum takes a
dozen, of 1 to 2 microseconds each, beside attention kernels of 50 to 800.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from ikbo_jax.tuning.configs import NUM_CONSUMERS

#: Longest array that is counted all against all.
MAX_COUNTED = 4096


def by_user(users: jax.Array) -> jax.Array:
    """The permutation that sorts `users` [B] int32, stable: that of `jnp.argsort`."""
    batch = users.shape[0]
    if batch > MAX_COUNTED:
        return jnp.argsort(users).astype(jnp.int32)
    place = jnp.arange(batch, dtype=jnp.int32)
    is_before = (users[None] < users[:, None]) | (
        (users[None] == users[:, None]) & (place[None] < place[:, None])
    )
    rank = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    # Its inverse: one number a row is not zero.
    return jnp.sum(jnp.where(rank[None] == place[:, None], place[None], 0), axis=1, dtype=jnp.int32)


def run_ends(users: jax.Array) -> jax.Array:
    """[B] int32: for every candidate, the position past the last of its run of equal users."""
    batch = users.shape[0]
    position = jnp.arange(1, batch + 1, dtype=jnp.int32)
    is_last = jnp.concatenate([users[1:] != users[:-1], jnp.ones((1,), bool)])
    return lax.cummin(jnp.where(is_last, position, batch), reverse=True)


def cuts(users: jax.Array, tiles_each: int) -> tuple[jax.Array, jax.Array]:
    """Cuts R = B * tiles_each warpgroup tiles into pairs, and between two users.

    Args:
      users: [B] int32, in work order.
      tiles_each: warpgroup tiles of a candidate.

    Returns:
      [R + 1] int32: the warpgroup tile where pair i begins, R past the last; [R] int32: pairs that
      begin at or before a warpgroup tile.
    """
    tiles = users.shape[0] * tiles_each
    tile = jnp.arange(tiles, dtype=jnp.int32)
    of_tile = jnp.repeat(users, tiles_each)
    is_new = jnp.concatenate([jnp.ones((1,), bool), of_tile[1:] != of_tile[:-1]])
    begins = is_new | (tile % NUM_CONSUMERS == 0)
    counts = jnp.sum(begins[None] & (tile[None] <= tile[:, None]), axis=1, dtype=jnp.int32)
    pair = jnp.arange(tiles + 1, dtype=jnp.int32)
    return jnp.sum(counts[None] <= pair[:, None], axis=1, dtype=jnp.int32), counts
