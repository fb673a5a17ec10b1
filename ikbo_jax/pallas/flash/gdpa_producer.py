"""The producer warp of the GDPA forward kernel: describes items, and loads operands by TMA."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.flash import tile_list
from ikbo_jax.pallas.flash.gdpa_context import Destination, Item, WarpgroupContext
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WGMMA_M


class _Progress(NamedTuple):
    """How much the producer has sent."""

    items: Any
    steps: Any  # blocks of keys; between items, as many blocks of values
    is_kept: Any  # 1: the next item reuses the last item's blocks


def _load_block(
    ctx: WarpgroupContext, source: Any, tiles: Any, ready: Any, first_row: Any, head: Any
) -> None:
    """Loads a block of keys or values into a stage; it may reach past the sequence's end."""
    for i in range(ctx.shape.column_blocks):
        plgpu.copy_gmem_to_smem(
            source.at[pl.ds(first_row, ctx.config.block_kv), head, ctx.columns(i)],
            tiles.at[i],
            ready,
        )


def _load_queries(ctx: WarpgroupContext, slot: Any, source: Any, head: Any) -> None:
    for consumer in range(NUM_CONSUMERS):
        row = jnp.minimum(source + consumer * WGMMA_M, ctx.shape.q_rows - 1)
        for i in range(ctx.shape.column_blocks):
            plgpu.copy_gmem_to_smem(
                ctx.operands.query.at[pl.ds(row, WGMMA_M), head, ctx.columns(i)],
                ctx.shared.query[1].at[slot, consumer, i],
                ctx.shared.q_ready.at[slot],
            )


def _describe(
    ctx: WarpgroupContext, progress: _Progress, item: Item, destination: Destination
) -> Any:
    """Waits for the next query slot, sends the descriptor of its item, and returns the slot."""
    slot, item_slot = ctx.slot(progress.items), ctx.item_slot(progress.items)
    plgpu.barrier_wait(ctx.shared.q_free.at[slot])
    for i, word in enumerate((*item, *destination)):
        ctx.shared.items[item_slot, i] = word
    plgpu.barrier_arrive(ctx.shared.item_ready.at[item_slot])
    return slot


def _keeps(ctx: WarpgroupContext, tile: Any, end: Any, blocks: Any) -> Any:
    """1 if the next tile, before `end`, has the keys of `tile`, and the rings hold all of them."""
    if ctx.config.run == 1:
        return jnp.int32(0)
    words = ctx.operands.words
    next_item = jnp.minimum(tile + 1, end - 1)
    is_same = (tile + 1 < end) & (blocks <= min(ctx.config.k_stages, ctx.config.v_stages))
    for word in (tile_list.KV_START, tile_list.KV_LENGTH):
        is_same = is_same & (words[next_item, word] == words[tile, word])
    return is_same.astype(jnp.int32)


def _send_item(
    ctx: WarpgroupContext, head: Any, end: Any, tile: Any, progress: _Progress
) -> _Progress:
    """Sends the descriptor of one head of a tile, whose run ends at tile `end`; loads operands."""
    shape, shared, operands = ctx.shape, ctx.shared, ctx.operands
    kv_head = lax.div(head, shape.q_heads // shape.kv_heads)
    source, target, rows, first_key, length = (
        operands.words[tile, word] for word in range(tile_list.TILE_WORDS)
    )
    block_kv = ctx.config.block_kv
    blocks = lax.div(length + (block_kv - 1), block_kv)
    is_resident = progress.is_kept
    slot = _describe(
        ctx, progress, Item(blocks, length, head, is_resident), Destination(head, target, rows)
    )
    _load_queries(ctx, slot, source, head)

    def send(source: Any, tiles: Any, ready: Any, block: Any) -> None:
        def load() -> None:
            _load_block(ctx, source, tiles, ready, first_key + block * block_kv, kv_head)

        if ctx.config.run == 1:
            load()
            return
        pl.when(is_resident == 0)(load)

        @pl.when(is_resident != 0)
        def _() -> None:  # both consumers have read the block, and may read it again
            for _ in range(shape.column_blocks):
                plgpu.barrier_arrive(ready)

    def send_key(block: Any) -> None:
        stage = ctx.k_stage(progress.steps + block)
        plgpu.barrier_wait(shared.k_free.at[stage])
        send(operands.key, shared.key[1].at[stage], shared.k_ready.at[stage], block)

    def send_value(block: Any) -> None:
        stage = ctx.v_stage(progress.steps + block)
        plgpu.barrier_wait(shared.v_free.at[stage])
        send(operands.value, shared.value[1].at[stage], shared.v_ready.at[stage], block)

    send_key(jnp.int32(0))

    @pl.loop(1, blocks)
    def send_rest(block: Any) -> None:
        send_key(block)
        send_value(block - 1)

    send_value(blocks - 1)
    is_kept = _keeps(ctx, tile, end, blocks)
    return _Progress(progress.items + 1, ctx.step_after(progress.steps, blocks, is_kept), is_kept)


def _send_run(ctx: WarpgroupContext, i: Any, progress: _Progress) -> _Progress:
    """Sends this CTA's `i`-th run: one head of consecutive tiles."""
    run, heads, tiles = ctx.config.run, ctx.shape.q_heads, ctx.operands.counts[0]
    number = ctx.work_item(i)
    begin, head = lax.div(number, heads) * run, lax.rem(number, heads)
    end = jnp.minimum(begin + run, tiles)
    return lax.fori_loop(begin, end, functools.partial(_send_item, ctx, head, end), progress)


def produce(ctx: WarpgroupContext) -> None:
    """The producer warp."""
    shared, config = ctx.shared, ctx.config
    zero = jnp.int32(0)
    runs = lax.div(ctx.operands.counts[0] + (config.run - 1), config.run)
    count = ctx.work_items(runs * ctx.shape.q_heads)
    progress = _Progress(zero, zero, zero)
    progress = lax.fori_loop(0, count, functools.partial(_send_run, ctx), progress)
    _describe(ctx, progress, Item(zero, zero, zero, zero), Destination(zero, zero, zero))
    # All arrivals must happen before the barriers' memory is released.
    rings = ((shared.k_free, config.k_stages), (shared.v_free, config.v_stages))
    for free, stages in (*rings, (shared.q_free, config.q_slots)):
        for stage in range(stages):
            plgpu.barrier_wait(free.at[stage])
