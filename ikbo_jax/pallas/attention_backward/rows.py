"""Query rows of the attention backward kernel: a user's rows side by side, and where each goes.

A *row* of a key head is a query of one of its N / K query heads; rows are numbered by candidate in
user order, then by query, then by query head. Small problems are numbered by a launch (`numbering`,
or `statistics`), large ones by XLA: in few kernels, and by comparing all pairs where there are few.
`flash.counted_order` puts candidates into order that are too many for that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.pallas.attention_backward import numbering
from ikbo_jax.pallas.attention_backward import statistics as statistics_launch
from ikbo_jax.pallas.attention_backward.context import TILE_WORDS, USER_WORDS
from ikbo_jax.pallas.attention_backward.numbering import Sizes
from ikbo_jax.pallas.attention_backward.statistics import Inputs, Packed
from ikbo_jax.pallas.flash import counted_order, work_order
from ikbo_jax.problems.attention_backward import BLOCK_KV
from ikbo_jax.problems.hopper import TILE_ROWS
from ikbo_jax.reference.attention import weight_exponents

#: Most pairs of users that are compared to add up their blocks or tiles.
MAX_PAIRS = 2048**2


class Rows(NamedTuple):
    """Where rows are.

    Attributes:
      cand_to_user: [B] int32, the user of each candidate; clamped to [0, users) by its readers.
      order: [B] int32, candidates in user order; None if they are in user order already.
      position: [B] int32, the inverse of `order`; likewise.
      users: [U, USER_WORDS] int32, the description of each user.
      parts: [U * splits, USER_WORDS] int32, the description of each part of a user's rows.
      tiles: [most tiles + 1, TILE_WORDS] int32: first row, number of rows, user, number of its
        keys, and the first row's target, of tiles of at most `Sizes.tile_rows` rows of one user.
        The last entry begins with the number of tiles; entries between these are no tiles. None if
        no launch takes tiles.
      poison: [1] int32, the bits of 0, or of NaN if candidates are not in user order, as the caller
        says; None if they were put there. If they are not, a user's rows are other users' queries:
        statistics and d_query are NaN then, and the kernel passes NaN on to the gradients of keys
        and values.
    """

    cand_to_user: jax.Array
    order: jax.Array | None
    position: jax.Array | None
    users: jax.Array
    parts: jax.Array
    tiles: jax.Array | None
    poison: jax.Array | None

    @property
    def is_valid(self) -> jax.Array | None:
        """bool: whether the promised order is right; None if none was promised."""
        return None if self.poison is None else self.poison[0] == 0

    @property
    def user(self) -> jax.Array:
        """[B] int32."""
        return jnp.clip(self.cand_to_user, 0, len(self.users) - 1)

    def targets(self, sizes: Sizes) -> jax.Array:
        """[B, T, N / K] int32, rows in the kernel's `d_query` for candidates in their order."""
        first_row, _, first_target, _ = jnp.moveaxis(self.users[self.user], 1, 0)
        place = self.position
        if place is None:
            place = jnp.arange(sizes.batch, dtype=jnp.int32)
        first = first_target + place * sizes.per_candidate - first_row
        within = jnp.arange(sizes.per_candidate, dtype=jnp.int32)
        return first[:, None, None] + within.reshape(sizes.q_len, sizes.group)[None]


def make_rows(
    cand_to_user: jax.Array, lengths: jax.Array | None, sizes: Sizes, *, interpret: Any = False
) -> Rows:
    """Numbers the rows by a launch; if there are too many candidates or users, by XLA.

    Args:
      cand_to_user: [B] int32; clamped to [0, users).
      lengths: [U] int32, clamped to [0, kv_len], or None for kv_len.
      sizes: of the problem.
      interpret: False, or `plgpu.InterpretGPUParams` to run on a CPU.
    """
    placed = _order(cand_to_user, sizes, by_launch=not interpret)
    if not numbering.fits(sizes):
        return _by_xla(cand_to_user, lengths, sizes, placed)
    operands = numbering.Operands(cand_to_user, lengths)
    found = numbering.numbering_kernel(operands, sizes, interpret=interpret)
    return _described(cand_to_user, *placed, found)


def _order(
    index: jax.Array, sizes: Sizes, *, by_launch: bool
) -> tuple[jax.Array | None, jax.Array | None]:
    """`Rows.order` and `Rows.position`, of many candidates by a launch if there may be one."""
    if sizes.is_sorted:
        return None, None
    if sizes.batch <= work_order.MAX_COUNTED:
        position = work_order.ranks(jnp.clip(index, 0, sizes.users - 1))
        return work_order.inverse(position), position
    if by_launch and counted_order.fits(sizes.batch, sizes.users):
        found = counted_order.count_order(None, index, sizes.users, has_position=True)
        return found.order, found.position
    order = work_order.by_user(index)
    number = jnp.arange(sizes.batch, dtype=jnp.int32)
    return order, jnp.zeros_like(number).at[order].set(number, unique_indices=True)


def _described(
    index: jax.Array,
    order: jax.Array | None,
    position: jax.Array | None,
    found: numbering.Outputs,
) -> Rows:
    users = found.users.reshape(-1, USER_WORDS)
    parts = users if found.parts is None else found.parts.reshape(-1, USER_WORDS)
    tiles = None if found.tiles is None else found.tiles.reshape(-1, TILE_WORDS)
    return Rows(index, order, position, users, parts, tiles, found.poison)


def by_xla(cand_to_user: jax.Array, lengths: jax.Array | None, sizes: Sizes) -> Rows:
    """`make_rows` by XLA."""
    return _by_xla(cand_to_user, lengths, sizes, _order(cand_to_user, sizes, by_launch=False))


def _by_xla(
    cand_to_user: jax.Array,
    lengths: jax.Array | None,
    sizes: Sizes,
    placed: tuple[jax.Array | None, jax.Array | None],
) -> Rows:
    """`by_xla` of an order, and its inverse, that are known."""
    users, per_candidate, block_q = sizes.users, sizes.per_candidate, sizes.block_q
    index = jnp.clip(cand_to_user, 0, users - 1)
    starts = work_order.starts(index, users)
    first_candidate, counts = starts[:-1], starts[1:] - starts[:-1]
    rows = counts * per_candidate
    blocks = -(-rows // block_q)
    first_target = sums_before(blocks) * block_q
    keys = jnp.full((users,), sizes.kv_len, jnp.int32)
    if lengths is not None:
        keys = jnp.clip(lengths.astype(jnp.int32), 0, sizes.kv_len)
    words = (first_candidate * per_candidate, rows, first_target, keys)
    assert len(words) == USER_WORDS
    described = jnp.stack(words, axis=1)
    # All parts but a user's last ones have whole blocks.
    part_rows = -(-blocks // sizes.splits) * block_q
    begin = part_rows[:, None] * jnp.arange(sizes.splits, dtype=jnp.int32)[None]
    part_words = (
        words[0][:, None] + begin,
        jnp.clip(rows[:, None] - begin, 0, part_rows[:, None]),
        first_target[:, None] + begin,
        jnp.broadcast_to(keys[:, None], begin.shape),
    )
    parts = jnp.stack(part_words, axis=2).reshape(users * sizes.splits, USER_WORDS)
    poison = None
    if sizes.is_sorted:
        is_valid = jnp.all(index[1:] >= index[:-1])
        poison = jnp.where(is_valid, jnp.int32(0), jnp.int32(numbering.NAN_BITS))[None]
    tiles = None if sizes.tile_rows is None else query_tiles(described, sizes)
    return Rows(cand_to_user, *placed, described, parts, tiles, poison)


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


def _nan_unless(is_valid: jax.Array | None, array: jax.Array) -> jax.Array:
    return array if is_valid is None else jnp.where(is_valid, array, jnp.nan)


def with_statistics(
    cand_to_user: jax.Array,
    lengths: jax.Array | None,
    inputs: Inputs,
    sizes: Sizes,
    *,
    kv_heads: int,
    count: int,
    interpret: Any = False,
) -> tuple[Rows, jax.Array, Packed]:
    """The rows, [K, 2, count + 128] f32 with lse in powers of 2, and delta, and packed operands.

    Statistics are at the rows' targets. Targets of a user begin with a block, so TMA copies blocks
    that begin at whole 64 bytes and end inside of the array. A copy that began at an array's last
    value, 12 bytes after whole 16 bytes, ended with an illegal instruction on an H200. Numbers at
    rows of no query are arbitrary.

    With P = exp(scores - lse), the gradient of a score is P * (d_out @ value.T - delta), where
    delta = sum(d_out * out) - d_lse. Rows without keys get an lse of infinity, hence P = 0.

    Args:
      cand_to_user: as for `make_rows`, like `lengths` and `sizes`.
      lengths: likewise.
      inputs: `out`, `d_out` and `query` [B, T, N, H], `lse` and `d_lse` [B, T, N].
      sizes: of the problem.
      kv_heads: K.
      count: rows of the kernel's `d_query`.
      interpret: False, or `plgpu.InterpretGPUParams`: XLA computes all of it.
    """
    if interpret:
        found = by_xla(cand_to_user, lengths, sizes)
        packed = Packed(*(pack(x, found.order, kv_heads) for x in (inputs.query, inputs.d_out)))
        return found, statistics_by_xla(inputs, found, sizes, kv_heads, count), packed
    in_place = None
    if not sizes.is_packed:
        in_place = Packed(*(pack(x, None, kv_heads) for x in (inputs.query, inputs.d_out)))
        inputs = inputs._replace(query=None)
    rows: Rows | None = None
    if not statistics_launch.numbers_rows(sizes, kv_heads):
        rows = make_rows(cand_to_user, lengths, sizes)
    width = inputs.out.shape[-1]
    operands = statistics_launch.Operands(
        Inputs(*(None if x is None else x.reshape(-1, *([width] * (x.ndim == 4))) for x in inputs)),
        cand_to_user,
        None if rows is None else rows.position,
        lengths,
        None if rows is None else rows.users,
        None if rows is None else rows.poison,
    )
    results = statistics_launch.statistics_kernel(
        operands, sizes, kv_heads=kv_heads, count=count + TILE_ROWS
    )
    if rows is None:
        order, position = results.rows.order, results.rows.position
        rows = _described(cand_to_user, order, position, results.rows)
    return rows, results.statistics, in_place or results.packed


def statistics_by_xla(
    inputs: Inputs, rows: Rows, sizes: Sizes, kv_heads: int, count: int
) -> jax.Array:
    """The second result of `with_statistics` by XLA."""
    out, d_out, lse, d_lse, _ = inputs
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    if d_lse is not None:
        delta = delta - d_lse
    both = jnp.stack((weight_exponents(lse), jnp.where(lse == -jnp.inf, 0.0, delta)))
    both = jnp.moveaxis(both.reshape(2, sizes.batch, sizes.q_len, kv_heads, sizes.group), 3, 0)
    # NaN enters the operands of the scatter: to select in its result would take another kernel.
    absent, both = (
        _nan_unless(rows.is_valid, x) for x in (jnp.asarray([jnp.inf, 0.0], jnp.float32), both)
    )
    found = jnp.broadcast_to(absent[None, :, None], (kv_heads, 2, count + TILE_ROWS))
    return found.at[:, :, rows.targets(sizes)].set(both, unique_indices=True)


def unpack_d_query(
    sums: jax.Array, rows: Rows, sizes: Sizes, kv_heads: int, scale: float, dtype: jnp.dtype
) -> jax.Array:
    """[B, T, N, H], from the kernel's `d_query` [planes, rows, H]; adds the planes of a key head.

    Planes of tiles that a user does not have, and rows of no query, are arbitrary.
    """
    planes, _, width = sums.shape
    tiles = planes // kv_heads
    parts = sums.reshape(tiles, kv_heads, -1, width)[:, :, rows.targets(sizes)]
    tile = jnp.arange(tiles, dtype=jnp.int32)
    kv_tiles = -(-rows.users[:, 3] // BLOCK_KV)
    # One plane holds the sum of all tiles.
    exists = tile[:, None] < kv_tiles[rows.user][None]
    parts = jnp.where(exists[:, None, :, None, None, None], parts, 0.0)
    total = (jnp.sum(parts, axis=0) * jnp.float32(scale)).astype(dtype)
    total = _nan_unless(rows.is_valid, total)
    return jnp.moveaxis(total, 0, 2).reshape(sizes.batch, sizes.q_len, -1, width)


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


def query_tiles(users: jax.Array, sizes: Sizes) -> jax.Array:
    """`Rows.tiles` by XLA, from `Rows.users`."""
    height: Any = sizes.tile_rows
    first_row, rows, target, keys = (users[:, i] for i in range(USER_WORDS))
    counts = -(-rows // height)
    ends = sums_before(counts) + counts
    number = jnp.arange(sizes.most_tiles + 1, dtype=jnp.int32)
    # Newer versions of JAX do not lower `jnp.searchsorted` inside of `sharded.device_p`.
    user = jnp.sum(ends[None] <= number[:, None], axis=1, dtype=jnp.int32)
    user = jnp.minimum(user, len(users) - 1)
    start = (number - (ends - counts)[user]) * height
    words = (
        # In the same array, since a kernel that made another one would take 2 us.
        jnp.where(number < sizes.most_tiles, first_row[user] + start, ends[-1]),
        jnp.clip(rows[user] - start, 0, height),
        user,
        keys[user],
        target[user] + start,
    )
    return jnp.stack(words, axis=1)
