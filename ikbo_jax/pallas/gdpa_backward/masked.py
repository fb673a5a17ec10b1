"""Masks of the backward kernels: which blocks a tile loads, and which scores of a block count.

A query row sees a range of the keys of its sequence, without a gap.  XLA describes every block of
64 queries (*group*): the keys that its rows see.  The blocks are those of a softmax's statistics,
so that a consumer's rows in the kernel for queries, and a block in the kernel for keys, are one
group.  For each tile, XLA finds the first and the last block that one of its rows sees, and sorts
the tiles by the blocks that are left.  The producer compares groups with keys: it sends the blocks
that a row of the tile sees, says which consumer skips a block and which one needs the mask, and
ends a tile by a descriptor without operands.  Weights and gradients of scores that a row does not
see become 0.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.activations import slopes as gdpa_slopes
from ikbo_jax.pallas.gdpa_backward.context import ORIGIN, BackwardContext
from ikbo_jax.pallas.hopper import mosaic, stores
from ikbo_jax.pallas.worklist.lists import STATISTICS_ROW, Offsets, Works
from ikbo_jax.problems.hopper import NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.reference import jagged

#: Words of a block's descriptor: what consumers do with it; its first key, or its first query's row
#: of `Masks.rows`.
FLAGS, FIRST = 2, 3
#: Flags of a consumer, each in `FLAG_BITS`: no row sees a key; some row's range ends in the block,
#: or some row's gap begins or ends there. `END`: no block follows.
UNSEEN, CUT, GAP, FLAG_BITS = 1, 2, 4, 4
NO_ROW_SEES = UNSEEN | UNSEEN << FLAG_BITS
END = 1 << 2 * FLAG_BITS
#: Words of a tile, in place of the number of blocks and of padding: the first block that its rows
#: see, and the last one plus 1; counted from the first one of the keys' sequence, or of all blocks
#: of queries.
BEGIN_BLOCK, END_BLOCK = 5, 7
#: Words of a group. Keys that a row sees: first, and last plus 1; begin and end of the keys in all
#: ranges; of the keys that hold all gaps; of the keys in all gaps.
GROUP_WORDS = 8


class Masks(NamedTuple):
    """Device memory, for rows in the order of a softmax's statistics; keys count from their first.

    Attributes:
      rows: [4, rows] int32, begin and end of every row's range, and of the gap in it.
      groups: [groups, GROUP_WORDS] int32.
    """

    rows: Any
    groups: Any


class _Groups(NamedTuple):
    """The words of groups, [groups] int32 each."""

    first: Any
    last: Any
    range_begin: Any
    range_end: Any
    gap_begin: Any
    gap_end: Any
    hole_begin: Any
    hole_end: Any

    def sees(self, key: Any, count: int) -> Any:
        """Whether a row sees one of `count` keys from `key` on; true if ranges and gaps mix."""
        end = key + count
        is_hole = (key >= self.hole_begin) & (end <= self.hole_end)
        return (key < self.last) & (end > self.first) & ~is_hole


# Host side


def mask_work(
    works: Works, offsets: Offsets, intervals: jax.Array, query_block: int
) -> tuple[Works, Masks]:
    """Leaves the blocks that rows of a tile see to the tile; sorts tiles by their blocks.

    Args:
      works: with statistics, and with blocks of 64 queries.
      intervals: [rows of the result, 4] int32, see `reference.gdpa.Arrays`.
      query_block: keys of a block in the kernel for queries.
    """
    assert works.blocks is not None
    position = jnp.arange(WGMMA_M, dtype=jnp.int32)
    is_row = position < works.blocks[:, 1:]
    number = jnp.where(is_row, works.blocks[:, :1] + position, 0)
    seen = jnp.where(is_row[..., None], intervals.at[number].get(mode="clip"), 0)
    rows = _ranges_and_gaps(seen)
    groups = _groups(rows, is_row)
    words = jnp.stack(groups, axis=1)
    masks = Masks(
        jnp.pad(jnp.moveaxis(rows, 2, 0).reshape(4, -1), ((0, 0), (0, TILE_ROWS))),
        jnp.pad(words, ((0, NUM_CONSUMERS), (0, 0))),
    )
    queries = _sorted(works.queries, *_key_blocks(works.queries, masks.groups, query_block))
    keys = _sorted(*_query_blocks(works, offsets, groups))
    return works._replace(queries=queries, keys=keys), masks


def _ranges_and_gaps(intervals: jax.Array) -> jax.Array:
    """Converts two intervals [..., 4] to a range and its gap; (0, 0) where one is empty."""
    begin, end = intervals[..., ::2], intervals[..., 1::2]
    is_empty = begin >= end
    end = jnp.where(is_empty, 0, end)
    last = jnp.max(end, axis=-1)
    first = jnp.min(jnp.where(is_empty, last[..., None], begin), axis=-1)
    # The gap is between the end of the interval that begins first, and the begin of the other one.
    is_first = begin[..., 0] <= begin[..., 1]
    gap_begin = jnp.where(is_first, end[..., 0], end[..., 1])
    gap_end = jnp.where(is_first, begin[..., 1], begin[..., 0])
    has_gap = ~jnp.any(is_empty, axis=-1) & (gap_begin < gap_end)
    gap = (jnp.where(has_gap, x, 0) for x in (gap_begin, gap_end))
    return jnp.stack((first, last, *gap), axis=-1)


def _groups(rows: jax.Array, is_row: jax.Array) -> _Groups:
    """Summarises rows [groups, 64, 4], some of which do not exist."""
    most = jnp.int32(jnp.iinfo(jnp.int32).max)
    begin, end, gap_begin, gap_end = (rows[..., i] for i in range(4))
    sees, has_gap = begin < end, gap_begin < gap_end

    def least(condition: jax.Array, values: Any, rest: Any = most) -> jax.Array:
        return jnp.min(jnp.where(condition, values, rest), axis=1)

    def largest(condition: jax.Array, values: Any, rest: Any = 0) -> jax.Array:
        return jnp.max(jnp.where(condition, values, rest), axis=1)

    return _Groups(
        least(sees, begin),
        largest(sees, end),
        largest(is_row, begin),
        least(is_row, end),
        least(has_gap, gap_begin),
        largest(has_gap, gap_end),
        # A row that sees keys and has no gap leaves no hole.
        largest(sees, jnp.where(has_gap, gap_begin, most)),
        least(sees, jnp.where(has_gap, gap_end, 0)),
    )


def _key_blocks(queries: Any, groups: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Finds first and last blocks of keys of tiles of queries."""
    number = lax.div(queries.tiles[:, STATISTICS_ROW], jnp.int32(WGMMA_M))
    first, last = (groups[number, i] for i in range(2))
    # Both consumers' rows, if the second one has any.
    is_both = queries.tiles[:, 2] > WGMMA_M
    first = jnp.where(is_both, jnp.minimum(first, groups[number + 1, 0]), first)
    last = jnp.where(is_both, jnp.maximum(last, groups[number + 1, 1]), last)
    has_keys = (queries.tiles[:, 5] > 0) & (first < last)
    begin, end = lax.div(first, jnp.int32(block)), lax.div(last + (block - 1), jnp.int32(block))
    return jnp.where(has_keys, begin, 0), jnp.where(has_keys, end, 0)


def _query_blocks(
    works: Works, offsets: Offsets, groups: _Groups
) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
    """Finds first and last blocks of queries of tiles of keys; adds the tiles' first keys."""
    keys, blocks = works.keys, works.blocks
    assert blocks is not None
    starts, _ = jagged.bounds(offsets.cu_seqlens_kv, offsets.kv_rows, offsets.max_seqlen_kv)
    first_row = lax.rem(keys.tiles[:, 1], jnp.int32(offsets.kv_rows))  # of one copy of the keys
    kv = jnp.maximum(jagged.search_right(starts, first_row) - 1, 0)
    key = first_row - starts[kv]
    if offsets.cu_seqlens_q is None:
        sequence = lax.div(blocks[:, 0], jnp.int32(offsets.q_rows))
    else:
        q_starts, _ = jagged.bounds(offsets.cu_seqlens_q, offsets.q_rows, None)
        sequence = jnp.maximum(jagged.search_right(q_starts, blocks[:, 0]) - 1, 0)
    kv_of = sequence
    if offsets.q_to_kv is not None:
        kv_of = offsets.q_to_kv.at[sequence].get(mode="clip")
        kv_of = jnp.clip(kv_of, 0, starts.size - 1)
    # [tiles, blocks], which XLA fuses with the sums: 512 x 1,024 for 65,536 rows.
    is_seen = groups.sees(key[:, None], TILE_ROWS) & (kv[:, None] == kv_of)
    is_seen &= keys.tiles[:, 5:6] > 0
    number = jnp.arange(blocks.shape[0], dtype=jnp.int32)
    begin = jnp.min(jnp.where(is_seen, number, blocks.shape[0]), axis=1)
    end = jnp.max(jnp.where(is_seen, number + 1, 0), axis=1)
    keys = keys._replace(tiles=keys.tiles.at[:, STATISTICS_ROW].set(key))
    return keys, begin, end, jnp.sum(is_seen, axis=1, dtype=jnp.int32)


def _sorted(work: Any, begin: jax.Array, end: jax.Array, cost: jax.Array | None = None) -> Any:
    """Gives tiles their blocks, and sorts the tiles, the most expensive first."""
    cost = jnp.maximum(end - begin, 0) if cost is None else cost
    is_tile = jnp.arange(cost.size, dtype=jnp.int32) < work.counts[1]
    order = jnp.argsort(jnp.where(is_tile, -cost, 1), stable=True)
    tiles = work.tiles.at[:, BEGIN_BLOCK].set(begin).at[:, END_BLOCK].set(end)
    return work._replace(tiles=tiles[order])


# The producer


def block_range(ctx: BackwardContext, tile: Any, first: Any, blocks: Any) -> tuple[Any, Any]:
    """Returns first and last number, plus 1, of the blocks of a range that a tile may see.

    Args:
      first: row of `Masks.rows` of the range's first query; 0 in the kernel for queries.
      blocks: of the range.
    """
    before = lax.div(first, WGMMA_M)
    begin, end = (ctx.tile_word(tile, word) - before for word in (BEGIN_BLOCK, END_BLOCK))
    return jnp.maximum(begin, 0), jnp.minimum(end, blocks)


def block_flags(ctx: BackwardContext, tile: Any, first: Any, done: Any) -> Any:
    """Compares a block, whose range has `done` rows before it, with both consumers' rows."""
    origin, size = ctx.tile_word(tile, STATISTICS_ROW), ctx.config.block
    found = []
    for consumer in range(NUM_CONSUMERS):
        if ctx.shape.is_for_keys:
            number, key, count = lax.div(first + done, WGMMA_M), origin + consumer * WGMMA_M, WGMMA_M
        else:
            number, key, count = lax.div(origin, WGMMA_M) + consumer, done, size
        group = _Groups(*(ctx.operands.masks.groups[number, i] for i in range(GROUP_WORDS)))
        end = key + count
        is_cut = (key < group.range_begin) | (end > group.range_end)
        has_gap = (key < group.gap_end) & (end > group.gap_begin)
        flags = jnp.where(is_cut, CUT, 0) + jnp.where(has_gap, GAP, 0)
        has_rows = ctx.tile_word(tile, 2) > consumer * WGMMA_M
        flags = jnp.where(group.sees(key, count) & has_rows, flags, UNSEEN)
        found.append(flags << (FLAG_BITS * consumer))
    return found[0] | found[1]


# Consumers


def _own_flags(ctx: BackwardContext, flags: Any) -> Any:
    consumer = mosaic.warpgroup_index("warpgroup", interpret=ctx.interpret)
    return flags >> (FLAG_BITS * consumer)


def is_unseen(ctx: BackwardContext, block: tuple[Any, ...]) -> Any:
    """Whether no row of the consumer sees a key of a block, (step, flags, ...)."""
    return (_own_flags(ctx, block[1]) & UNSEEN) != 0


def keep_seen(
    ctx: BackwardContext, item: Any, step: Any, begin: int, weights: jax.Array, slope: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Replaces weights and slopes of scores that a row does not see.

    Args:
      ctx: the consumer's context.
      item: number of the tile.
      step: of the block.
      begin: first column of the block.
      weights: [64, columns] f32.
      slope: likewise; with a softmax, the same array.
    """
    has_softmax = ctx.shape.has_softmax
    fills = (0.0, 0.0 if has_softmax else gdpa_slopes.zero_slope(ctx.shape.activation))
    kept = (weights,) if has_softmax or not ctx.shape.is_for_keys else (weights, slope)
    if not has_softmax and not ctx.shape.is_for_keys:  # weights have no use
        kept, fills = (slope,), fills[1:]

    def select(part: int, kept: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        is_seen = _is_inside(ctx, item, step, begin, kept[0].shape, 2 * part)
        is_seen = ~is_seen if part else is_seen
        return tuple(
            jnp.where(is_seen, x, jnp.float32(fill)) for x, fill in zip(kept, fills, strict=False)
        )

    flags = _own_flags(ctx, ctx.shared.streamed.word(step, FLAGS))
    for part, flag in enumerate((CUT, GAP)):
        branch = functools.partial(select, part)
        kept = lax.cond((flags & flag) != 0, branch, lambda x: x, kept)
    return kept[0], kept[-1]


def _is_inside(
    ctx: BackwardContext, item: Any, step: Any, begin: int, shape: tuple[int, ...], number: int
) -> jax.Array:
    """Whether keys are in their rows' ranges (`number` 0) or gaps (2), of scores from `begin` on."""
    consumer = mosaic.warpgroup_index("warpgroup", interpret=ctx.interpret)
    item = mosaic.opaque(item, interpret=ctx.interpret)
    origin = ctx.shared.stationary.word(item, ORIGIN) + consumer * WGMMA_M
    first = ctx.shared.streamed.word(step, FIRST) + begin
    axis = int(not ctx.shape.is_for_keys)  # of the keys
    layout = stores.ROW_LAYOUT if axis else plgpu.Layout.WGMMA.reduce(0)
    row, key = (origin, first) if axis else (first, origin)
    rows = ctx.operands.masks.rows
    ends = (
        plgpu.load(
            rows.at[number + i, pl.ds(row, shape[1 - axis])], layout=layout, optimized=False
        )
        - key
        for i in range(2)
    )
    keys = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
    first_key, last_key = (lax.broadcast_in_dim(x, shape, (1 - axis,)) for x in ends)
    return (keys >= first_key) & (keys < last_key)
