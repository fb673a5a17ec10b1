"""Finds where users begin and end, and cuts tiles for the attention kernel, by XLA.

Comparing all pairs takes XLA one small kernel. A prefix sum takes a dozen kernels of 1 to 2 us
each, beside attention kernels of 50 to 800 us.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ikbo_jax.problems.hopper import NUM_CONSUMERS

#: Most warpgroup tiles that are cut: their pairs are all compared.
MAX_CUT = 4096
#: Largest number of pairs of a candidate and a user that are compared: one small kernel instead of
#: six of a few microseconds each, which matters to small problems.
MAX_COMPARED = 2**25


def starts(user: jax.Array, users: int) -> jax.Array:
    """Computes where users begin in the order of users, [users + 1] int32; the last entry is B."""
    if user.shape[0] * users <= MAX_COMPARED:
        number = jnp.arange(users + 1, dtype=jnp.int32)
        return jnp.sum(user[None] < number[:, None], axis=1, dtype=jnp.int32)
    counts = jnp.zeros(users, jnp.int32).at[user].add(1)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])


def run_ends(users: jax.Array) -> jax.Array:
    """Computes the end of each candidate's run of consecutive candidates of one user, [B]."""
    batch = users.shape[0]
    position = jnp.arange(1, batch + 1, dtype=jnp.int32)
    is_last = jnp.concatenate([users[1:] != users[:-1], jnp.ones((1,), bool)])
    return lax.cummin(jnp.where(is_last, position, batch), reverse=True)


def cuts(users: jax.Array, tiles_each: int) -> tuple[jax.Array, jax.Array]:
    """Groups R = B * tiles_each warpgroup tiles of 64 rows in twos, never across `users`.

    Returns [R + 1] int32: the first warpgroup tile of group i, R past the last group; and [R]
    int32: the number of groups that begin at or before each warpgroup tile.
    """
    tiles = users.shape[0] * tiles_each
    tile = jnp.arange(tiles, dtype=jnp.int32)
    of_tile = jnp.repeat(users, tiles_each)
    is_new = jnp.concatenate([jnp.ones((1,), bool), of_tile[1:] != of_tile[:-1]])
    begins = is_new | (tile % NUM_CONSUMERS == 0)
    counts = jnp.sum(begins[None] & (tile[None] <= tile[:, None]), axis=1, dtype=jnp.int32)
    pair = jnp.arange(tiles + 1, dtype=jnp.int32)
    return jnp.sum(counts[None] <= pair[:, None], axis=1, dtype=jnp.int32), counts
