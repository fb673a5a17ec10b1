"""The producer warp of the backward kernels: loads tiles, and the blocks of each tile, by TMA."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.gdpa_backward import masked
from ikbo_jax.pallas.gdpa_backward.context import BackwardContext
from ikbo_jax.pallas.gdpa_backward.softmax import ABSENT_ROWS
from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.worklist.lists import STATISTICS_ROW
from ikbo_jax.problems.gdpa_backward import STATISTICS
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WGMMA_M


def _send_stationary(ctx: BackwardContext, item: Any, tile: Any, head: Any) -> None:
    """Sends the descriptor of a tile, and loads its two stationary operands."""
    ring = ctx.shared.stationary
    slot = ring.slot(item)
    first_rows = (ctx.tile_word(tile, 0), ctx.tile_word(tile, 1))
    blocks = ctx.tile_word(tile, 5)
    has_blocks = jnp.minimum(blocks, 1)
    rows = ctx.tile_word(tile, 2)
    last = ctx.tile_word(tile, STATISTICS_ROW) if ctx.shape.has_mask else jnp.maximum(blocks, 1)
    words = (first_rows[1], rows, head, has_blocks, last)
    ring.send_words(item, words, after=ring)
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
    ctx: BackwardContext, step: Any, first_rows: list[Any], words: tuple[Any, ...], head: Any
) -> None:
    """Sends the descriptor of a block, and loads its two operands and, if they have a first row,
    its statistics."""
    ring = ctx.shared.streamed
    ring.send_words(step, words, after=ring)
    for operand, (source, row) in enumerate(
        zip(ctx.operands.streamed, first_rows[:2], strict=True)
    ):
        tiles, ready = ring.copied(step).at[operand], ring.ready_at(step)
        ctx.load(source, (pl.ds(row, ctx.config.block), head), tiles, ready)
    for row in first_rows[2:]:
        _load_statistics(ctx, head, row, ring.slot(step), ring.ready_at(step))


def _send_item(ctx: BackwardContext, item: Any, step: Any) -> Any:
    """Sends one head of a tile, and all its blocks; returns the next item's first step."""
    shape, config, operands = ctx.shape, ctx.config, ctx.operands
    number = ctx.worker + item * shape.workers
    tile, head = lax.div(number, shape.heads), lax.rem(number, shape.heads)
    _send_stationary(ctx, item, tile, head)
    begin, end, blocks = (ctx.tile_word(tile, i) for i in (3, 4, 5))
    has_statistics = shape.has_softmax and shape.is_for_keys
    if shape.has_mask:
        return _send_seen_blocks(ctx, tile, head, step)

    def send_head(index: Any, step: Any) -> Any:
        block_head = lax.div(head, shape.heads_per_streamed) * shape.streamed_per_head + index
        q_head = block_head if shape.is_for_keys else head

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
        lax.fori_loop(0, shape.streamed_per_head, send_head, step)

    @pl.when(blocks == 0)
    def _() -> None:
        # A block without rows: every tile that a consumer receives has a block.
        zero = jnp.int32(0)
        absent = [operands.statistics.shape[-1] - ABSENT_ROWS] if has_statistics else []
        _send_block(ctx, step, [zero, zero, *absent], (zero, zero), zero)

    return step + jnp.maximum(blocks, 1)


def _send_seen_blocks(ctx: BackwardContext, tile: Any, head: Any, step: Any) -> Any:
    """Sends the blocks that a tile's rows see, and an end; returns the next item's first step."""
    shape, size = ctx.shape, ctx.config.block

    def send_head(index: Any, step: Any) -> Any:
        block_head = lax.div(head, shape.heads_per_streamed) * shape.streamed_per_head + index
        q_head = block_head if shape.is_for_keys else head

        def send_range(index: Any, step: Any) -> Any:
            first = ctx.range_word(index, 3) if shape.is_for_keys else jnp.int32(0)

            def send(block: Any, step: Any) -> Any:
                done = block * size
                flags = masked.block_flags(ctx, tile, first, done)
                is_seen = flags != masked.NO_ROW_SEES

                @pl.when(is_seen)
                def _() -> None:
                    # Read here, since the comparisons above leave no register for them.
                    place = mosaic.opaque(index, interpret=ctx.interpret)
                    source, target, rows = (ctx.range_word(place, i) for i in range(3))
                    rows_left = jnp.minimum(rows - done, size)
                    first_rows = [source + done, target + done]
                    if shape.has_softmax and shape.is_for_keys:
                        first_rows.append(first + done)
                    words = (rows_left, q_head, flags, first + done)
                    _send_block(ctx, step, first_rows, words, block_head)

                return step + is_seen.astype(jnp.int32)

            count = pl.cdiv(ctx.range_word(index, 2), size)
            return lax.fori_loop(*masked.block_range(ctx, tile, first, count), send, step)

        begin, end = ctx.tile_word(tile, 3), ctx.tile_word(tile, 4)
        if not shape.is_for_keys:  # tiles of queries have one range; without keys, no block of it
            return send_range(begin, step)
        return lax.fori_loop(begin, end, send_range, step)

    step = lax.fori_loop(0, shape.streamed_per_head, send_head, step)
    ring, zero = ctx.shared.streamed, jnp.int32(0)
    ring.send_words(step, (jnp.int32(size), zero, jnp.int32(masked.BOTH_END), zero), after=ring)
    copies = 2 * ring.tiles[1].shape[2] + STATISTICS * (shape.has_softmax and shape.is_for_keys)
    for _ in range(copies):  # in place of copies, which arrive when they are complete
        plgpu.barrier_arrive(ring.ready_at(step))
    return step + 1


def produce(ctx: BackwardContext) -> None:
    """The producer warp."""
    lax.fori_loop(0, ctx.item_count, lambda item, step: _send_item(ctx, item, step), jnp.int32(0))
    ctx.shared.streamed.drain()
    ctx.shared.stationary.drain()
    if ctx.shared.statistics_free is not None:
        plgpu.barrier_wait(ctx.shared.statistics_free.at[0])
