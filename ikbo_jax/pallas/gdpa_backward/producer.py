"""The producer warp of the backward kernels: loads tiles, and the blocks of each tile, by TMA."""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.gdpa_backward import masked, stored
from ikbo_jax.pallas.gdpa_backward.context import END, FLAGS, BackwardContext
from ikbo_jax.pallas.gdpa_backward.softmax import ABSENT_ROWS
from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.worklist.lists import STATISTICS_ROW
from ikbo_jax.problems.gdpa_backward import BLOCK_WORDS, MASK_WORDS, STATISTICS
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WGMMA_M, column_blocks


def _send_stationary(
    ctx: BackwardContext, item: Any, tile: Any, head: Any, whole: Any = None
) -> None:
    """Sends the descriptor of a tile, and loads its two stationary operands."""
    ring = ctx.shared.stationary
    slot = ring.slot(item)
    first_rows = (ctx.tile_word(tile, 0), ctx.tile_word(tile, 1))
    blocks = ctx.tile_word(tile, 5)
    has_blocks = jnp.minimum(blocks, 1)
    words = [first_rows[1], ctx.tile_word(tile, 2), head, has_blocks, jnp.maximum(blocks, 1)]
    if ctx.shape.has_mask:
        words += [ctx.tile_word(tile, STATISTICS_ROW), whole]
    if ctx.shape.has_stored and ctx.shape.is_for_keys:
        words.append(ctx.tile_word(tile, stored.PLACE))
    ring.send_words(item, words, after=ring)
    if ctx.shape.reads_stored:
        return
    for operand, (source, first) in enumerate(
        zip(ctx.operands.stationary, first_rows, strict=True)
    ):
        for consumer in range(NUM_CONSUMERS):
            row = jnp.minimum(first + consumer * WGMMA_M, source.shape[0] - 1)
            target = ring.tiles[1].at[slot, operand, consumer]
            ctx.load(source, (pl.ds(row, WGMMA_M), head), target, ring.ready.at[slot])
    if ctx.shared.statistics_free is not None:
        plgpu.barrier_wait(ctx.shared.statistics_free.at[0])
        row = ctx.tile_word(tile, STATISTICS_ROW)
        _load_statistics(ctx, head, row, jnp.int32(0), ring.ready.at[slot])


def _load_statistics(ctx: BackwardContext, head: Any, row: Any, slot: Any, ready: Any) -> None:
    """Loads lse and delta of a tile's or a block's queries, from `row` of the statistics on."""
    for number in range(STATISTICS):
        target = ctx.statistics(slot, number)
        source = ctx.operands.statistics.at[head, number, pl.ds(row, target.shape[0])]
        plgpu.copy_gmem_to_smem(source, target, ready)


def _send_block(
    ctx: BackwardContext, step: Any, first_rows: list[Any], words: Sequence[Any], head: Any
) -> None:
    """Sends a block's descriptor, and loads its two operands and, with a row, its statistics."""
    ring = ctx.shared.streamed
    ring.send_words(step, words, after=ring)
    if ctx.shape.reads_stored:
        tiles, ready = ring.copied(step), ring.ready_at(step)
        rows = pl.ds(first_rows[0], ctx.config.block)
        keys = tiles.at[0, pl.ds(0, column_blocks(ctx.shape.head_dim))]
        ctx.load(ctx.operands.streamed[0], (rows, head), keys, ready)
        for consumer in range(NUM_CONSUMERS):
            rows = pl.ds(first_rows[1 + consumer], WGMMA_M)
            target = tiles.at[1, pl.ds(consumer, 1)]
            ctx.load(ctx.operands.masks.d_scores, (rows, 0), target, ready)
        return
    for operand, (source, row) in enumerate(
        zip(ctx.operands.streamed, first_rows[:2], strict=True)
    ):
        tiles, ready = ring.copied(step).at[operand], ring.ready_at(step)
        ctx.load(source, (pl.ds(row, ctx.config.block), head), tiles, ready)
    for row in first_rows[2:]:
        _load_statistics(ctx, head, row, ring.slot(step), ring.ready_at(step))


def _send_item(ctx: BackwardContext, number: Any, item: Any, step: Any) -> Any:
    """Sends one head of a tile, and all its blocks; returns the next item's first step."""
    shape, config, operands = ctx.shape, ctx.config, ctx.operands
    tile, head = lax.div(number, shape.heads), lax.rem(number, shape.heads)
    if shape.has_mask:
        whole = ctx.tile_word(tile, masked.WHOLE_END) - ctx.tile_word(tile, masked.WHOLE_BEGIN)
        _send_stationary(ctx, item, tile, head, whole * shape.streamed_per_head)
    else:
        _send_stationary(ctx, item, tile, head)
    begin, end, blocks = (ctx.tile_word(tile, i) for i in (3, 4, 5))
    has_statistics = shape.has_softmax and shape.is_for_keys

    def send_head(index: Any, step: Any, is_cut: bool = False) -> Any:
        block_head = lax.div(head, shape.heads_per_streamed) * shape.streamed_per_head + index
        q_head = block_head if shape.is_for_keys else head
        if is_cut:
            last = step + lax.div(blocks, shape.streamed_per_head) - whole
            send = functools.partial(_send_cut, ctx, tile, (block_head, q_head), last)
            return lax.fori_loop(begin, end, send, step)
        if shape.has_mask:
            send = functools.partial(_send_whole, ctx, tile, (block_head, q_head))
            return lax.fori_loop(begin, end, send, step)

        def send_range(index: Any, step: Any) -> Any:
            source, target, rows = (ctx.range_word(index, i) for i in range(3))

            @pl.loop(0, pl.cdiv(rows, config.block))
            def _(block: Any) -> None:
                done = block * config.block
                left = jnp.minimum(rows - done, config.block)
                first_rows = [source + done, target + done]
                if has_statistics:
                    first_rows.append(ctx.range_word(index, 3) + done)
                _send_block(ctx, step + block, first_rows, (left, q_head), block_head)

            return step + pl.cdiv(rows, config.block)

        return lax.fori_loop(begin, end, send_range, step)

    @pl.when(blocks > 0)
    def _() -> None:
        first_cut = lax.fori_loop(0, shape.streamed_per_head, send_head, step)
        if shape.has_mask:
            send_cut = functools.partial(send_head, is_cut=True)
            lax.fori_loop(0, shape.streamed_per_head, send_cut, first_cut)

    @pl.when(blocks == 0)
    def _() -> None:
        # A block without rows: every tile that a consumer receives has a block.
        zero = jnp.int32(0)
        absent = [operands.statistics.shape[-1] - ABSENT_ROWS] if has_statistics else []
        words = [zero] * (BLOCK_WORDS + MASK_WORDS * shape.has_mask)
        if shape.has_mask:
            words[FLAGS] = jnp.int32(masked.NO_ROW_SEES)
        absent += [zero] * shape.reads_stored
        _send_block(ctx, step, [zero, zero, *absent], words, zero)

    return step + jnp.maximum(blocks, 1)


def _send_range_block(
    ctx: BackwardContext,
    tile: Any,
    heads: tuple[Any, Any],
    index: Any,
    block: Any,
    step: Any,
    flags: Any,
) -> None:
    """Sends a block of a range; `heads`: of the block, and of its queries."""
    shape, size = ctx.shape, ctx.config.block
    block_head, q_head = heads
    place = mosaic.opaque(index)
    source, target, rows, first = (ctx.range_word(place, i) for i in range(4))
    first = first if shape.is_for_keys else jnp.int32(0)
    done = block * size
    first_rows = [source + done, target + done]
    if shape.has_softmax and shape.is_for_keys:
        first_rows.append(first + done)
    if shape.reads_stored:
        first_rows[1:] = stored.rows(ctx, tile, q_head, index, source, block, masked.unseen(flags))
    words = (jnp.minimum(rows - done, size), q_head, flags, first + done)
    _send_block(ctx, step, first_rows, words, block_head)


def _send_whole(
    ctx: BackwardContext, tile: Any, heads: tuple[Any, Any], index: Any, step: Any
) -> Any:
    """Sends the blocks of a range that need no mask; returns the next block's step."""
    begin, end = masked.whole_blocks(ctx, tile, index)

    @pl.loop(begin, end)
    def _(block: Any) -> None:
        _send_range_block(ctx, tile, heads, index, block, step + (block - begin), jnp.int32(0))

    return step + (end - begin)


def _send_cut(
    ctx: BackwardContext, tile: Any, heads: tuple[Any, Any], last: Any, index: Any, step: Any
) -> Any:
    """Sends a range's other blocks that the tile's rows see, before step `last`; likewise."""
    whole, whole_end = masked.whole_blocks(ctx, tile, index)
    first = masked.range_start(ctx, index)

    def after_whole(block: Any) -> Any:
        return jnp.where(block == whole, whole_end, block)

    def send(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        block, step = carry
        is_seen, flags = masked.block_flags(ctx, tile, first, block * ctx.config.block)

        @pl.when(is_seen)
        def _() -> None:
            _send_range_block(ctx, tile, heads, index, block, step, flags)

        return after_whole(block + 1), step + is_seen.astype(jnp.int32)

    begin = ctx.tile_word(tile, masked.BEGIN_BLOCK) - lax.div(first, WGMMA_M)
    count = masked.range_blocks(ctx, index)
    start = after_whole(jnp.maximum(begin, 0)), step
    return lax.while_loop(lambda x: (x[0] < count) & (x[1] < last), send, start)[1]


def _send_taken(ctx: BackwardContext) -> None:
    """Sends the item with the CTA's number, then items that it takes by the counter, and an end."""
    shape, ring = ctx.shape, ctx.shared.stationary
    items = ctx.tile_count * shape.heads

    def send(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        item, number, step = carry
        step = _send_item(ctx, number, item, step)
        return item + 1, ctx.number_after(number, item), step

    start = (jnp.int32(0), ctx.worker, jnp.int32(0))
    item, _, _ = lax.while_loop(lambda carry: carry[1] < items, send, start)
    zero = jnp.int32(0)
    ring.send_words(item, (zero, zero, jnp.int32(END)), after=ring)
    has_statistics = ctx.shared.statistics_free is not None
    copies = 2 * NUM_CONSUMERS * ring.tiles[1].shape[3] + STATISTICS * has_statistics
    # In place of copies, which arrive when they are complete.
    for _ in range(0 if shape.reads_stored else copies):
        plgpu.barrier_arrive(ring.ready_at(item))


def produce(ctx: BackwardContext) -> None:
    """The producer warp."""
    if ctx.shape.has_mask:
        _send_taken(ctx)
    else:

        def send(item: Any, step: Any) -> Any:
            return _send_item(ctx, ctx.worker + item * ctx.shape.workers, item, step)

        lax.fori_loop(0, ctx.item_count, send, jnp.int32(0))
    ctx.shared.streamed.drain()
    ctx.shared.stationary.drain()
    if ctx.shared.statistics_free is not None:
        plgpu.barrier_wait(ctx.shared.statistics_free.at[0])
