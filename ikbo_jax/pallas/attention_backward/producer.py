"""The two warps of the attention backward kernel's producer: one loads, one stores d_query."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.attention_backward.context import (
    PART_PLANE,
    PART_ROW,
    PART_TILE,
    BackwardContext,
    send_items,
)
from ikbo_jax.problems.attention_backward import BLOCK_KV, SUM_COLUMNS
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WGMMA_M


def _send_item(ctx: BackwardContext, item: Any, number: Any, step: Any) -> Any:
    """Sends a tile of keys and all its query blocks; returns the next item's first step."""
    shape, shared, users = ctx.shape, ctx.shared, ctx.operands.users
    slot, block_q = shared.keys_values.slot(item), ctx.config.block_q
    tile, rest = lax.rem(number, shape.kv_tiles), lax.div(number, shape.kv_tiles)
    head, part = lax.rem(rest, shape.kv_heads), lax.div(rest, shape.kv_heads)
    first_row, rows, first_target = (users[part, i] for i in range(3))
    first_key = shape.first_key + tile * BLOCK_KV
    keys = users[part, 3] - first_key
    user = lax.div(part, shape.sizes.splits)
    blocks = jnp.where(keys > 0, pl.cdiv(rows, block_q), 0)
    words = (blocks, rows, part, head, tile, keys, first_target)
    shared.items.send_words(item, words, after=shared.keys_values)

    @pl.when(blocks > 0)
    def _() -> None:
        for operand, source in enumerate((ctx.operands.key, ctx.operands.value)):
            for consumer in range(NUM_CONSUMERS):
                first = jnp.minimum(first_key + consumer * WGMMA_M, source.shape[1] - 1)
                tiles = shared.keys_values.tiles[1].at[slot, operand, consumer]
                index = (user, pl.ds(first, WGMMA_M), head)
                ctx.load(source, index, tiles, shared.keys_values.ready.at[slot])

    @pl.loop(0, blocks)
    def _(block: Any) -> None:
        begin = block * block_q
        _send_block(ctx, step + block, first_row + begin, first_target + begin, head)

    return step + blocks


def _send_block(ctx: BackwardContext, step: Any, row: Any, target: Any, head: Any) -> None:
    """Loads a block of queries, cotangents and statistics, which are at the rows' target."""
    ring, block_q = ctx.shared.queries, ctx.config.block_q
    for operand, source in enumerate((ctx.operands.query, ctx.operands.d_out)):
        number = ctx.query_slot(step, operand)
        ready, tiles = ring.ready_at(number), ring.copied(number)
        if ctx.has_halves or operand == 0:
            ring.await_free(number)
            copied = ctx.shared.statistics.at[ring.slot(number)]
            which = pl.ds(operand, 1) if ctx.has_halves else slice(None)
            # Of halves, at least whole 128 bytes; the array ends with padding.
            rows = pl.ds(target, copied.shape[1])
            source_rows = ctx.operands.statistics.at[head, which, rows]
            plgpu.copy_gmem_to_smem(source_rows, copied, ready)
        half = tiles if ctx.has_halves else tiles.at[operand]
        ctx.load(source, (pl.ds(row, block_q), head), half, ready)


def produce(ctx: BackwardContext) -> None:
    """Loads the operands of the CTA's items, on one warp."""
    shared = ctx.shared
    item = send_items(ctx, ctx.shape.items, functools.partial(_send_item, ctx))
    shared.items.send_words(item, (jnp.int32(-1),), after=shared.keys_values)
    # All arrivals must happen before the barriers' memory is released.
    shared.queries.drain()
    shared.keys_values.drain()


def _write_part(ctx: BackwardContext) -> Any:
    """Stores a part of d_query; returns the next part's tile of keys, negative at the end."""
    shared, slot, block_q = ctx.shared, ctx.config.kv_slots, ctx.config.block_q
    plane, row = (shared.items.words[slot, i] for i in (PART_PLANE, PART_ROW))
    for i in range(shared.d_query.shape[0]):
        columns = pl.ds(i * SUM_COLUMNS, SUM_COLUMNS)
        target = ctx.outputs.d_query.at[plane, pl.ds(row, block_q), columns]
        plgpu.copy_smem_to_gmem(shared.d_query.at[i], target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(shared.part_free.at[0])
    plgpu.barrier_wait(shared.part_ready.at[0])
    return shared.items.words[slot, PART_TILE]


def write(ctx: BackwardContext) -> None:
    """Stores parts of d_query, on another warp."""
    shared = ctx.shared
    plgpu.barrier_arrive(shared.part_free.at[0])
    plgpu.barrier_wait(shared.part_ready.at[0])
    first = shared.items.words[ctx.config.kv_slots, PART_TILE]
    lax.while_loop(lambda tile: tile >= 0, lambda _: _write_part(ctx), first)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
