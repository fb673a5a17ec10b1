"""The last launch of `d_query="launch"`: d_query alone, with keys streamed past the queries.

    d_query = scale * dS @ key,   dS = P * (d_out @ value.T - delta),   P = exp(scores - lse)

An item is a tile of 128 query rows of one user and key head. Queries and cotangents stay in shared
memory, d_query in registers, while blocks of the user's keys and values follow one another. Scores
and gradients of weights are computed again, three products in all; but dS stays in registers, and
nothing is summed in device memory.

Warpgroups: 0 and 1 are the consumers, with 64 rows each; one warp of warpgroup 2 is the producer.
A consumer issues the next block's scores behind the product of dS and the block's keys. A slot
holds a tile until TMA has read its result; with two slots, the next tile's first scores are issued
before, with one (wide heads) the tile is loaded after it.

Synchronisations:
  1. `tile_ready[s]`, `tile_free[s]`  slot s has an item's descriptor, queries, cotangents and
                                      statistics; free once TMA has read the staged result.
  2. `statistics_free[0]`             the consumers have read the item's statistics.
  3. `kv_ready[s]`, `kv_free[s]`      stage s has a block of keys and values.
  4. A named barrier: the consumers wait for each other after they zeroed keys past the length.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.attention_backward.context import Operands, Shape
from ikbo_jax.pallas.hopper import mma, mosaic, operand_tiles, stores
from ikbo_jax.pallas.hopper.launch import Roles, WarpgroupContext, launch
from ikbo_jax.pallas.hopper.visible import Visible
from ikbo_jax.pallas.worklist.numbering import TILE_WORDS
from ikbo_jax.problems.attention_backward import AttentionBackwardConfig, query_slots
from ikbo_jax.problems.hopper import (
    NUM_CONSUMERS,
    WARPGROUP_SIZE,
    WGMMA_K,
    WGMMA_M,
)

#: Words of a tile's descriptor: `TILE_WORDS` in device memory; with the head, in shared memory.
FIRST_ROW, ROWS, USER, KEYS, TARGET, HEAD = range(6)
CONSUMER_BARRIER = 4
CONSUMER_THREADS = NUM_CONSUMERS * WARPGROUP_SIZE
LSE, DELTA = range(2)
KEY, VALUE = QUERY, D_OUT = range(2)


class TileOperands(NamedTuple):
    """Device memory: of the first launch, and a list of tiles."""

    query: Any  # [rows, K, H]
    d_out: Any  # [rows, K, H]
    statistics: Any  # [K, 2, more than all targets] f32
    key: Any  # [U, S, K, H]
    value: Any  # [U, S, K, H]
    tiles: Any  # [most tiles + 1, TILE_WORDS] int32; the last entry begins with the number of tiles
    order: Any  # [B] int32, candidates in user order; None if the caller's order is that


@dataclasses.dataclass(frozen=True)
class Context(WarpgroupContext):
    """The context of a warpgroup; a *step* numbers the blocks of keys that the CTA loads."""

    def blocks(self, keys: Any) -> Any:
        return pl.cdiv(keys, self.config.block_kv)

    @property
    def loads_ahead(self) -> bool:
        """Whether a tile is loaded while the one before it is computed."""
        return query_slots(self.shape.head_dim) > 1

    @property
    def item_count(self) -> Any:
        tiles, workers = self.operands.tiles, self.shape.workers
        items = tiles[tiles.shape[0] - 1, FIRST_ROW] * self.shape.kv_heads
        return (items - self.worker + workers - 1) // workers


def _send_item(ctx: Context, item: Any, step: Any) -> Any:
    """Sends a tile of queries and all its blocks of keys; returns the next item's first step."""
    shape, shared, operands = ctx.shape, ctx.shared, ctx.operands
    number, slot = ctx.worker + item * shape.workers, shared.queries.slot(item)
    tile, head = lax.div(number, shape.kv_heads), lax.rem(number, shape.kv_heads)
    words = [operands.tiles[tile, i] for i in range(TILE_WORDS)]
    ready = shared.queries.ready.at[slot]
    shared.queries.send_words(item, (*words, head), after=shared.queries)
    for consumer in range(NUM_CONSUMERS):
        row = jnp.minimum(words[FIRST_ROW] + consumer * WGMMA_M, shape.rows - 1)
        for operand, source in enumerate((operands.query, operands.d_out)):
            tiles = shared.queries.tiles[1].at[slot, operand, consumer]
            ctx.load(source, (pl.ds(row, WGMMA_M), head), tiles, ready)
    plgpu.barrier_wait(shared.statistics_free.at[0])
    for consumer in range(NUM_CONSUMERS):
        row = words[TARGET] + consumer * WGMMA_M
        source = operands.statistics.at[head, :, pl.ds(row, WGMMA_M)]
        plgpu.copy_gmem_to_smem(source, shared.statistics.at[consumer], ready)
    blocks = ctx.blocks(words[KEYS])

    @pl.loop(0, blocks)
    def _(block: Any) -> None:
        ring, first = shared.keys_values, block * ctx.config.block_kv
        ring.await_free(step + block)
        for operand, source in enumerate((operands.key, operands.value)):
            tiles = ring.copied(step + block).at[operand]
            index = (words[USER], pl.ds(first, ctx.config.block_kv), head)
            ctx.load(source, index, tiles, ring.ready_at(step + block))

    return step + blocks


def _produce(ctx: Context) -> None:
    """The producer warp."""
    lax.fori_loop(0, ctx.item_count, lambda item, step: _send_item(ctx, item, step), jnp.int32(0))
    # All arrivals must happen before the barriers' memory is released.
    ctx.shared.keys_values.drain()
    ctx.shared.queries.drain()
    plgpu.barrier_wait(ctx.shared.statistics_free.at[0])


def _word(ctx: Context, item: Any, word: int) -> Any:
    return ctx.shared.queries.words[ctx.shared.queries.slot(item), word]


def _receive_block(ctx: Context, item: Any, block: Any, step: Any) -> None:
    """Waits for a block of keys, and zeroes those past the user's length, which may be NaN."""
    ctx.shared.keys_values.await_ready(step)
    visible = Visible.in_block(_word(ctx, item, KEYS), block, ctx.config.block_kv)

    @pl.when(visible.is_partial)
    def _() -> None:
        consumer = mosaic.warpgroup_index("warpgroup", interpret=ctx.interpret)
        tiles = ctx.shared.keys_values.matrix(step).at[consumer]  # each consumer zeroes one operand
        visible.zero_rest(tiles, interpret=ctx.interpret)
        plgpu.commit_smem()
        mosaic.named_barrier("sync", jnp.int32(CONSUMER_BARRIER), CONSUMER_THREADS)


def _issue_scores(ctx: Context, item: Any, step: Any, operand: int) -> jax.Array:
    """Issues queries @ keys.T, or d_out @ values.T: [64, block_kv]."""
    item = mosaic.opaque(item, interpret=ctx.interpret)
    consumer = mosaic.warpgroup_index("warpgroup", interpret=ctx.interpret)
    return mma.product(
        ctx.shared.queries.matrix(item).at[operand, consumer],
        ctx.shared.keys_values.matrix(step).at[operand],
        pl.cdiv(ctx.shape.head_dim, WGMMA_K) * WGMMA_K,
        interpret=ctx.interpret,
    )


def _weights(ctx: Context, item: Any, block: Any, scores: jax.Array, lse: jax.Array) -> jax.Array:
    """exp(scale * scores - lse), at most 1; 0 for keys past the user's length."""
    factor = jnp.float32(ctx.shape.scale * math.log2(math.e))
    exponents = scores * factor - lax.broadcast_in_dim(lse, scores.shape, (0,))
    weights = jnp.exp2(jnp.minimum(exponents, jnp.float32(0)))
    return Visible.in_block(_word(ctx, item, KEYS), block, ctx.config.block_kv).keep(weights)


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
        ctx.shared.keys_values.release(step - 1)

    d_weights = _issue_scores(ctx, item, step, D_OUT)
    weights = _weights(ctx, item, block, scores, lse)
    mma.wait(0, interpret=interpret)
    d_weights = mma.after_wait(d_weights, interpret=interpret)
    d_scores = weights * (d_weights - lax.broadcast_in_dim(delta, weights.shape, (0,)))
    total = mma.add_product(
        total,
        d_scores.astype(ctx.operands.query.dtype),
        ctx.shared.keys_values.matrix(step).at[KEY],
        ctx.staging(),
        interpret=interpret,
    )
    # After the last block, its scores are computed once more, in vain.
    is_last = block + 1 == blocks
    pl.when(~is_last)(lambda: _receive_block(ctx, item, block + 1, step + 1))
    next_step = jnp.where(is_last, step, step + 1)
    return total, _issue_scores(ctx, item, next_step, QUERY)


def _tile(ctx: Context, item: Any, first_step: Any) -> Any:
    """Computes and stores a tile; returns the next tile's first step."""
    shared = ctx.shared
    shared.queries.await_ready(item)
    blocks = ctx.blocks(_word(ctx, item, KEYS))
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
        _free_slot_before(ctx, item)
        # The sum is zeroed here. ptxas serialises all products if one is in flight then (C7515).
        mma.wait(0, interpret=ctx.interpret)
        scores = mma.after_wait(scores, interpret=ctx.interpret)

        def add(block: Any, carry: Any) -> Any:
            return _block(ctx, item, blocks, first_step, (lse, delta), block, carry)

        total, _ = lax.fori_loop(0, blocks, add, (nothing, scores))
        mma.wait(0, interpret=ctx.interpret)
        total = mma.after_wait(total, interpret=ctx.interpret)
        shared.keys_values.release(first_step + blocks - 1)
        _store(ctx, item, total * jnp.float32(ctx.shape.scale))

    @pl.when(blocks == 0)
    def _() -> None:
        _free_slot_before(ctx, item)
        _store(ctx, item, nothing)

    if not ctx.loads_ahead:
        _free_stored_slot(ctx, item)
    return first_step + blocks


def _free_slot_before(ctx: Context, item: Any) -> None:
    """Frees the slot of the tile before `item`, if `item` was loaded into another one."""
    if ctx.loads_ahead:
        pl.when(item > 0)(lambda: _free_stored_slot(ctx, item - 1))


def _free_stored_slot(ctx: Context, item: Any) -> None:
    """Frees the slot of tile `item`, after TMA has read the result that was staged in it."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    ctx.shared.queries.release(item)


def _store(ctx: Context, item: Any, total: jax.Array) -> None:
    """Stages 64 rows in place of the queries.

    TMA stores them if all belong to the tile, and if they stay side by side.
    """
    shape, ring = ctx.shape, ctx.shared.queries
    item = mosaic.opaque(item, interpret=ctx.interpret)
    consumer = mosaic.warpgroup_index("warpgroup", interpret=ctx.interpret)
    staged = tuple(view.at[ring.slot(item), QUERY, consumer] for view in ring.tiles)
    values = total.astype(ctx.outputs[0].dtype)
    for i, part in enumerate(operand_tiles.column_blocks(values, shape.column_blocks)):
        view = staged[0].at[pl.ds(i, 1)]
        operand_tiles.stage_rows(view, part, reads_late=True, interpret=ctx.interpret)
    plgpu.commit_smem()
    first_row, head = _word(ctx, item, FIRST_ROW) + consumer * WGMMA_M, _word(ctx, item, HEAD)
    rows = jnp.clip(_word(ctx, item, ROWS) - consumer * WGMMA_M, 0, WGMMA_M)
    stores.store_staged(
        ctx,
        [staged],
        ctx.outputs,
        (first_row, head),
        (jnp.int32(0), rows),
        is_full=rows == WGMMA_M,
        is_partial=rows < WGMMA_M,
        order=shape.row_order(ctx.operands.order),
    )


def _consume(ctx: Context) -> None:
    """A consumer warpgroup."""
    shared = ctx.shared
    shared.keys_values.release_all()
    shared.queries.release_all()
    plgpu.barrier_arrive(shared.statistics_free.at[0])

    @pl.when(ctx.item_count > 0)
    def _() -> None:
        count = ctx.item_count
        lax.fori_loop(0, count, lambda item, step: _tile(ctx, item, step), jnp.int32(0))
        if ctx.loads_ahead:
            _free_stored_slot(ctx, count - 1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)


# Host side


def d_query_kernel(
    operands: Operands,
    tiles: Any,
    order: jax.Array | None,
    shape: Shape,
    config: AttentionBackwardConfig,
    *,
    num_sms: int,
    interpret: Any = False,
) -> jax.Array:
    """d_query [B * T, N, H] in the caller's order; `tiles` and `order` are those of `Rows`."""
    workers = min(num_sms, (tiles.shape[0] - 1) * shape.kv_heads)
    shape = dataclasses.replace(shape, workers=workers)
    (d_query,) = launch(
        Roles(functools.partial(Context, shape, config), _produce, _consume),
        TileOperands(*operands[:5], tiles, order),
        (jax.ShapeDtypeStruct(shape.d_query, operands.query.dtype),),
        config.d_query_shared(shape.head_dim),
        dtype=operands.query.dtype,
        name="ikbo_attention_backward_d_query",
        workers=workers,
        interpret=interpret,
    )
    return d_query
