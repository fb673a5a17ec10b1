"""The second launch of `d_query="launch"`: d_query alone, with keys streamed past the queries.

    d_query = scale * dS @ key,   dS = P * (d_out @ value.T - delta),   P = exp(scores - lse)

An item is a tile of 128 query rows of one user and key head. Queries and cotangents stay in shared
memory, d_query in registers, while blocks of the user's keys and values follow one another. Scores
and gradients of weights are computed again, three products in all; but dS stays in registers, and
nothing is summed in device memory.

Warpgroups: 0 and 1 are the consumers, with 64 rows each; one warp of warpgroup 2 is the producer.
A consumer issues the next block's scores behind the product of dS and the block's keys.

Synchronisations:
  1. `tile_ready[s]`, `tile_free[s]`  slot s has an item's descriptor, queries, cotangents and
                                      statistics; free once TMA has read the staged result.
  2. `statistics_free[0]`             the consumers have read the item's statistics.
  3. `kv_ready[s]`, `kv_free[s]`      stage s has a block of keys and values.
  4. A named barrier: the consumers wait for each other after they zeroed keys past the length.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.attention_backward import products
from ikbo_jax.pallas.attention_backward.context import Operands, Shape
from ikbo_jax.pallas.attention_backward.launch import OperandTile, Roles, barrier, launch
from ikbo_jax.pallas.attention_backward.rows import query_tiles
from ikbo_jax.pallas.hopper import mma, mosaic, stores
from ikbo_jax.problems.attention_backward import Q_SLOTS, AttentionBackwardConfig
from ikbo_jax.problems.hopper import (
    BLOCK_K,
    NUM_CONSUMERS,
    WARPGROUP_SIZE,
    WGMMA_K,
    WGMMA_M,
)

#: Words of a tile's descriptor, in device memory and, with the head, in shared memory.
FIRST_ROW, ROWS, USER, KEYS, HEAD = range(5)
TILE_WORDS = 4
DESCRIPTOR_WORDS = 8
CONSUMER_BARRIER = 4
CONSUMER_THREADS = NUM_CONSUMERS * WARPGROUP_SIZE
LSE, DELTA = range(2)
KEY, VALUE = QUERY, D_OUT = range(2)


class TileOperands(NamedTuple):
    """Device memory: of the first launch, and a list of tiles."""

    query: Any  # [rows, K, H]
    d_out: Any  # [rows, K, H]
    statistics: Any  # [K, 2, at least rows] f32
    key: Any  # [U, S, K, H]
    value: Any  # [U, S, K, H]
    tiles: Any  # [most tiles, TILE_WORDS] int32
    num_tiles: Any  # [1] int32


class TileOutputs(NamedTuple):
    """Device memory that the launch fills."""

    d_query: Any  # [rows, K, H]


class Shared(NamedTuple):
    """Shared memory and barriers."""

    queries: Any  # [Q_SLOTS, 2 operands, 2 consumers, column blocks, 64, 64]
    keys_values: Any  # [kv_stages, 2 operands, column blocks, block_kv, 64]
    statistics: Any  # [2 consumers, 2, 64] f32
    words: Any  # [Q_SLOTS, DESCRIPTOR_WORDS] int32
    tile_ready: Any
    tile_free: Any
    kv_ready: Any
    kv_free: Any
    statistics_free: Any
    staging: Any  # [2 consumers, 64, block_kv], only under interpretation


class Context(NamedTuple):
    """Arguments that all functions of a warpgroup share; `consumer` is 0 or 1 (producer: unused).

    A *step* numbers the blocks of keys that the CTA loads.
    """

    shape: Shape
    config: AttentionBackwardConfig
    shared: Shared
    operands: TileOperands
    result: Any
    workers: int
    worker: Any
    consumer: Any
    interpret: bool

    def slot(self, item: Any) -> Any:
        return lax.rem(item, Q_SLOTS)

    def stage(self, step: Any) -> Any:
        return lax.rem(step, self.config.kv_stages)

    def columns(self, block: int) -> Any:
        return mosaic.block_columns(block, self.shape.head_dim, self.worker)

    def blocks(self, keys: Any) -> Any:
        return pl.cdiv(keys, self.config.block_kv)

    @property
    def item_count(self) -> Any:
        items = self.operands.num_tiles[0] * self.shape.kv_heads
        return (items - self.worker + self.workers - 1) // self.workers


def _send_item(ctx: Context, item: Any, step: Any) -> Any:
    """Sends a tile of queries and all its blocks of keys; returns the next item's first step."""
    shape, shared, operands = ctx.shape, ctx.shared, ctx.operands
    number, slot = ctx.worker + item * ctx.workers, ctx.slot(item)
    tile, head = lax.div(number, shape.kv_heads), lax.rem(number, shape.kv_heads)
    words = [operands.tiles[tile, i] for i in range(TILE_WORDS)]
    ready = shared.tile_ready.at[slot]
    plgpu.barrier_wait(shared.tile_free.at[slot])
    for i, word in enumerate((*words, head)):
        shared.words[slot, i] = word
    plgpu.barrier_arrive(ready)
    for consumer in range(NUM_CONSUMERS):
        row = jnp.minimum(words[FIRST_ROW] + consumer * WGMMA_M, shape.rows - 1)
        for operand, source in enumerate((operands.query, operands.d_out)):
            for i in range(shape.column_blocks):
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds(row, WGMMA_M), head, ctx.columns(i)],
                    shared.queries[1].at[slot, operand, consumer, i],
                    ready,
                )
    plgpu.barrier_wait(shared.statistics_free.at[0])
    for consumer in range(NUM_CONSUMERS):
        row = words[FIRST_ROW] + consumer * WGMMA_M
        source = operands.statistics.at[head, :, pl.ds(row, WGMMA_M)]
        plgpu.copy_gmem_to_smem(source, shared.statistics.at[consumer], ready)
    blocks = ctx.blocks(words[KEYS])

    @pl.loop(0, blocks)
    def _(block: Any) -> None:
        stage = ctx.stage(step + block)
        plgpu.barrier_wait(shared.kv_free.at[stage])
        for operand, source in enumerate((operands.key, operands.value)):
            for i in range(shape.column_blocks):
                first = block * ctx.config.block_kv
                plgpu.copy_gmem_to_smem(
                    source.at[words[USER], pl.ds(first, ctx.config.block_kv), head, ctx.columns(i)],
                    shared.keys_values[1].at[stage, operand, i],
                    shared.kv_ready.at[stage],
                )

    return step + blocks


def _produce(ctx: Context) -> None:
    """The producer warp."""
    lax.fori_loop(0, ctx.item_count, lambda item, step: _send_item(ctx, item, step), jnp.int32(0))
    # All arrivals must happen before the barriers' memory is released.
    rings = ((ctx.shared.kv_free, ctx.config.kv_stages), (ctx.shared.tile_free, Q_SLOTS))
    for free, count in rings:
        for i in range(count):
            plgpu.barrier_wait(free.at[i])
    plgpu.barrier_wait(ctx.shared.statistics_free.at[0])


def _receive_block(ctx: Context, item: Any, block: Any, step: Any) -> None:
    """Waits for a block of keys, and zeroes those past the user's length, which may be NaN."""
    shared, stage, block_kv = ctx.shared, ctx.stage(step), ctx.config.block_kv
    plgpu.barrier_wait(shared.kv_ready.at[stage])
    keys = shared.words[ctx.slot(item), KEYS] - block * block_kv

    @pl.when(keys < block_kv)
    def _() -> None:
        consumer = mosaic.warpgroup_index("warpgroup", interpret=ctx.interpret)
        tiles = shared.keys_values[0].at[stage, consumer]  # each consumer zeroes one operand
        stores.zero_rows(tiles, keys, interpret=ctx.interpret)
        plgpu.commit_smem()
        mosaic.named_barrier("sync", jnp.int32(CONSUMER_BARRIER), CONSUMER_THREADS)


def _issue_scores(ctx: Context, item: Any, step: Any, operand: int) -> jax.Array:
    """Issues queries @ keys.T, or d_out @ values.T: [64, block_kv]."""
    slot = ctx.slot(mosaic.opaque(item, interpret=ctx.interpret))
    consumer = mosaic.warpgroup_index("warpgroup", interpret=ctx.interpret)
    return mma.product(
        ctx.shared.queries[0].at[slot, operand, consumer],
        ctx.shared.keys_values[0].at[ctx.stage(step), operand],
        pl.cdiv(ctx.shape.head_dim, WGMMA_K) * WGMMA_K,
        interpret=ctx.interpret,
    )


def _weights(ctx: Context, item: Any, block: Any, scores: jax.Array, lse: jax.Array) -> jax.Array:
    """exp(scale * scores - lse), at most 1; 0 for keys past the user's length."""
    factor = jnp.float32(ctx.shape.scale * math.log2(math.e))
    exponents = scores * factor - lax.broadcast_in_dim(lse, scores.shape, (0,))
    weights = jnp.exp2(jnp.minimum(exponents, jnp.float32(0)))
    keys = ctx.shared.words[ctx.slot(item), KEYS] - block * ctx.config.block_kv

    def masked() -> jax.Array:
        column = plgpu.broadcasted_iota(jnp.int32, weights.shape, 1, layout=plgpu.Layout.WGMMA)
        return jnp.where(column < keys, weights, jnp.float32(0))

    return lax.cond(keys < ctx.config.block_kv, masked, lambda: weights)


def _block(
    ctx: Context,
    item: Any,
    blocks: Any,
    first_step: Any,
    statistics: tuple[jax.Array, jax.Array],
    block: Any,
    carry: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """The products of a block, whose scores and the sum before are in flight."""
    total, scores = carry
    step, interpret = first_step + block, ctx.interpret
    lse, delta = statistics
    # ptxas serialises all products if a wait leaves a product of the loop's last round in flight.
    mma.wait(0, interpret=interpret)
    total, scores = (mma.after_wait(x, interpret=interpret) for x in (total, scores))

    @pl.when(block > 0)
    def _() -> None:
        plgpu.barrier_arrive(ctx.shared.kv_free.at[ctx.stage(step - 1)])

    d_weights = _issue_scores(ctx, item, step, D_OUT)
    weights = _weights(ctx, item, block, scores, lse)
    mma.wait(0, interpret=interpret)
    d_weights = mma.after_wait(d_weights, interpret=interpret)
    d_scores = weights * (d_weights - lax.broadcast_in_dim(delta, weights.shape, (0,)))
    total = products.add_rows(
        total,
        d_scores.astype(ctx.operands.query.dtype),
        ctx.shared.keys_values[0].at[ctx.stage(step), KEY],
        ctx.shared.staging.at[ctx.consumer] if interpret else None,
        interpret=interpret,
    )
    # After the last block, its scores are computed once more, in vain.
    is_last = block + 1 == blocks
    pl.when(~is_last)(lambda: _receive_block(ctx, item, block + 1, step + 1))
    next_step = jnp.where(is_last, step, step + 1)
    return total, _issue_scores(ctx, item, next_step, QUERY)


def _tile(ctx: Context, item: Any, first_step: Any) -> Any:
    """Computes and stores a tile; returns the next tile's first step."""
    shared, slot = ctx.shared, ctx.slot(item)
    plgpu.barrier_wait(shared.tile_ready.at[slot])
    blocks = ctx.blocks(shared.words[slot, KEYS])
    nothing = plgpu.layout_cast(
        jnp.zeros((WGMMA_M, ctx.shape.head_dim), jnp.float32), plgpu.Layout.WGMMA
    )

    lse, delta = (
        plgpu.load(shared.statistics.at[ctx.consumer, number], layout=stores.ROW_LAYOUT)
        for number in (LSE, DELTA)
    )
    plgpu.commit_smem()  # TMA will write where these threads have read
    plgpu.barrier_arrive(shared.statistics_free.at[0])

    @pl.when(blocks > 0)
    def _() -> None:
        _receive_block(ctx, item, jnp.int32(0), first_step)
        scores = _issue_scores(ctx, item, first_step, QUERY)
        pl.when(item > 0)(lambda: _free_stored_slot(ctx, item - 1))
        # The sum is zeroed here. ptxas serialises all products if one is in flight then (C7515).
        mma.wait(0, interpret=ctx.interpret)
        scores = mma.after_wait(scores, interpret=ctx.interpret)

        def add(block: Any, carry: Any) -> Any:
            return _block(ctx, item, blocks, first_step, (lse, delta), block, carry)

        total, _ = lax.fori_loop(0, blocks, add, (nothing, scores))
        mma.wait(0, interpret=ctx.interpret)
        total = mma.after_wait(total, interpret=ctx.interpret)
        plgpu.barrier_arrive(shared.kv_free.at[ctx.stage(first_step + blocks - 1)])
        _store(ctx, item, total * jnp.float32(ctx.shape.scale))

    @pl.when(blocks == 0)
    def _() -> None:
        pl.when(item > 0)(lambda: _free_stored_slot(ctx, item - 1))
        _store(ctx, item, nothing)

    return first_step + blocks


def _free_stored_slot(ctx: Context, item: Any) -> None:
    """Frees the slot of tile `item`, after TMA has read the result that was staged in it."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(ctx.shared.tile_free.at[ctx.slot(item)])


def _store(ctx: Context, item: Any, total: jax.Array) -> None:
    """Stages 64 rows in place of the queries; TMA stores them if all belong to the tile."""
    shape, slot = ctx.shape, ctx.slot(mosaic.opaque(item, interpret=ctx.interpret))
    consumer = mosaic.warpgroup_index("warpgroup", interpret=ctx.interpret)
    matrix_view, copy_view = (view.at[slot, QUERY, consumer] for view in ctx.shared.queries)
    values = total.astype(ctx.result.dtype)
    for i, part in enumerate(stores.column_blocks(values, shape.column_blocks)):
        view = matrix_view.at[pl.ds(i, 1)]
        stores.stage_rows(view, part, reads_late=True, interpret=ctx.interpret)
    plgpu.commit_smem()
    words = ctx.shared.words
    first_row, head = words[slot, FIRST_ROW] + consumer * WGMMA_M, words[slot, HEAD]
    rows = jnp.clip(words[slot, ROWS] - consumer * WGMMA_M, 0, WGMMA_M)

    @pl.when(rows == WGMMA_M)
    def _() -> None:
        for i in range(shape.column_blocks):
            target = ctx.result.at[pl.ds(first_row, WGMMA_M), head, ctx.columns(i)]
            plgpu.copy_smem_to_gmem(copy_view.at[i], target)

    @pl.when(rows < WGMMA_M)
    def _() -> None:
        stores.store_staged_rows(
            ctx.result, matrix_view, first_row, head, jnp.int32(0), rows, interpret=ctx.interpret
        )
        plgpu.commit_smem()  # TMA will write queries where these threads have read


def _consume(ctx: Context) -> None:
    """A consumer warpgroup."""
    shared = ctx.shared
    for free, count in ((shared.kv_free, ctx.config.kv_stages), (shared.tile_free, Q_SLOTS)):
        for i in range(count):
            plgpu.barrier_arrive(free.at[i])
    plgpu.barrier_arrive(shared.statistics_free.at[0])

    @pl.when(ctx.item_count > 0)
    def _() -> None:
        count = ctx.item_count
        lax.fori_loop(0, count, lambda item, step: _tile(ctx, item, step), jnp.int32(0))
        _free_stored_slot(ctx, count - 1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)


# Host side


def d_query_kernel(
    operands: Operands,
    shape: Shape,
    config: AttentionBackwardConfig,
    *,
    num_sms: int,
    interpret: Any = False,
) -> jax.Array:
    """d_query [rows, K, H], rows in the order of `operands`, from the first launch's operands."""
    tiles, num_tiles = query_tiles(operands.users, shape.rows)
    columns, is_interpreted = shape.column_blocks, bool(interpret)
    dtype = operands.query.dtype
    staging = plgpu.SMEM((NUM_CONSUMERS, WGMMA_M, config.block_kv), dtype)
    shared = Shared(
        queries=OperandTile((Q_SLOTS, 2, NUM_CONSUMERS, columns, WGMMA_M, BLOCK_K), dtype),
        keys_values=OperandTile((config.kv_stages, 2, columns, config.block_kv, BLOCK_K), dtype),
        statistics=plgpu.SMEM((NUM_CONSUMERS, 2, WGMMA_M), jnp.float32),
        words=plgpu.SMEM((Q_SLOTS, DESCRIPTOR_WORDS), jnp.int32),
        tile_ready=barrier(NUM_CONSUMERS * (2 * columns + 1) + 1, Q_SLOTS),
        tile_free=barrier(NUM_CONSUMERS, Q_SLOTS),
        kv_ready=barrier(2 * columns, config.kv_stages),
        kv_free=barrier(NUM_CONSUMERS, config.kv_stages),
        # An array, so that it can be indexed; only element 0 is used.
        statistics_free=barrier(NUM_CONSUMERS, 2),
        staging=staging if is_interpreted else None,
    )
    workers = min(num_sms, tiles.shape[0] * shape.kv_heads)

    def context(shared: Any, operands: Any, outputs: Any, _: Any) -> Context:
        return Context(
            shape, config, shared, operands, outputs.d_query, workers, None, None, is_interpreted
        )

    (d_query,) = launch(
        Roles(context, _produce, None, _consume),
        TileOperands(*operands[:5], tiles, num_tiles),
        TileOutputs(jax.ShapeDtypeStruct(operands.query.shape, dtype)),
        shared,
        (),
        name="ikbo_attention_backward_d_query",
        workers=workers,
        interpret=interpret,
    )
    return d_query
