"""Query rows of the attention backward kernel: a user's rows side by side, and where each goes.

XLA computes this before and after the launch: in few kernels, since each takes 2 us beside launches
of 10 us for a small problem, and by comparing all pairs where there are few. A *row* of a key head
is a query of one of its N / K query heads; rows are numbered by candidate in user order, then by
query, then by query head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.pallas.attention_backward.context import USER_WORDS
from ikbo_jax.pallas.attention_backward.statistics import Inputs, statistics_kernel
from ikbo_jax.pallas.flash import work_order
from ikbo_jax.problems.attention_backward import BLOCK_KV
from ikbo_jax.problems.hopper import TILE_ROWS
from ikbo_jax.reference.attention import weight_exponents

#: Most pairs of users that are compared to add up their blocks or tiles.
MAX_PAIRS = 2048**2


class Rows(NamedTuple):
    """Where rows are.

    Attributes:
      order: [B] int32, candidates in user order; None if they are in user order already.
      position: [B] int32, the inverse of `order`; likewise.
      users: [U, USER_WORDS] int32, the description of each user.
      parts: [U * splits, USER_WORDS] int32, the description of each part of a user's rows.
      targets: [B, T, N / K] int32, rows in the kernel's `d_query` for candidates in their order.
      kv_tiles: [B] int32, tiles of keys of each candidate's user.
      is_valid: bool, whether candidates are in user order, as the caller says; None if they were
        put there. If they are not, a user's rows are other users' queries: statistics and d_query
        are NaN then, and the kernel passes NaN on to the gradients of keys and values.
    """

    order: jax.Array | None
    position: jax.Array | None
    users: jax.Array
    parts: jax.Array
    targets: jax.Array
    kv_tiles: jax.Array
    is_valid: jax.Array | None


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
    starts = work_order.starts(index, users)
    first_candidate, counts = starts[:-1], starts[1:] - starts[:-1]
    per_candidate = q_len * group
    rows = counts * per_candidate
    blocks = -(-rows // block_q)
    first_target = sums_before(blocks) * block_q
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
    number = jnp.arange(batch, dtype=jnp.int32)
    order, position, is_valid = None, None, None
    if is_sorted:
        is_valid = jnp.all(index[1:] >= index[:-1])
    else:
        order = work_order.by_user(index)
        position = jnp.zeros_like(number).at[order].set(number, unique_indices=True)
    place = number if position is None else position
    first = first_target[index] + (place - first_candidate[index]) * per_candidate
    within = jnp.arange(per_candidate, dtype=jnp.int32).reshape(q_len, group)
    kv_tiles = -(-keys // BLOCK_KV)
    assert len(words) == USER_WORDS
    targets = first[:, None, None] + within[None]
    parts = jnp.stack(part_words, axis=2).reshape(users * splits, USER_WORDS)
    described = jnp.stack(words, axis=1)
    return Rows(order, position, described, parts, targets, kv_tiles[index], is_valid)


def sums_before(values: jax.Array) -> jax.Array:
    """For every element of `values` [n] int32 the sum of those before it."""
    if values.size**2 > MAX_PAIRS:
        return jnp.cumsum(values, dtype=jnp.int32) - values
    number = jnp.arange(values.size, dtype=jnp.int32)
    is_before = number[None] < number[:, None]
    return jnp.sum(jnp.where(is_before, values[None], 0), axis=1, dtype=jnp.int32)


def pack(array: jax.Array, order: jax.Array | None, kv_heads: int) -> jax.Array:
    """[B, T, N, H] as rows [B * T * N / K, K, H]."""
    batch, q_len, q_heads, width = array.shape
    if order is not None:
        array = array[order]
    if q_heads != kv_heads:
        array = array.reshape(batch, q_len, kv_heads, -1, width).swapaxes(2, 3)
    return array.reshape(-1, kv_heads, width)


def unpack(rows: jax.Array, position: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `pack`, for an array of `shape` [B, T, N, H]."""
    batch, q_len, q_heads, width = shape
    kv_heads = rows.shape[1]
    array = rows.reshape(batch, q_len, -1, kv_heads, width)
    if q_heads != kv_heads:
        array = array.swapaxes(2, 3)
    array = array.reshape(shape)
    return array if position is None else array[position]


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
    *,
    interpret: Any = False,
) -> jax.Array:
    """[K, 2, count + 128] f32: lse in powers of 2, and delta, at the rows' targets.

    Targets of a user begin with a block, so TMA copies blocks that begin at whole 64 bytes and end
    inside of the array. A copy that began at an array's last value, 12 bytes after whole 16 bytes,
    ended with an illegal instruction on an H200. Numbers at rows of no query are arbitrary.

    With P = exp(scores - lse), the gradient of a score is P * (d_out @ value.T - delta), where
    delta = sum(d_out * out) - d_lse. Rows without keys get an lse of infinity, hence P = 0.
    """
    if not interpret:
        poison = (
            None if rows.is_valid is None else _nan_unless(rows.is_valid, jnp.zeros(1, jnp.float32))
        )
        width = out.shape[-1]
        inputs = Inputs(
            out.reshape(-1, width),
            d_out.reshape(-1, width),
            lse.reshape(-1),
            None if d_lse is None else d_lse.reshape(-1),
            rows.targets.reshape(-1),
            poison,
        )
        group = rows.targets.shape[-1]
        return statistics_kernel(inputs, kv_heads=kv_heads, group=group, count=count + TILE_ROWS)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    if d_lse is not None:
        delta = delta - d_lse
    both = jnp.stack((weight_exponents(lse), jnp.where(lse == -jnp.inf, 0.0, delta)))
    batch, q_len, group = rows.targets.shape
    both = jnp.moveaxis(both.reshape(2, batch, q_len, kv_heads, group), 3, 0)
    # NaN enters the operands of the scatter: to select in its result would take another kernel.
    absent, both = (
        _nan_unless(rows.is_valid, x) for x in (jnp.asarray([jnp.inf, 0.0], jnp.float32), both)
    )
    found = jnp.broadcast_to(absent[None, :, None], (kv_heads, 2, count + TILE_ROWS))
    return found.at[:, :, rows.targets].set(both, unique_indices=True)


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


def gradient_type(
    shape: tuple[int, ...], own_dtype: Any, splits: int, dtype: Any
) -> jax.ShapeDtypeStruct:
    """What a launch fills with a gradient [U, S, K, H] of keys or values, in `dtype` or f32.

    Threads store f32, to rows of all parts; TMA stores `own_dtype`, the dtype of the keys, and
    drops rows past S.
    """
    if dtype == own_dtype and splits == 1:
        return jax.ShapeDtypeStruct(shape, own_dtype)
    users, kv_len, *widths = shape
    return jax.ShapeDtypeStruct((users * splits * kv_len, *widths), jnp.float32)


def add_parts(sums: jax.Array, shape: tuple[int, ...], splits: int, dtype: Any) -> jax.Array:
    """The gradient of `shape` [U, S, K, H] from what a launch filled: the sum of a user's parts."""
    if splits > 1:
        sums = jnp.sum(sums.reshape(shape[0], splits, *shape[1:]), axis=1)
    return sums.reshape(shape).astype(dtype)


def query_tiles(users: jax.Array, total: int, height: int = TILE_ROWS) -> jax.Array:
    """Tiles of at most `height` rows of one user, for a launch that computes d_query alone.

    Args:
      users: `Rows.users`.
      total: rows of all users.
      height: rows of a whole tile.

    Returns:
      [most tiles + 1, 5] int32: first row, number of rows, user, number of its keys, and the first
      row's target. The last entry begins with the number of tiles; entries between these are no
      tiles.
    """
    first_row, rows, target, keys = (users[:, i] for i in range(USER_WORDS))
    counts = -(-rows // height)
    ends = sums_before(counts) + counts
    most = total // height + min(len(users), total)
    number = jnp.arange(most + 1, dtype=jnp.int32)
    # Newer versions of JAX do not lower `jnp.searchsorted` inside of `sharded.device_p`.
    user = jnp.sum(ends[None] <= number[:, None], axis=1, dtype=jnp.int32)
    user = jnp.minimum(user, len(users) - 1)
    start = (number - (ends - counts)[user]) * height
    words = (
        # In the same array, since a kernel that made another one would take 2 us.
        jnp.where(number < most, first_row[user] + start, ends[-1]),
        jnp.clip(rows[user] - start, 0, height),
        user,
        keys[user],
        target[user] + start,
    )
    return jnp.stack(words, axis=1)
