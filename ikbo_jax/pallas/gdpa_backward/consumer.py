"""A consumer warpgroup of the backward kernels: computes 64 rows of every tile of its CTA."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.activations import slopes as gdpa_slopes
from ikbo_jax.pallas.gdpa_backward import masked, softmax, stored
from ikbo_jax.pallas.gdpa_backward.context import (
    BLOCKS,
    END,
    FIRST_ROW,
    HAS_BLOCKS,
    HEAD,
    ROWS,
    WHOLE_BLOCKS,
    BackwardContext,
)
from ikbo_jax.pallas.hopper import mma, mosaic, operand_tiles, stores, turns
from ikbo_jax.pallas.hopper.visible import Visible
from ikbo_jax.problems.hopper import WGMMA_M

#: Beside two sums, this many columns of scores are activated and then multiplied at a time: without
#: products in between, ptxas activates all columns together, and spills. For the same reason the
#: product in flight meanwhile is the one with activated scores, not the gradients of weights.
ACTIVATED_COLUMNS = 16


def _receive(ctx: BackwardContext, step: Any) -> None:
    """Waits for a block, and zeroes its rows past the sequence's end."""
    ring = ctx.shared.streamed
    ring.await_ready(step)
    visible = Visible(ctx.config.block, ring.word(step, 0))

    # A row of zeros has scores 0, weights 0, and gradients of scores 0.
    @pl.when(visible.is_partial)
    def _() -> None:
        consumer = mosaic.warpgroup_index()
        tiles = ring.matrix(step).at[consumer]
        visible.zero_rest(tiles)
        plgpu.commit_smem()
        turns.synchronise_consumers()


def _receive_tile(ctx: BackwardContext, item: Any) -> None:
    """Waits for a tile; zeroes the operands of a tile without blocks, since they are arbitrary."""
    ring = ctx.shared.stationary
    ring.await_ready(item)

    @pl.when(ring.word(item, HAS_BLOCKS) == 0)
    def _() -> None:
        for operand in (0, 1):
            tiles = ring.matrix(item).at[operand, ctx.consumer]
            operand_tiles.zero_tiles(tiles)
        plgpu.commit_smem()


def _issue_scores(ctx: BackwardContext, operand: int, item: Any, step: Any) -> jax.Array:
    """Issues stationary rows times a block: scores for operand 0, gradients of weights for 1."""
    # Values that LLVM computes from the tile's number before the loop would occupy registers in it.
    item = mosaic.opaque(item)
    slot = ctx.shared.stationary.slot(item)
    consumer = mosaic.warpgroup_index()
    return mma.product(
        ctx.shared.stationary.tiles[0].at[slot, operand, consumer],
        ctx.shared.streamed.matrix(step).at[operand],
        ctx.shape.head_dim,
    )


def _issue_sum(
    ctx: BackwardContext,
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
        ctx.shared.streamed.matrix(step).at[operand],
        ctx.staging(operand),
        columns=ctx.shape.head_dim,
        begin=begin,
    )


def _activate(
    ctx: BackwardContext, head: Any, scores: jax.Array, is_cut: bool
) -> tuple[jax.Array, jax.Array]:
    """(weights, slopes) of a query head's scores."""
    spec = ctx.shape.activation

    def activate() -> tuple[jax.Array, jax.Array]:
        return gdpa_slopes.weights_and_slopes(spec, head, scores)

    if not ctx.shape.has_activation_in_branch(is_cut):
        return activate()
    # This branch is always taken: ptxas moves no code across it, and would spill without it.
    weights, slope = lax.cond(head >= 0, activate, lambda: (scores, scores))
    return weights, slope


def _multiply(
    ctx: BackwardContext,
    rows: softmax.RowStatistics,
    sums: tuple[jax.Array, ...] | None,
    scores: jax.Array,
    item: Any,
    step: Any,
    mask: Any = None,
) -> tuple[jax.Array, ...]:
    """Issues sums (None: zero) plus the products of a block's scores; `mask`: flags and bits."""
    shape, dtype = ctx.shape, ctx.operands.stationary[0].dtype
    streamed = ctx.shared.streamed
    head = streamed.word(step, 1)
    columns = scores.shape[1]
    total, d_value = (None, None) if sums is None else (*sums, None)[:2]
    part = ACTIVATED_COLUMNS if shape.is_for_keys else columns
    slopes = []
    for begin in range(0, columns, part):
        if begin + part >= columns:
            d_weights = _issue_scores(ctx, 1, item, step)
        some = lax.slice(scores, (0, begin), (WGMMA_M, begin + part))
        if shape.has_softmax:
            weights, slope = softmax.weights_and_slopes(ctx, rows, some, begin, step)
        else:
            weights, slope = _activate(ctx, head, some, mask is not None)
        if mask is not None:
            weights, slope = masked.keep_seen(ctx, mask, begin, weights, slope)
        slopes.append(slope)
        if shape.is_for_keys:
            d_value = _issue_sum(ctx, d_value, weights.astype(dtype), begin, 1, step)
    mma.wait(1 if shape.is_for_keys else 0)
    d_weights = mma.after_wait(d_weights)
    slope = jnp.concatenate(slopes, axis=1)
    if shape.has_softmax:
        d_scores = softmax.d_scores(ctx, rows, d_weights, slope, step)
    else:
        d_scores = gdpa_slopes.d_scores(shape.activation, d_weights, slope)
    total = _issue_sum(ctx, total, d_scores.astype(dtype), 0, 0, step)
    if shape.has_stored:
        stored.store(ctx, d_scores, item, step)
    return (total,) if d_value is None else (total, d_value)


def _tile(ctx: BackwardContext, item: Any, first_step: Any) -> Any:
    """Computes and stores a tile; returns the next tile's first step."""
    stationary = ctx.shared.stationary
    if not ctx.shape.has_mask:
        _receive_tile(ctx, item)
    rows = softmax.receive_rows(ctx)

    def complete(step: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """The sums before `step`, after their wait; frees the block of the last products."""
        last = None if ctx.shape.has_mask else step - 1
        sums = tuple(mma.after_wait(x) for x in sums)
        if ctx.shape.has_mask:
            pl.when(step > first_step)(lambda: ctx.shared.streamed.release(step - 1))
        else:
            ctx.shared.streamed.release(last)
        return sums

    def add_cut(step: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Skips a block of which none of the consumer's rows sees a key."""
        _receive(ctx, step)

        def skip(*sums: jax.Array) -> tuple[jax.Array, ...]:
            mma.wait(0)
            return complete(step, sums)

        def compute(*sums: jax.Array) -> tuple[jax.Array, ...]:
            return add(step, sums, is_cut=True)

        is_unseen = (masked.received_flags(ctx, step) & masked.UNSEEN) != 0
        return lax.cond(is_unseen, skip, compute, *sums)

    def add(
        step: Any, sums: tuple[jax.Array, ...] | None, *, is_cut: bool = False
    ) -> tuple[jax.Array, ...]:
        if not is_cut:
            _receive(ctx, step)
        if ctx.shape.reads_stored:
            assert sums is not None
            sums = (stored.add_product(ctx, sums[0], step),)
            mma.wait(1)
            pl.when(step > first_step)(lambda: ctx.shared.streamed.release(step - 1))
            return sums
        scores = _issue_scores(ctx, 0, item, step)
        mma.wait(0)
        scores = mma.after_wait(scores)
        if sums is not None:
            sums = complete(step, sums)
        mask = None
        if is_cut:
            flags = masked.received_flags(ctx, step)
            mask = flags, masked.seen_bits(ctx, item, step, flags)
        return _multiply(ctx, rows, sums, scores, item, step, mask)

    if ctx.shape.has_mask:  # with a first block apart, gelu_tanh and silu spill up to 184 bytes
        sums = (mma.zeros(ctx.shape.head_dim, jnp.float32),) * len(ctx.shape.scales)
    else:
        sums = add(first_step, None)
    pl.when(item > 0)(functools.partial(_free_stored_slot, ctx, item - 1))
    end = first_step + stationary.word(item, BLOCKS)
    if ctx.shape.has_mask:
        first_cut = first_step + stationary.word(item, WHOLE_BLOCKS)
        sums = lax.fori_loop(first_step, first_cut, add, sums)
        sums = lax.fori_loop(first_cut, end, add_cut, sums)
    else:
        sums = lax.fori_loop(first_step + 1, end, add, sums)
    mma.wait(0)
    last = end - 1
    sums = tuple(mma.after_wait(x) for x in sums)
    ctx.shared.streamed.release(last)
    _store(ctx, mosaic.opaque(item), sums)
    return end


def _free_stored_slot(ctx: BackwardContext, item: Any) -> None:
    """Frees the slot of tile `item`, after TMA has read the results that were staged in it."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    ctx.shared.stationary.release(item)


def _store(ctx: BackwardContext, item: Any, sums: tuple[jax.Array, ...]) -> None:
    ctx = ctx.as_consumer()
    ring, consumer = ctx.shared.stationary, ctx.consumer
    slot, words = ring.slot(item), ring.words
    first_row = words[slot, FIRST_ROW] + consumer * WGMMA_M
    rows = jnp.clip(words[slot, ROWS] - consumer * WGMMA_M, 0, WGMMA_M)
    head = words[slot, HEAD]
    outputs = ctx.outputs[: len(sums)]  # gradients of scores are stored
    values = [
        (total * jnp.float32(scale)).astype(result.dtype)
        for total, scale, result in zip(sums, ctx.shape.scales, outputs, strict=True)
    ]
    if ctx.outputs[0].dtype == jnp.float32:
        place = (first_row, head, jnp.int32(0), rows)
        for output, value in zip(outputs, values, strict=True):
            stores.store_rows(output, value, *place)
        return
    staged = [
        tuple(view.at[slot, operand, consumer] for view in ring.tiles)
        for operand in range(len(values))
    ]
    for (matrix_view, _), value in zip(staged, values, strict=True):
        order = stored.query_at if ctx.shape.reads_stored else None
        operand_tiles.stage_rows(matrix_view, value, place=order)
    plgpu.commit_smem()
    stores.store_staged(
        ctx,
        staged,
        outputs,
        (first_row, head),
        (jnp.int32(0), rows),
        is_full=rows == WGMMA_M,
        is_partial=rows < WGMMA_M,
        order=ctx.order,
    )


def _all_tiles(ctx: BackwardContext) -> None:
    count = ctx.item_count
    lax.fori_loop(0, count, functools.partial(_tile, ctx), jnp.int32(0))
    _free_stored_slot(ctx, count - 1)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def _taken_tiles(ctx: BackwardContext) -> None:
    """Computes tiles until their end, which only the producer knows before."""
    ring = ctx.shared.stationary

    def has_tile(item: Any) -> Any:
        ring.await_ready(item)
        return ring.word(item, HEAD) != END

    def compute(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        item, step, _ = carry
        step = _tile(ctx, item, step)
        return item + 1, step, has_tile(item + 1)

    zero = jnp.int32(0)
    count, _, _ = lax.while_loop(lambda x: x[2], compute, (zero, zero, has_tile(zero)))
    pl.when(count > 0)(functools.partial(_free_stored_slot, ctx, count - 1))
    ring.release(count)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def consume(ctx: BackwardContext) -> None:
    """A consumer warpgroup."""
    ctx = ctx.as_consumer()
    ctx.shared.streamed.release_all()
    ctx.shared.stationary.release_all()
    if ctx.shared.statistics_free is not None:
        plgpu.barrier_arrive(ctx.shared.statistics_free.at[0])
    if ctx.shape.has_mask:
        _taken_tiles(ctx)
    else:
        pl.when(ctx.item_count > 0)(functools.partial(_all_tiles, ctx))
