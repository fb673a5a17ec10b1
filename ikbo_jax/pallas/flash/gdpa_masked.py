"""Masks of the GDPA forward kernel: the keys of a tile, and of each of its rows.

XLA narrows every listed tile to the keys between the first and the last one that its rows see, so
the kernel loads no other blocks, and the list is sorted by the blocks that are left.  XLA also
writes, for each consumer's 64 rows, what every row sees, counted from the tile's first key: a range
of keys without a gap.  Scores of other keys become 0, and act(0) = 0.  Blocks inside the ranges of
all rows, and outside all gaps, need no mask.  Ranges and gaps are applied one after the other: with
four numbers of each of a thread's two rows at once, the kernel would spill registers.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import stores
from ikbo_jax.pallas.hopper.visible import Visible, ranges_and_gaps
from ikbo_jax.pallas.worklist import lists
from ikbo_jax.problems.hopper import NUM_CONSUMERS, TILE_ROWS, WGMMA_M


class Masks(NamedTuple):
    """Device memory: the keys of tiles, counted from the tile's first key.

    Attributes:
      rows: [most tiles, 2 consumers, 4, 64] int32, begin and end of every row's range and gap.
      common: [most tiles, 2 consumers, 4] int32, begin and end of the keys in the ranges of all
        rows, and of the keys that hold the gaps of all rows.
    """

    rows: Any
    common: Any


def mask_tiles(
    listed: lists.TileList, intervals: jax.Array, block_kv: int
) -> tuple[lists.TileList, Masks]:
    """Narrows tiles of `TILE_ROWS` rows to the keys that their rows see, and sorts them again.

    Args:
      listed: tiles of all rows of the result.
      intervals: [rows of the result, 4] int32, see `reference.gdpa.Arrays`.
      block_kv: keys of a block.
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
    ends = jnp.maximum(ends - first[:, None, None], 0)
    ends = ends.reshape(-1, NUM_CONSUMERS, WGMMA_M, 4)
    blocks = lax.div(last - first + (block_kv - 1), jnp.int32(block_kv))
    order = jnp.argsort(jnp.where(blocks > 0, -blocks, jnp.where(is_tile, 1, 2)), stable=True)
    words = words.at[:, lists.KV_START].add(first).at[:, lists.KV_LENGTH].set(last - first)
    counts = listed.counts.at[0].set(jnp.sum(blocks > 0, dtype=jnp.int32))
    common = _common(ends, is_row.reshape(ends.shape[:3]))
    masks = Masks(jnp.moveaxis(ends, 3, 2)[order], common[order])
    return lists.TileList(words[order], counts), masks


def _common(ends: jax.Array, is_row: jax.Array) -> jax.Array:
    """Computes `Masks.common` from ends [tiles, 2, 64, 4]; leaves out rows that do not exist."""
    most = jnp.int32(jnp.iinfo(jnp.int32).max)
    begin, end, gap_begin, gap_end = (ends[..., i] for i in range(4))
    found = (
        jnp.max(jnp.where(is_row, begin, 0), axis=2),
        jnp.min(jnp.where(is_row, end, most), axis=2),
        jnp.min(jnp.where(gap_end > 0, gap_begin, most), axis=2),
        jnp.max(gap_end, axis=2),
    )
    return jnp.stack(found, axis=2)


def keep_visible(ctx: Any, item: Any, block: Any, scores: jax.Array) -> jax.Array:
    """Zeroes scores of a consumer's 64 rows where a row does not see the key of the block.

    Args:
      ctx: the consumer's `GdpaContext`.
      item: number of the item.
      block: number of the block.
      scores: [64, block_kv] f32.
    """
    size = scores.shape[1]
    before = block * size

    def ends(part: int) -> tuple[Any, Any]:
        first = 1 + 4 * ctx.consumer + 2 * part
        return ctx.mask_word(item, first), ctx.mask_word(item, first + 1)

    def selected(part: int, scores: jax.Array) -> jax.Array:
        rows = ctx.operands.masks.rows.at[ctx.mask_word(item, 0), ctx.consumer]
        begin, end = (
            plgpu.load(rows.at[2 * part + i], layout=stores.ROW_LAYOUT, optimized=False)
            for i in range(2)
        )
        return Visible(size, end - before, begin - before).select(scores, inside=part == 0)

    begin, end = ends(0)
    is_cut = (begin > before) | (end < before + size)
    scores = lax.cond(is_cut, functools.partial(selected, 0), lambda x: x, scores)
    begin, end = ends(1)
    has_gap = (begin < before + size) & (end > before)
    kept: jax.Array = lax.cond(has_gap, functools.partial(selected, 1), lambda x: x, scores)
    return kept
