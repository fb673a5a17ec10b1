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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ikbo_jax.pallas.activations import slopes as gdpa_slopes
from ikbo_jax.pallas.gdpa_backward.context import ORIGIN, BackwardContext
from ikbo_jax.pallas.hopper import mosaic, seen
from ikbo_jax.pallas.hopper.visible import ranges_and_gaps
from ikbo_jax.pallas.worklist.lists import STATISTICS_ROW, Offsets, Works
from ikbo_jax.problems.hopper import NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.reference import jagged

#: Words of a block's descriptor: what consumers do with it; its first key, or its first query's row
#: of `Masks.rows`.
FLAGS, FIRST = 2, 3
#: Flags of a consumer, which has `FLAG_BITS`: no row sees a key; some row's range begins or ends in
#: the block, or some row's gap does; no block follows.
UNSEEN, CUT, GAP, END = 1, 2, 4, 8
FLAG_BITS, ALL_FLAGS = 4, 15
NO_ROW_SEES, BOTH_END = (x | x << FLAG_BITS for x in (UNSEEN, END))
#: Words of a tile, in place of the number of blocks and of padding: the first block that its rows
#: see, and the last one plus 1; counted from the first one of the keys' sequence, or of all blocks
#: of queries.
BEGIN_BLOCK, END_BLOCK = 5, 7
#: Words of a group, first and last key plus 1 each: of the keys that a row sees, of those in the
#: ranges of all rows, of those around all gaps, of those in the gaps of all rows.
SEEN, IN_RANGES, NEAR_GAPS, IN_GAPS = 0, 2, 4, 6
GROUP_WORDS = 8


class Masks(NamedTuple):
    """Device memory, for rows in the order of a softmax's statistics; keys count from their first.

    Attributes:
      rows: [2, rows, 2] int32, begin and end of every row's range, and of the gap in it.
      groups: [groups, GROUP_WORDS] int32.
    """

    rows: Any
    groups: Any


def _sees_none(words: Callable[[int], Any], key: Any, end: Any) -> Any:
    """Whether no row of a group sees the keys [key, end); `words` reads two words of the group."""
    begins, ends = words(IN_GAPS)
    is_hole = (key >= begins) & (end <= ends)
    begins, ends = words(SEEN)
    return is_hole | (key >= ends) | (end <= begins)


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
    is_row = position[None] < works.blocks[:, 1:]
    number = jnp.where(is_row, works.blocks[:, :1] + position[None], 0)
    seen = jnp.where(is_row[..., None], intervals.at[number].get(mode="clip"), 0)
    rows = ranges_and_gaps(seen)
    groups = _groups(rows, is_row)
    masks = Masks(
        jnp.pad(jnp.moveaxis(rows.reshape(-1, 2, 2), 1, 0), ((0, 0), (0, TILE_ROWS), (0, 0))),
        jnp.pad(groups, ((0, NUM_CONSUMERS), (0, 0))),
    )
    queries = _sorted(works.queries, *_key_blocks(works.queries, masks.groups, query_block))
    keys = _sorted(*_query_blocks(works, offsets, groups))
    return works._replace(queries=queries, keys=keys), masks


def _groups(rows: jax.Array, is_row: jax.Array) -> jax.Array:
    """Computes the words of groups from rows [groups, 64, 4], some of which do not exist."""
    most = jnp.int32(jnp.iinfo(jnp.int32).max)
    begin, end, gap_begin, gap_end = (rows[..., i] for i in range(4))
    sees, has_gap = begin < end, gap_begin < gap_end

    def least(condition: jax.Array, values: Any, rest: Any = most) -> jax.Array:
        return jnp.min(jnp.where(condition, values, rest), axis=1)

    def largest(condition: jax.Array, values: Any, rest: Any = 0) -> jax.Array:
        return jnp.max(jnp.where(condition, values, rest), axis=1)

    found = (
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
    return jnp.stack(found, axis=1)


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
    works: Works, offsets: Offsets, groups: jax.Array
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
    first, of_blocks = key[:, None], groups[None]
    sees_none = _sees_none(
        lambda i: (of_blocks[..., i], of_blocks[..., i + 1]), first, first + TILE_ROWS
    )
    is_seen = ~sees_none & (kv[:, None] == kv_of[None]) & (keys.tiles[:, 5:6] > 0)
    number = jnp.arange(blocks.shape[0], dtype=jnp.int32)[None]
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

    def compare(consumer: Any, found: Any) -> Any:
        origin = ctx.tile_word(tile, STATISTICS_ROW)
        if ctx.shape.is_for_keys:
            number, key, count = lax.div(first + done, WGMMA_M), origin, WGMMA_M
            key = key + consumer * WGMMA_M
        else:
            number, key, count = lax.div(origin, WGMMA_M) + consumer, done, ctx.config.block
        end = key + count

        def words(word: int) -> list[Any]:
            place = mosaic.opaque(number, interpret=ctx.interpret)
            return [ctx.operands.masks.groups[place, word + i] for i in range(2)]

        begins, ends = words(IN_RANGES)
        flags = jnp.where((key < begins) | (end > ends), CUT, 0)
        begins, ends = words(NEAR_GAPS)
        flags = flags + jnp.where((key < ends) & (end > begins), GAP, 0)
        sees_none = _sees_none(words, key, end)
        has_rows = ctx.tile_word(tile, 2) > consumer * WGMMA_M
        flags = jnp.where(sees_none | ~has_rows, UNSEEN, flags)
        return found | flags << (FLAG_BITS * consumer)

    return compare(1, compare(0, jnp.int32(0)))


# Consumers


def received_flags(ctx: BackwardContext, step: Any) -> Any:
    """Reads a consumer's flags of a received block: 0, `UNSEEN`, `CUT` and `GAP`, or `END`."""
    consumer = mosaic.warpgroup_index("warpgroup", interpret=ctx.interpret)
    return ctx.shared.streamed.word(step, FLAGS) >> (FLAG_BITS * consumer) & ALL_FLAGS


def seen_bits(ctx: BackwardContext, item: Any, step: Any, flags: Any) -> jax.Array:
    """Computes which scores of a tile and a block count."""
    columns = ctx.config.block

    def restrict(part: int, bits: jax.Array) -> jax.Array:
        consumer = mosaic.warpgroup_index("warpgroup", interpret=ctx.interpret)
        tile = mosaic.opaque(item, interpret=ctx.interpret)
        places = [
            ctx.shared.stationary.word(tile, ORIGIN) + consumer * WGMMA_M,
            ctx.shared.streamed.word(step, FIRST),
        ]
        query, key = places[::-1] if ctx.shape.is_for_keys else places
        return seen.restrict(
            *(bits, ctx.operands.masks.rows, part, query, key, columns),
            queries_are_rows=not ctx.shape.is_for_keys,
            interpret=ctx.interpret,
        )

    bits = seen.all_bits(columns, interpret=ctx.interpret)
    for part, flag in (seen.RANGE, CUT), (seen.GAP, GAP):
        branch = functools.partial(restrict, part)
        bits = lax.cond((flags & flag) != 0, branch, lambda x: x, bits)
    return bits


def keep_seen(
    ctx: BackwardContext,
    block: tuple[Any, jax.Array],
    begin: int,
    weights: jax.Array,
    slope: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Replaces weights and slopes of scores that a row does not see.

    Args:
      ctx: the consumer's context.
      block: flags, and the bits of all scores.
      begin: first column.
      weights: [64, columns] f32.
      slope: likewise; with a softmax without a cap, the same array.
    """
    zero = 0.0 if ctx.shape.has_softmax else gdpa_slopes.zero_slope(ctx.shape.activation)
    fills = [0.0] if slope is weights else [0.0, zero]
    values = [weights, slope][: len(fills)]
    if not ctx.shape.is_for_keys:  # weights have no use, unless they are the slopes, too
        values, fills = values[-1:], fills[-1:]
    flags, bits = block

    def select(*values: jax.Array) -> tuple[jax.Array, ...]:
        return seen.keep(bits, values, fills, begin, interpret=ctx.interpret)

    is_cut = (flags & (CUT | GAP)) != 0
    kept = lax.cond(is_cut, select, lambda *x: x, *values)
    return kept[0], kept[-1]
