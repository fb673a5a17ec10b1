"""A consumer warpgroup of the attention backward kernel: 64 keys of every tile of its CTA."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.activations.cap import capped, scale_and_cap, through_cap
from ikbo_jax.pallas.attention_backward import products, store
from ikbo_jax.pallas.attention_backward.context import (
    FIRST_TARGET,
    HEAD,
    KEYS,
    PART,
    PART_PLANE,
    PART_ROW,
    PART_TILE,
    ROWS,
    TILE,
    BackwardContext,
    receive_items,
)
from ikbo_jax.pallas.hopper import mma, mosaic, turns
from ikbo_jax.pallas.hopper.visible import Visible
from ikbo_jax.problems.attention_backward import BLOCK_KV, D_SCORES_BUFFERS
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WGMMA_K, WGMMA_M

KEY, VALUE = QUERY, D_OUT = range(2)
#: Most queries of a block whose product for d_value stays in flight while gradients of scores are
#: computed: 835 instead of 867 us of this launch at S = 2048 on an H100. With blocks of 128, or
#: beside d_query, ptxas lacks registers and serialises all products (C7512).
MAX_OVERLAPPED_BLOCK_Q = 64
LSE, DELTA = range(2)
#: A row of zeros with these statistics has weights 0, and gradients of scores 0.
FILLS = (math.inf, 0.0)


def _visible_keys(ctx: BackwardContext, item: Any) -> Visible:
    """Describes this consumer's 64 keys, which are rows of its scores."""
    keys = ctx.shared.items.word(item, KEYS) - ctx.consumer * WGMMA_M
    return Visible(WGMMA_M, jnp.clip(keys, 0, WGMMA_M))


def _receive_tile(ctx: BackwardContext, item: Any) -> None:
    """Waits for keys and values, and zeroes those past the user's length, which may be NaN."""
    ctx.shared.keys_values.await_ready(item)
    visible = _visible_keys(ctx, item)

    @pl.when(visible.is_partial)
    def _() -> None:
        for operand in (KEY, VALUE):
            tiles = ctx.shared.keys_values.matrix(item).at[operand, ctx.consumer]
            visible.zero_rest(tiles)
        plgpu.commit_smem()


def _receive(ctx: BackwardContext, item: Any, block: Any, step: Any, operand: int = QUERY) -> None:
    """Waits for a block; zeroes the rows past the user's last, which belong to other users.

    With `has_halves`, it is a half: queries and lse, or d_out and delta.
    """
    ring, statistics = ctx.shared.queries, ctx.shared.statistics
    number = ctx.query_slot(step, operand)
    stage = None if ctx.has_halves else ring.slot(number)
    ring.await_ready(number)
    visible = Visible.in_block(ctx.shared.items.word(item, ROWS), block, ctx.config.block_q)

    def fill_half() -> None:
        store.fill_from(ctx.half_statistics(step, operand), visible.end, FILLS[operand])

    def zero(consumer: Any) -> None:
        if ctx.has_halves:
            pl.when(consumer == 0)(lambda: visible.zero_rest(ring.matrix(number)))
            pl.when(consumer == 1)(fill_half)
            return
        visible.zero_rest(ring.tiles[0].at[stage, consumer])  # each consumer one operand
        for i, x in enumerate(FILLS):
            fill = functools.partial(store.fill_from, statistics.at[stage, i], visible.end, x)
            pl.when(consumer == i)(fill)

    @pl.when(visible.is_partial)
    def _() -> None:
        zero(mosaic.warpgroup_index())
        plgpu.commit_smem()
        turns.synchronise_consumers()


def _operand(ctx: BackwardContext, step: Any, operand: Any) -> Any:
    tiles = ctx.shared.queries.matrix(ctx.query_slot(step, operand))
    return tiles if ctx.has_halves else tiles.at[operand]


def _issue_scores(
    ctx: BackwardContext, item: Any, step: Any, operand: int, half: Any = None
) -> jax.Array:
    """Issues keys @ queries.T, or values @ d_out.T: [64 keys, block_q]; `half` of the block."""
    consumer = mosaic.warpgroup_index()
    return mma.product(
        ctx.shared.keys_values.matrix(item).at[operand, consumer],
        _operand(ctx, step, operand if half is None else half),
        pl.cdiv(ctx.shape.head_dim, WGMMA_K) * WGMMA_K,
    )


def _statistic(ctx: BackwardContext, step: Any, number: int) -> jax.Array:
    """Loads a statistic of the block's queries as a row for each of the 64 keys."""
    if ctx.has_halves:
        statistics = ctx.half_statistics(step, number)
    else:
        statistics = ctx.shared.statistics.at[ctx.shared.queries.slot(step), number]
    row = plgpu.load(statistics, layout=plgpu.Layout.WGMMA.reduce(0))
    return lax.broadcast_in_dim(row, (WGMMA_M, ctx.config.block_q), (1,))


def _weights_and_slopes(
    ctx: BackwardContext, item: Any, scores: jax.Array, step: Any
) -> tuple[jax.Array, jax.Array]:
    """Computes exp(scale * scores - lse), 0 for keys past the user's length; and slopes.

    Slopes are weights times the slope of the cap: without a cap, the same array.
    """
    scale, cap = scale_and_cap(ctx.shape.scale, ctx.shape.logit_cap)
    scores = capped(cap, scores)
    exponents = scores * jnp.float32(scale * math.log2(math.e)) - _statistic(ctx, step, LSE)
    weights = jnp.exp2(jnp.minimum(exponents, jnp.float32(0)))
    weights = _visible_keys(ctx, item).keep(weights, axis=0)
    return weights, through_cap(cap, scores, weights)


def _issue_d_query(ctx: BackwardContext, item: Any, step: Any) -> jax.Array:
    """Issues a consumer's share of a block's d_query, head columns by queries (`_share`)."""
    column_block, rows = _share(ctx)
    return products.sum_over_keys(
        ctx.shared.keys_values.matrix(item).at[KEY],
        ctx.shared.d_scores[0].at[lax.rem(step, D_SCORES_BUFFERS)],
        column_block,
        rows,
    )


def _share(ctx: BackwardContext) -> tuple[Any, tuple[Any, int]]:
    consumer = mosaic.warpgroup_index()
    block_q = ctx.config.block_q
    if ctx.shape.column_blocks == 1:
        half = block_q // NUM_CONSUMERS
        return jnp.int32(0), (consumer * half, half)
    return consumer, (jnp.int32(0), block_q)


def _d_scores_tile(ctx: BackwardContext, step: Any, view: int) -> Any:
    """Selects this consumer's buffer of gradients of scores, as registers (0) or TMA (1) see it."""
    consumer = mosaic.warpgroup_index()
    return ctx.shared.d_scores[view].at[lax.rem(step, D_SCORES_BUFFERS), consumer]


def _store_d_scores(ctx: BackwardContext, item: Any, block: Any, step: Any) -> None:
    consumer = mosaic.warpgroup_index()
    head, tile, first = (ctx.shared.items.word(item, i) for i in (HEAD, TILE, FIRST_TARGET))
    plane = (head * ctx.shape.kv_tiles + tile) * NUM_CONSUMERS + consumer
    rows = pl.ds(first + block * ctx.config.block_q, ctx.config.block_q)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(_d_scores_tile(ctx, step, 1), ctx.outputs.d_scores.at[plane, rows])


def _send_part(ctx: BackwardContext, item: Any, block: Any, d_query: jax.Array) -> None:
    """Stages a part of d_query, and tells the writer where it belongs."""
    shared, shape = ctx.shared, ctx.shape
    plgpu.barrier_wait(shared.part_free.at[0])
    column_block, rows = _share(ctx)
    store.stage_sums(shared.d_query, d_query, column_block, rows[0])
    consumer = mosaic.warpgroup_index()

    @pl.when(consumer == 0)
    def _() -> None:
        head, tile, first = (ctx.shared.items.word(item, i) for i in (HEAD, TILE, FIRST_TARGET))
        row = first + block * ctx.config.block_q
        plane = tile * shape.kv_heads + head
        slot = ctx.config.kv_slots
        for i, word in ((PART_TILE, tile), (PART_PLANE, plane), (PART_ROW, row)):
            shared.items.words[slot, i] = word

    plgpu.commit_smem()
    plgpu.barrier_arrive(shared.part_ready.at[0])


def _block(
    ctx: BackwardContext, item: Any, blocks: Any, first_step: Any, block: Any, carry: Any
) -> Any:
    """Issues the products of a block, whose scores are in flight, and the next block's scores."""
    sums, scores = list(carry[:-1]), carry[-1]
    item = mosaic.opaque(item)
    step, dtype = first_step + block, ctx.operands.query.dtype
    shared = ctx.shared

    def add(total: jax.Array, p: jax.Array, operand: int) -> jax.Array:
        tiles = _operand(ctx, step, operand)
        return mma.add_product(total, p, tiles, ctx.staging())

    # ptxas serialises all products if this wait leaves a product in flight (C7514): it does not
    # know that the scores are the oldest ones.
    mma.wait(0)
    scores = mma.after_wait(scores)
    if ctx.has_halves:
        _receive(ctx, item, block, step, D_OUT)
    d_weights = _issue_scores(ctx, item, step, D_OUT)
    weights, slope = _weights_and_slopes(ctx, item, scores, step)
    sums[-1] = add(sums[-1], weights.astype(dtype), D_OUT)
    if ctx.has_halves:
        shared.queries.release(ctx.query_slot(step, QUERY))
    d_query: list[jax.Array] = []
    overlaps = not ctx.config.has_d_query and ctx.config.block_q <= MAX_OVERLAPPED_BLOCK_Q
    mma.wait(int(overlaps))
    if not overlaps:
        sums[-1] = mma.after_wait(sums[-1])
    d_weights = mma.after_wait(d_weights)
    d_scores = (slope * (d_weights - _statistic(ctx, step, DELTA))).astype(dtype)
    if ctx.config.stores_d_scores:
        # TMA has read the buffer, which held the block before the last one.
        plgpu.wait_smem_to_gmem(D_SCORES_BUFFERS - 1, wait_read_only=True)
    if ctx.config.has_d_query or ctx.config.stores_d_scores:
        tile = _d_scores_tile(ctx, step, 0)
        store.stage_transposed(tile, d_scores)
    if ctx.config.has_d_query:
        plgpu.commit_smem()
    if ctx.shape.has_key:
        sums[0] = add(sums[0], d_scores, QUERY)
    if ctx.config.has_d_query:
        turns.synchronise_consumers()
        d_query = [_issue_d_query(ctx, item, step)]
    # After the last block, its scores are computed once more, in vain (of d_out, where another
    # item's queries may replace its own).
    is_last = block + 1 == blocks
    next_step = jnp.where(is_last, step, step + 1)
    pl.when(~is_last)(lambda: _receive(ctx, item, block + 1, step + 1))
    half = is_last.astype(jnp.int32) if ctx.has_halves else None
    scores = _issue_scores(ctx, item, next_step, QUERY, half)
    if ctx.config.stores_d_scores:
        _store_d_scores(ctx, item, block, step)
    mma.wait(1)
    sums, d_query = ([mma.after_wait(x) for x in found] for found in (sums, d_query))
    pl.when(~is_last)(lambda: shared.queries.release(ctx.query_slot(step, D_OUT)))
    for part in d_query:
        _send_part(ctx, item, block, part)
    return *sums, scores


def _zeros(ctx: BackwardContext) -> list[jax.Array]:
    return [mma.zeros(ctx.shape.head_dim, jnp.float32)] * len(ctx.sums)


def _tile(ctx: BackwardContext, item: Any, blocks: Any, first_step: Any) -> None:
    _receive_tile(ctx, item)
    _receive(ctx, item, jnp.int32(0), first_step)
    scores = _issue_scores(ctx, item, first_step, QUERY)
    zeros = _zeros(ctx)

    def add(block: Any, carry: Any) -> Any:
        return _block(ctx, item, blocks, first_step, block, carry)

    *sums, _ = lax.fori_loop(0, blocks, add, (*zeros, scores))
    mma.wait(0)
    ctx.shared.queries.release(ctx.query_slot(first_step + blocks - 1, D_OUT))
    turns.synchronise_consumers()  # the other consumer has multiplied by this one's keys
    if ctx.shape.has_key:
        sums[0] = sums[0] * jnp.float32(ctx.shape.scale)
    _store(ctx, item, sums)


def _store(ctx: BackwardContext, item: Any, sums: Sequence[jax.Array]) -> None:
    """Stores the sums of `ctx.sums` for 64 keys, staged in place of operands; frees the slot."""
    shared, consumer = ctx.shared, mosaic.warpgroup_index()
    slot = shared.keys_values.slot(mosaic.opaque(item))
    part, head, tile = (shared.items.words[slot, i] for i in (PART, HEAD, TILE))
    first = tile * BLOCK_KV + consumer * WGMMA_M
    views = [[x.at[slot, i, consumer] for x in shared.keys_values.tiles] for i in range(len(sums))]
    products.store_keys(ctx, [*zip(ctx.sums, sums, views, strict=True)], part, head, first)
    if ctx.sums[0].dtype != jnp.float32:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(shared.keys_values.free.at[slot])


def _send_end(ctx: BackwardContext) -> None:
    shared = ctx.shared
    plgpu.barrier_wait(shared.part_free.at[0])

    @pl.when(ctx.consumer == 0)
    def _() -> None:
        shared.items.words[ctx.config.kv_slots, PART_TILE] = jnp.int32(-1)

    plgpu.barrier_arrive(shared.part_ready.at[0])


def consume(ctx: BackwardContext) -> None:
    """Computes a consumer warpgroup's share of the CTA's tiles."""
    shared = ctx.shared
    shared.queries.release_all()
    shared.keys_values.release_all()

    def one_tile(item: Any, blocks: Any, step: Any) -> None:
        pl.when(blocks > 0)(lambda: _tile(ctx, item, blocks, step))
        pl.when(blocks == 0)(lambda: _store(ctx, item, _zeros(ctx)))

    item = receive_items(ctx, one_tile)
    shared.keys_values.release(item)  # the slot of the end
    if ctx.config.has_d_query:
        _send_end(ctx)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
