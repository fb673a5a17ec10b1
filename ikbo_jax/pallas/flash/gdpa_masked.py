"""Masks of the GDPA forward kernel: the keys of a tile, and of each of its rows.

The list narrows every tile to the blocks that its rows see, and says which of these a consumer
masks (`worklist.masked`). In such a block, the consumer computes what its rows see from their
positions, by a rule, or reads it: a range of keys, and a gap in it, one after the other to save
registers. Scores of other keys become 0, and act(0) = 0.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import mosaic, stores
from ikbo_jax.pallas.hopper.visible import Visible, ranges_and_gaps
from ikbo_jax.pallas.worklist import by_xla, lists
from ikbo_jax.problems.hopper import NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.reference import hstu


def mask_tiles(
    listed: lists.TileList, intervals: jax.Array, block_kv: int, keys_per_group: int | None = None
) -> tuple[lists.TileList, jax.Array]:
    """Narrows tiles of `TILE_ROWS` rows to the keys that their rows see, and sorts them again.

    `intervals` [rows of the result, 4] int32 are as in `reference.gdpa.Arrays`. Returns tiles with
    the words of a mask, whose position is the tile's number; and what each row sees, [tiles, 2
    consumers, 4, 64] int32, begin and end of the row's range and gap.
    """
    words, number = listed.words, jnp.arange(listed.words.shape[0], dtype=jnp.int32)
    is_tile = number < listed.counts[1]
    row = jnp.arange(TILE_ROWS, dtype=jnp.int32)[None]
    is_row = is_tile[:, None] & (row < words[:, lists.ROWS, None])
    rows = jnp.where(is_row, words[:, lists.TARGET, None] + row, 0)
    # Tiles of rows of no sequence have no keys.
    sees = is_row & (words[:, lists.KV_LENGTH, None] > 0)
    ends = ranges_and_gaps(jnp.where(sees[..., None], intervals.at[rows].get(mode="clip"), 0))
    last = jnp.max(ends[..., 1], axis=1)
    first = jnp.min(jnp.where(ends[..., 1] > 0, ends[..., 0], last[:, None]), axis=1)
    ends = ends.reshape(-1, NUM_CONSUMERS, WGMMA_M, 4)
    zero, is_row = jnp.zeros_like(first), is_row.reshape(ends.shape[:3])
    skip_from, skipped, cuts = _blocks(ends - first[:, None, None, None], is_row, block_kv)
    columns = (skip_from, skipped, first, number, zero, zero, zero)
    count = jnp.maximum(last - first - skipped, 0)
    words = words.at[:, lists.KV_START].add(first).at[:, lists.KV_LENGTH].set(count)
    words = jnp.concatenate([words, jnp.stack(columns, axis=1), cuts], axis=1)
    tiles = by_xla.by_blocks(lists.TileList(words, listed.counts), block_kv, keys_per_group)
    return tiles, jnp.moveaxis(ends, 3, 2)


def _blocks(ends: jax.Array, is_row: jax.Array, block_kv: int) -> tuple[jax.Array, ...]:
    """Finds blocks that lie in the gaps of all rows, and blocks that consumers mask.

    `ends` [tiles, 2, 64, 4] count from the tile's first key; `is_row`: which rows exist. Returns
    the first block in the gaps, the keys of these blocks, and blocks for each consumer [tiles, 8].
    """
    most = jnp.int32(2**30)
    begin, end, gap_begin, gap_end = (ends[..., i] for i in range(4))
    has_gap, sees = gap_begin < gap_end, begin < end
    hole_begin = jnp.max(jnp.where(has_gap, gap_begin, jnp.where(sees, most, 0)), axis=(1, 2))
    hole_end = jnp.min(jnp.where(has_gap, gap_end, jnp.where(sees, 0, most)), axis=(1, 2))
    before = (hole_begin + (block_kv - 1)) // block_kv
    skipped = jnp.maximum(hole_end - before * block_kv, 0) // block_kv * block_kv
    skipped = jnp.where(hole_end < most, skipped, 0)
    found = (
        jnp.max(jnp.where(is_row, begin, 0), axis=2) + (block_kv - 1),
        jnp.min(jnp.where(is_row, end, most), axis=2) - skipped[:, None],
        jnp.min(jnp.where(has_gap, gap_begin, most), axis=2),
        jnp.max(jnp.where(has_gap, gap_end, -most), axis=2) - skipped[:, None] + (block_kv - 1),
    )
    cuts = jnp.maximum(jnp.stack(found, axis=2), 0) // block_kv
    return before, skipped, cuts.reshape(-1, NUM_CONSUMERS * 4)


def find_cuts(ctx: Any, item: Any, block: Any) -> tuple[Any, ...]:
    """Returns whether a consumer masks a block by its rows' ranges, and by gaps if there are any.

    Called while scores are in flight, whose masking would wait for the words.
    """
    rule, item = ctx.shape.rule, mosaic.opaque(item)

    def cut(part: int) -> Any:
        return ctx.mask_word(item, lists.CUTS + part + 4 * ctx.consumer)

    is_cut = block >= cut(1)
    if rule is None or rule.window is not None:
        is_cut |= block < cut(0)
    if not ctx.shape.has_gaps:
        return (is_cut,)
    return is_cut, (block >= cut(2)) & (block < cut(3))


def keep_visible(ctx: Any, place: Any, scores: jax.Array, fill: float = 0.0) -> jax.Array:
    """Replaces a consumer's scores [64, block_kv] by `fill` where a row does not see the key.

    `place` are the numbers of item and block, and the result of `find_cuts`.
    """
    item, block, cuts = place

    def selected(part: int, scores: jax.Array) -> jax.Array:
        begin, end = _rows_see(ctx, item, part)
        before = first_key(ctx, item, block)
        begin = begin if isinstance(begin, int) else begin - before
        return Visible(scores.shape[1], end - before, begin).select_by_row(
            scores, inside=part == 0, fill=fill
        )

    for part, is_cut in enumerate(cuts):
        scores = lax.cond(is_cut, functools.partial(selected, part), lambda x: x, scores)
    return scores


def seen_blocks(ctx: Any, item: Any) -> Any:
    """Counts the blocks up to the last one that a consumer's rows see; 0 if it has no rows."""
    return ctx.mask_word(item, lists.MASK_WORDS + ctx.consumer)


def first_key(ctx: Any, item: Any, block: Any) -> Any:
    """Returns the first key of a block, counted from the sequence's first key."""
    first = ctx.mask_word(item, lists.FIRST_KEY) + block * ctx.config.block_kv
    if not ctx.shape.has_gaps:
        return first
    skip_from, skipped = (ctx.mask_word(item, i) for i in (lists.SKIP_FROM, lists.SKIPPED))
    return first + jnp.where(block >= skip_from, skipped, 0)


def _rows_see(ctx: Any, item: Any, part: int) -> tuple[Any, Any]:
    """Finds begin and end of the ranges (part 0) or gaps (part 1) of a consumer's rows."""
    position = ctx.mask_word(item, lists.POSITION)
    rule = ctx.shape.rule
    if rule is None:
        rows = ctx.operands.seen.at[position, ctx.consumer]
        begin, end = (
            plgpu.load(rows.at[2 * part + i], layout=stores.ROW_LAYOUT, optimized=False)
            for i in range(2)
        )
        return begin, end
    row = plgpu.broadcasted_iota(jnp.int32, (WGMMA_M,), 0, layout=stores.ROW_LAYOUT)
    numbers = (ctx.mask_word(item, i) for i in (lists.LENGTH, lists.CONTEXTUAL, lists.TARGETS))
    sequence = hstu.Sequence(*numbers).clamped(rule)
    found = hstu.seen(rule, row + (position + ctx.consumer * WGMMA_M), sequence)
    return found[2 * part], found[2 * part + 1]
