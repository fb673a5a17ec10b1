"""The three warps of the attention backward kernel's producer: one loads, two store d_query."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.attention_backward import store
from ikbo_jax.pallas.attention_backward.context import (
    BLOCKS,
    PART_COUNTER,
    PART_PLANE,
    PART_ROW,
    PART_TILE,
    SUM_COLUMNS,
    WarpgroupContext,
    part_shape,
)
from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.problems.attention_backward import BLOCK_KV
from ikbo_jax.problems.hopper import BLOCK_K, NUM_CONSUMERS, WGMMA_M


def _send_item(ctx: WarpgroupContext, item: Any, number: Any, step: Any) -> Any:
    """Sends a tile of keys and all its query blocks; returns the next item's first step."""
    shape, shared, users = ctx.shape, ctx.shared, ctx.operands.users
    slot, block_q = ctx.slot(item), ctx.config.block_q
    tile, rest = lax.rem(number, shape.kv_tiles), lax.div(number, shape.kv_tiles)
    head, part = lax.rem(rest, shape.kv_heads), lax.div(rest, shape.kv_heads)
    first_row, rows, first_target = (users[part, i] for i in range(3))
    keys = users[part, 3] - tile * BLOCK_KV
    user = lax.div(part, shape.splits)
    blocks = jnp.where(keys > 0, pl.cdiv(rows, block_q), 0)
    plgpu.barrier_wait(shared.kv_free.at[slot])
    for i, word in enumerate((blocks, rows, part, head, tile, keys, first_target)):
        shared.words[slot, i] = word
    plgpu.barrier_arrive(shared.item_ready.at[slot])

    @pl.when(blocks > 0)
    def _() -> None:
        for operand, source in enumerate((ctx.operands.key, ctx.operands.value)):
            for consumer in range(NUM_CONSUMERS):
                first = jnp.minimum(tile * BLOCK_KV + consumer * WGMMA_M, shape.kv_len - 1)
                for i in range(shape.column_blocks):
                    plgpu.copy_gmem_to_smem(
                        source.at[user, pl.ds(first, WGMMA_M), head, ctx.columns(i)],
                        shared.keys_values[1].at[slot, operand, consumer, i],
                        shared.kv_ready.at[slot],
                    )

    @pl.loop(0, blocks)
    def _(block: Any) -> None:
        _send_block(ctx, step + block, first_row + block * block_q, head)

    return step + blocks


def _send_block(ctx: WarpgroupContext, step: Any, row: Any, head: Any) -> None:
    """Loads a block of queries, cotangents and statistics."""
    shared, stage, block_q = ctx.shared, ctx.stage(step), ctx.config.block_q
    ready = shared.queries_ready.at[stage]
    plgpu.barrier_wait(shared.queries_free.at[stage])
    plgpu.copy_gmem_to_smem(
        ctx.operands.statistics.at[head, :, pl.ds(row, block_q)],
        shared.statistics.at[stage],
        ready,
    )
    for operand, source in enumerate((ctx.operands.query, ctx.operands.d_out)):
        for i in range(ctx.shape.column_blocks):
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds(row, block_q), head, ctx.columns(i)],
                shared.queries[1].at[stage, operand, i],
                ready,
            )


def produce(ctx: WarpgroupContext) -> None:
    """The warp that loads."""
    shared, config = ctx.shared, ctx.config

    def take(item: Any) -> Any:
        return mosaic.next_ticket(ctx.counters.tickets, item, interpret=ctx.interpret)

    def send(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        item, number, step = carry
        step = _send_item(ctx, item, number, step)
        return item + 1, take(item + 1), step

    zero = jnp.int32(0)
    item, _, _ = lax.while_loop(
        lambda carry: carry[1] < ctx.shape.items, send, (zero, take(zero), zero)
    )
    slot = ctx.slot(item)
    plgpu.barrier_wait(shared.kv_free.at[slot])
    shared.words[slot, BLOCKS] = jnp.int32(-1)
    plgpu.barrier_arrive(shared.item_ready.at[slot])
    # All arrivals must happen before the barriers' memory is released.
    for free, count in ((shared.queries_free, config.stages), (shared.kv_free, config.kv_slots)):
        for i in range(count):
            plgpu.barrier_wait(free.at[i])


def _write_part(ctx: WarpgroupContext, consumer: int, tile: Any) -> Any:
    """Stores a part of d_query, or adds it to the parts of the tiles of keys before `tile`."""
    shared, slot = ctx.shared, ctx.config.kv_slots + consumer
    plane, row, counter = (shared.words[slot, i] for i in (PART_PLANE, PART_ROW, PART_COUNTER))
    is_sum = ctx.config.d_query == "sum" and ctx.shape.kv_tiles > 1
    if is_sum:
        store.await_counter(ctx.counters.finished, counter, tile, interpret=ctx.interpret)
    _, rows, _ = part_shape(ctx.shape.head_dim, ctx.config.block_q)
    first_column = 0 if rows < ctx.config.block_q else consumer * BLOCK_K

    def copy(reduction: Any) -> None:
        for i, column in enumerate(range(first_column, first_column + BLOCK_K, SUM_COLUMNS)):
            if column >= ctx.shape.head_dim:
                continue
            columns = pl.ds(column, SUM_COLUMNS)
            source = shared.d_query.at[consumer, i]
            target = ctx.outputs.d_query.at[plane, pl.ds(row, rows), columns]
            if reduction is not None and ctx.interpret:  # the interpreter only stores
                target[...] = target[...] + source[...]
            else:
                plgpu.copy_smem_to_gmem(source, target, reduction_op=reduction)

    if is_sum:
        pl.when(tile > 0)(lambda: copy("add"))
        pl.when(tile == 0)(lambda: copy(None))
    else:
        copy(None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(shared.part_free.at[consumer])
    if is_sum:
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        store.signal_counter(ctx.counters.finished, counter, interpret=ctx.interpret)
    plgpu.barrier_wait(shared.part_ready.at[consumer])
    return shared.words[slot, PART_TILE]


def write(ctx: WarpgroupContext, consumer: int) -> None:
    """The warp that stores a consumer's parts of d_query."""
    shared, slot = ctx.shared, ctx.config.kv_slots + consumer
    plgpu.barrier_arrive(shared.part_free.at[consumer])
    plgpu.barrier_wait(shared.part_ready.at[consumer])
    first = shared.words[slot, PART_TILE]
    lax.while_loop(lambda tile: tile >= 0, lambda tile: _write_part(ctx, consumer, tile), first)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
