"""A consumer warpgroup of the backward kernels: computes 64 rows of every tile of its CTA."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.activations import slopes as gdpa_slopes
from ikbo_jax.pallas.gdpa_backward.context import (
    BLOCKS,
    FIRST_ROW,
    HAS_BLOCKS,
    HEAD,
    ROWS,
    WarpgroupContext,
)
from ikbo_jax.pallas.gdpa_backward.store import stage_rows, store_f32_rows, zero_tiles
from ikbo_jax.pallas.hopper import mma, mosaic, stores
from ikbo_jax.problems.gdpa_backward import SLOTS
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WARPGROUP_SIZE, WGMMA_M

#: Named barrier at which the consumers wait for each other.
CONSUMER_BARRIER = 4
#: Beside two sums, this many columns of scores are activated and then multiplied at a time: without
#: products in between, ptxas activates all columns together, and spills. For the same reason the
#: product in flight meanwhile is the one with activated scores, not the gradients of weights.
ACTIVATED_COLUMNS = 16
CONSUMER_THREADS = NUM_CONSUMERS * WARPGROUP_SIZE


def _receive(ctx: WarpgroupContext, step: Any) -> None:
    """Waits for a block, and zeroes its rows past the sequence's end."""
    shared, stage = ctx.shared, ctx.stage(step)
    plgpu.barrier_wait(shared.streamed_ready.at[stage])
    rows = shared.blocks[stage, 0]

    # A row of zeros has scores 0, weights 0, and gradients of scores 0.
    @pl.when(rows < ctx.config.block)
    def _() -> None:
        consumer = mosaic.warpgroup_index("warpgroup", interpret=ctx.interpret)
        tiles = shared.streamed[0].at[stage, consumer]
        stores.zero_rows(tiles, rows, interpret=ctx.interpret)
        plgpu.commit_smem()
        mosaic.named_barrier("sync", jnp.int32(CONSUMER_BARRIER), CONSUMER_THREADS)


def _receive_tile(ctx: WarpgroupContext, item: Any) -> None:
    """Waits for a tile; zeroes the operands of a tile without blocks, since they are arbitrary."""
    shared, slot = ctx.shared, ctx.slot(item)
    plgpu.barrier_wait(shared.stationary_ready.at[slot])

    @pl.when(shared.items[slot, HAS_BLOCKS] == 0)
    def _() -> None:
        for operand in (0, 1):
            zero_tiles(
                shared.stationary[0].at[slot, operand, ctx.consumer], interpret=ctx.interpret
            )
        plgpu.commit_smem()


def _issue_scores(ctx: WarpgroupContext, operand: int, item: Any, step: Any) -> jax.Array:
    """Issues stationary rows times a block: scores for operand 0, gradients of activated scores
    for operand 1."""
    # Values that LLVM computes from the tile's number before the loop would occupy registers in it.
    slot = ctx.slot(mosaic.opaque(item, interpret=ctx.interpret))
    consumer = mosaic.warpgroup_index("warpgroup", interpret=ctx.interpret)
    return mma.product(
        ctx.shared.stationary[0].at[slot, operand, consumer],
        ctx.shared.streamed[0].at[ctx.stage(step), operand],
        ctx.shape.head_dim,
        interpret=ctx.interpret,
    )


def _issue_sum(
    ctx: WarpgroupContext,
    total: jax.Array | None,
    rows: jax.Array,
    begin: int,
    operand: int,
    step: Any,
) -> jax.Array:
    """Issues `total` (None: zero) plus `rows` times a block's rows from `begin` on."""
    return mma.add_product(
        total,
        rows,
        ctx.shared.streamed[0].at[ctx.stage(step), operand],
        ctx.shared.staging.at[ctx.consumer, operand] if ctx.interpret else None,
        columns=ctx.shape.head_dim,
        begin=begin,
        interpret=ctx.interpret,
    )


def _activate(ctx: WarpgroupContext, head: Any, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(weights, slopes) of a query head's scores."""
    spec = ctx.shape.activation

    def activate() -> tuple[jax.Array, jax.Array]:
        return gdpa_slopes.weights_and_slopes(spec, head, scores, interpret=ctx.interpret)

    if not ctx.shape.has_activation_in_branch:
        return activate()
    # This branch is always taken: ptxas moves no code across it, and would spill without it.
    weights, slope = lax.cond(head >= 0, activate, lambda: (scores, scores))
    return weights, slope


def _multiply(
    ctx: WarpgroupContext,
    sums: tuple[jax.Array, ...] | None,
    scores: jax.Array,
    item: Any,
    step: Any,
) -> tuple[jax.Array, ...]:
    """Issues the sums (None: zero) plus the products of a block, whose scores are computed."""
    shape, dtype = ctx.shape, ctx.operands.stationary[0].dtype
    head = ctx.shared.blocks[ctx.stage(step), 1]
    columns = scores.shape[1]
    total, d_value = (None, None) if sums is None else (*sums, None)[:2]
    part = ACTIVATED_COLUMNS if shape.is_for_keys else columns
    slopes = []
    for begin in range(0, columns, part):
        if begin + part >= columns:
            d_weights = _issue_scores(ctx, 1, item, step)
        some = lax.slice(scores, (0, begin), (WGMMA_M, begin + part))
        weights, slope = _activate(ctx, head, some)
        slopes.append(slope)
        if shape.is_for_keys:
            d_value = _issue_sum(ctx, d_value, weights.astype(dtype), begin, 1, step)
    mma.wait(1 if shape.is_for_keys else 0, interpret=ctx.interpret)
    d_weights = mma.after_wait(d_weights, interpret=ctx.interpret)
    slope = jnp.concatenate(slopes, axis=1)
    d_scores = gdpa_slopes.d_scores(shape.activation, d_weights, slope).astype(dtype)
    total = _issue_sum(ctx, total, d_scores, 0, 0, step)
    return (total,) if d_value is None else (total, d_value)


def _complete(
    ctx: WarpgroupContext, sums: tuple[jax.Array, ...], step: Any
) -> tuple[jax.Array, ...]:
    """The sums after their wait; frees the block of the last products."""
    sums = tuple(mma.after_wait(x, interpret=ctx.interpret) for x in sums)
    plgpu.barrier_arrive(ctx.shared.streamed_free.at[ctx.stage(step)])
    return sums


def _tile(ctx: WarpgroupContext, item: Any, first_step: Any) -> Any:
    """Computes and stores a tile; returns the next tile's first step."""
    shared = ctx.shared
    _receive_tile(ctx, item)

    def add(step: Any, sums: tuple[jax.Array, ...] | None) -> tuple[jax.Array, ...]:
        _receive(ctx, step)
        scores = _issue_scores(ctx, 0, item, step)
        mma.wait(0, interpret=ctx.interpret)
        scores = mma.after_wait(scores, interpret=ctx.interpret)
        if sums is not None:
            sums = _complete(ctx, sums, step - 1)
        return _multiply(ctx, sums, scores, item, step)

    sums = add(first_step, None)
    pl.when(item > 0)(functools.partial(_free_stored_slot, ctx, item - 1))
    end = first_step + shared.items[ctx.slot(item), BLOCKS]
    sums = lax.fori_loop(first_step + 1, end, add, sums)
    mma.wait(0, interpret=ctx.interpret)
    sums = _complete(ctx, sums, end - 1)
    _store(ctx, mosaic.opaque(item, interpret=ctx.interpret), sums)
    return end


def _free_stored_slot(ctx: WarpgroupContext, item: Any) -> None:
    """Frees the slot of tile `item`, after TMA has read the results that were staged in it."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(ctx.shared.stationary_free.at[ctx.slot(item)])


def _store(ctx: WarpgroupContext, item: Any, sums: tuple[jax.Array, ...]) -> None:
    """Stores the rows of a tile."""
    consumer = mosaic.warpgroup_index("warpgroup", interpret=ctx.interpret)
    ctx = ctx._replace(consumer=consumer)
    slot, words = ctx.slot(item), ctx.shared.items
    first_row = words[slot, FIRST_ROW] + consumer * WGMMA_M
    rows = jnp.clip(words[slot, ROWS] - consumer * WGMMA_M, 0, WGMMA_M)
    head = words[slot, HEAD]
    values = [
        (total * jnp.float32(scale)).astype(result.dtype)
        for total, scale, result in zip(sums, ctx.shape.scales, ctx.results, strict=True)
    ]
    if ctx.results[0].dtype == jnp.float32:
        staging = ctx.shared.f32_staging.at[consumer] if ctx.interpret else None
        store_f32_rows(
            ctx.results[0], values[0], first_row, head, rows, staging, interpret=ctx.interpret
        )
    else:
        _store_staged(ctx, values, slot, first_row, head, rows)


def _store_staged(
    ctx: WarpgroupContext, values: list[jax.Array], slot: Any, first_row: Any, head: Any, rows: Any
) -> None:
    """Stages rows in the tile's slot; TMA stores them if all 64 rows belong to the tile."""
    matrix_views, copy_views = (
        [view.at[slot, operand, ctx.consumer] for operand in range(len(values))]
        for view in ctx.shared.stationary
    )
    for view, value in zip(matrix_views, values, strict=True):
        stage_rows(view, value, interpret=ctx.interpret)
    plgpu.commit_smem()

    @pl.when(rows == WGMMA_M)
    def _() -> None:
        for view, result in zip(copy_views, ctx.results, strict=True):
            for i in range(ctx.shape.column_blocks):
                plgpu.copy_smem_to_gmem(
                    view.at[i], result.at[pl.ds(first_row, WGMMA_M), head, ctx.columns(i)]
                )

    @pl.when(rows < WGMMA_M)
    def _() -> None:
        for view, result in zip(matrix_views, ctx.results, strict=True):
            stores.store_staged_rows(
                result, view, first_row, head, jnp.int32(0), rows, interpret=ctx.interpret
            )
        plgpu.commit_smem()  # TMA will write operands where these threads have read


def _all_tiles(ctx: WarpgroupContext) -> None:
    """All tiles of this CTA, at least one."""
    count = ctx.item_count
    lax.fori_loop(0, count, functools.partial(_tile, ctx), jnp.int32(0))
    _free_stored_slot(ctx, count - 1)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def consume(ctx: WarpgroupContext) -> None:
    """A consumer warpgroup."""
    shared = ctx.shared
    for free, count in ((shared.streamed_free, ctx.config.stages), (shared.stationary_free, SLOTS)):
        for i in range(count):
            plgpu.barrier_arrive(free.at[i])
    pl.when(ctx.item_count > 0)(functools.partial(_all_tiles, ctx))
