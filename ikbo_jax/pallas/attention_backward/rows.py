"""Query rows of the attention backward kernel: a user's rows side by side, and where each goes.

XLA computes this before and after the launch. A *row* of a key head is a query of one of its N / K
query heads; rows are numbered by candidate in user order, then by query, then by query head.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.pallas.attention_backward.context import USER_WORDS
from ikbo_jax.problems.attention_backward import BLOCK_KV
from ikbo_jax.problems.hopper import TILE_ROWS
from ikbo_jax.reference.attention import weight_exponents


class Rows(NamedTuple):
    """Where rows are.

    Attributes:
      order: [B] int32, candidates in user order; None if they are in user order already.
      users: [U, USER_WORDS] int32, the description of each user.
      parts: [U * splits, USER_WORDS] int32, the description of each part of a user's rows.
      targets: [B, T, N / K] int32, rows in the kernel's `d_query` for candidates in their order.
      kv_tiles: [B] int32, tiles of keys of each candidate's user.
      is_valid: bool, whether candidates are in user order, as the caller says; None if they were
        put there. If they are not, a user's rows are other users' queries: statistics and d_query
        are NaN then, and the kernel passes NaN on to the gradients of keys and values.
    """

    order: jax.Array | None
    users: jax.Array
    parts: jax.Array
    targets: jax.Array
    kv_tiles: jax.Array
    is_valid: jax.Array | None


def most_blocks(batch: int, users: int, rows_per_candidate: int, block_q: int) -> int:
    """The largest number of query blocks of any index: every user may have a partial block."""
    return batch * rows_per_candidate // block_q + min(batch, users)


def make_rows(
    cand_to_user: jax.Array,
    lengths: jax.Array | None,
    *,
    users: int,
    kv_len: int,
    q_len: int,
    group: int,
    block_q: int,
    splits: int,
    is_sorted: bool,
) -> Rows:
    """Numbers the rows.

    Args:
      cand_to_user: [B] int32; clamped to [0, users).
      lengths: [U] int32, clamped to [0, kv_len], or None for kv_len.
      users: U.
      kv_len: S.
      q_len: T.
      group: N / K.
      block_q: query rows of a block.
      splits: parts of a user's rows.
      is_sorted: whether `cand_to_user` never decreases.
    """
    (batch,) = cand_to_user.shape
    index = jnp.clip(cand_to_user, 0, users - 1)
    counts = jnp.zeros((users,), jnp.int32).at[index].add(1)
    per_candidate = q_len * group
    rows = counts * per_candidate
    first_candidate = jnp.cumsum(counts, dtype=jnp.int32) - counts
    blocks = -(-rows // block_q)
    first_target = (jnp.cumsum(blocks, dtype=jnp.int32) - blocks) * block_q
    keys = jnp.full((users,), kv_len, jnp.int32)
    if lengths is not None:
        keys = jnp.clip(lengths.astype(jnp.int32), 0, kv_len)
    words = (first_candidate * per_candidate, rows, first_target, keys)
    # All parts but a user's last ones have whole blocks.
    part_rows = -(-blocks // splits) * block_q
    begin = part_rows[:, None] * jnp.arange(splits, dtype=jnp.int32)[None]
    part_words = (
        words[0][:, None] + begin,
        jnp.clip(rows[:, None] - begin, 0, part_rows[:, None]),
        first_target[:, None] + begin,
        jnp.broadcast_to(keys[:, None], begin.shape),
    )
    position, order, is_valid = jnp.arange(batch, dtype=jnp.int32), None, None
    if is_sorted:
        is_valid = jnp.all(index[1:] >= index[:-1])
    else:
        order = jnp.argsort(index, stable=True).astype(jnp.int32)
        position = jnp.zeros_like(position).at[order].set(position, unique_indices=True)
    first = first_target[index] + (position - first_candidate[index]) * per_candidate
    within = jnp.arange(per_candidate, dtype=jnp.int32).reshape(q_len, group)
    kv_tiles = -(-keys // BLOCK_KV)
    assert len(words) == USER_WORDS
    targets = first[:, None, None] + within[None]
    parts = jnp.stack(part_words, axis=2).reshape(users * splits, USER_WORDS)
    return Rows(order, jnp.stack(words, axis=1), parts, targets, kv_tiles[index], is_valid)


def pack(array: jax.Array, order: jax.Array | None, kv_heads: int) -> jax.Array:
    """[B, T, N, H] as rows [B * T * N / K, K, H]."""
    batch, q_len, q_heads, width = array.shape
    if order is not None:
        array = array[order]
    if q_heads != kv_heads:
        array = array.reshape(batch, q_len, kv_heads, -1, width).swapaxes(2, 3)
    return array.reshape(-1, kv_heads, width)


def unpack(rows: jax.Array, order: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `pack`, for an array of `shape` [B, T, N, H]."""
    batch, q_len, q_heads, width = shape
    kv_heads = rows.shape[1]
    array = rows.reshape(batch, q_len, -1, kv_heads, width)
    if q_heads != kv_heads:
        array = array.swapaxes(2, 3)
    array = array.reshape(shape)
    if order is None:
        return array
    position = jnp.zeros_like(order).at[order].set(jnp.arange(batch, dtype=order.dtype))
    return array[position]


def _nan_unless(is_valid: jax.Array | None, array: jax.Array) -> jax.Array:
    return array if is_valid is None else jnp.where(is_valid, array, jnp.nan)


def statistics(
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    d_lse: jax.Array | None,
    rows: Rows,
    kv_heads: int,
    count: int,
) -> jax.Array:
    """[K, 2, count + 128] f32: lse in powers of 2, and delta, at the rows' targets.

    Targets of a user begin with a block, so TMA copies blocks that begin at whole 64 bytes and end
    inside of the array. A copy that began at an array's last value, 12 bytes after whole 16 bytes,
    ended with an illegal instruction on an H200. At rows of no query, lse is infinite.

    With P = exp(scores - lse), the gradient of a score is P * (d_out @ value.T - delta), where
    delta = sum(d_out * out) - d_lse. Rows without keys get an lse of infinity, hence P = 0.
    """
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    if d_lse is not None:
        delta = delta - d_lse
    both = jnp.stack((weight_exponents(lse), jnp.where(lse == -jnp.inf, 0.0, delta)))
    batch, q_len, group = rows.targets.shape
    both = jnp.moveaxis(both.reshape(2, batch, q_len, kv_heads, group), 3, 0)
    absent = jnp.asarray([jnp.inf, 0.0], jnp.float32)[None, :, None]
    found = jnp.broadcast_to(absent, (kv_heads, 2, count + TILE_ROWS))
    found = found.at[:, :, rows.targets].set(both, unique_indices=True)
    return _nan_unless(rows.is_valid, found)


def unpack_d_query(
    sums: jax.Array, rows: Rows, kv_heads: int, scale: float, dtype: jnp.dtype
) -> jax.Array:
    """[B, T, N, H], from the kernel's `d_query` [planes, rows, H]; adds the planes of a key head.

    Planes of tiles that a user does not have, and rows of no query, are arbitrary.
    """
    planes, _, width = sums.shape
    batch, q_len, group = rows.targets.shape
    tiles = planes // kv_heads
    parts = sums.reshape(tiles, kv_heads, -1, width)[:, :, rows.targets]
    tile = jnp.arange(tiles, dtype=jnp.int32)
    exists = tile[:, None] < rows.kv_tiles[None]  # one plane holds the sum of all tiles
    parts = jnp.where(exists[:, None, :, None, None, None], parts, 0.0)
    total = (jnp.sum(parts, axis=0) * jnp.float32(scale)).astype(dtype)
    total = _nan_unless(rows.is_valid, total)
    return jnp.moveaxis(total, 0, 2).reshape(batch, q_len, kv_heads * group, width)


def query_tiles(users: jax.Array, total: int) -> tuple[jax.Array, jax.Array]:
    """Tiles of at most 128 rows of one user, for the launch that computes d_query alone.

    Args:
      users: `Rows.users`.
      total: rows of all users.

    Returns:
      [most tiles, 5] int32: first row, number of rows, user, number of its keys, and the first
      row's target; and the number of tiles [1] int32. Entries past that number are no tiles.
    """
    first_row, rows, target, keys = (users[:, i] for i in range(USER_WORDS))
    counts = -(-rows // TILE_ROWS)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    number = jnp.arange(total // TILE_ROWS + min(len(users), total), dtype=jnp.int32)
    # Newer versions of JAX do not lower `jnp.searchsorted` inside of `sharded.device_p`.
    user = jnp.sum(ends[None] <= number[:, None], axis=1, dtype=jnp.int32)
    user = jnp.minimum(user, len(users) - 1)
    start = (number - (ends - counts)[user]) * TILE_ROWS
    words = (
        first_row[user] + start,
        jnp.clip(rows[user] - start, 0, TILE_ROWS),
        user,
        keys[user],
        target[user] + start,
    )
    return jnp.stack(words, axis=1), ends[-1:]
