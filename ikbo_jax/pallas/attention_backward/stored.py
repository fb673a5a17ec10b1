"""The launches of `d_query="stored"` that multiply gradients of scores in device memory.

    d_query = scale * dS @ key,   and of wide heads   d_key = scale * dS.T @ query

An item is a tile of 128 query rows of one user and key head, or for d_key a tile of 128 keys of one
part of a user's rows and one key head. The gradient stays in registers, while blocks of 64 of the
user's keys (queries of its part), and the gradients of their scores, follow one another; rows past
the last one are zeroed. A consumer whose 64 keys are past the user's length stores zeros. Device
memory limits the launches.

Warpgroups: 0 and 1 are the consumers, with 64 rows each; one warp of warpgroup 2 is the producer.

Synchronisations:
  1. `items_ready[s]`, `items_free[s]`    slot s has an item's descriptor; for d_key, or the end.
  2. `blocks_ready[s]`, `blocks_free[s]`  stage s has a block and gradients of scores.
  3. A named barrier: the consumers wait for each other after rows past the last one are zeroed.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.attention_backward import context, products
from ikbo_jax.pallas.attention_backward import rows as query_rows
from ikbo_jax.pallas.attention_backward.context import (
    Operands,
    Shape,
    receive_items,
    send_items,
)
from ikbo_jax.pallas.hopper import mosaic, operand_tiles, stores
from ikbo_jax.pallas.hopper.launch import Roles, WarpgroupContext, launch
from ikbo_jax.pallas.worklist.numbering import TILE_WORDS, USER_WORDS
from ikbo_jax.pallas.worklist.rows import Rows
from ikbo_jax.problems.attention_backward import (
    BLOCK_KV,
    STORED_BLOCK_KV,
    AttentionBackwardConfig,
)
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WGMMA_M

#: Words of the descriptor of a tile of queries: `TILE_WORDS` in device memory; with the head, in
#: shared memory. Descriptors of tiles of keys are as in `context`.
FIRST_ROW, ROWS, USER, KEYS, TARGET, HEAD = range(6)


class StoredOperands(NamedTuple):
    """Device memory that a launch reads."""

    d_scores: Any  # see `context.Outputs`
    factor: Any  # keys [U, S, K, H]; for d_key, queries [rows, K, H], see `context.Operands`
    # [most tiles + 1, TILE_WORDS] int32, tiles of queries; the last entry begins with their number.
    # For d_key, [U * splits, USER_WORDS] int32, parts of users' rows.
    words: Any
    order: Any = None  # [B] int32, candidates in user order; None if the caller's order is that


class Context(WarpgroupContext):
    """The context of a warpgroup for d_query; a *step* numbers the blocks that the CTA loads."""

    @property
    def items(self) -> Any:
        """Tiles of queries, of all heads."""
        words = self.operands.words
        return words[words.shape[0] - 1, FIRST_ROW] * self.shape.kv_heads

    @property
    def item_count(self) -> Any:
        workers = self.shape.query_workers
        return (self.items - self.worker + workers - 1) // workers


def _send_item(ctx: Context, item: Any, step: Any) -> Any:
    """Sends a tile's descriptor and all its blocks; returns the next item's first step."""
    shape, shared, operands = ctx.shape, ctx.shared, ctx.operands
    # The gradients that were stored last may still be in L2.
    number = ctx.items - 1 - ctx.worker - item * shape.query_workers
    tile, head = lax.div(number, shape.kv_heads), lax.rem(number, shape.kv_heads)
    words = [operands.words[tile, i] for i in range(TILE_WORDS)]
    words[KEYS] = jnp.clip(words[KEYS] - shape.first_key, 0, shape.kv_len)
    shared.items.send_words(item, (*words, head), after=shared.items)
    last_tile = lax.div(jnp.maximum(words[ROWS] - 1, 0), WGMMA_M)
    blocks = pl.cdiv(words[KEYS], STORED_BLOCK_KV)

    @pl.loop(0, blocks)
    def _(block: Any) -> None:
        ring, first = shared.blocks, shape.first_key + block * STORED_BLOCK_KV
        ring.await_free(step + block)
        ready, tiles = ring.ready_at(step + block), ring.copied(step + block)
        plane = head * shape.kv_tiles * NUM_CONSUMERS + block
        for i in range(NUM_CONSUMERS):
            # A tile without rows reads the last one that has some, which comes from L2.
            row = words[TARGET] + jnp.minimum(i, last_tile) * WGMMA_M
            source = operands.d_scores.at[plane, pl.ds(row, WGMMA_M)]
            plgpu.copy_gmem_to_smem(source, tiles.at[i], ready)
        columns = tiles.at[pl.ds(NUM_CONSUMERS, shape.column_blocks)]
        index = (words[USER], pl.ds(first, STORED_BLOCK_KV), head)
        ctx.load(operands.factor, index, columns, ready)

    return step + blocks


def _produce(ctx: Context) -> None:
    lax.fori_loop(0, ctx.item_count, functools.partial(_send_item, ctx), jnp.int32(0))
    # All arrivals must happen before the barriers' memory is released.
    ctx.shared.blocks.drain()
    ctx.shared.items.drain()


def _tile(ctx: Context, item: Any, first_step: Any) -> Any:
    """Computes and stores a tile; returns the next tile's first step."""
    shared = ctx.shared
    shared.items.await_ready(item)
    first_row, rows, keys, head = (
        shared.items.word(item, i) for i in (FIRST_ROW, ROWS, KEYS, HEAD)
    )
    blocks = pl.cdiv(keys, STORED_BLOCK_KV)
    store = functools.partial(_store, ctx, (first_row, head), rows)
    products.sum_over_blocks(ctx, blocks, first_step, keys, store)
    # All threads have read the descriptor: the warpgroup synchronised when the result was staged.
    shared.items.release(item)
    return first_step + blocks


def _store(ctx: Context, place: tuple[Any, Any], rows: Any, total: jax.Array) -> None:
    """Stages the consumer's 64 rows; TMA stores all of them, if they stay side by side."""
    consumer = mosaic.warpgroup_index()
    order = ctx.shape.row_order(ctx.operands.order)
    first = consumer * WGMMA_M
    if ctx.outputs[0].dtype == jnp.float32:
        left = jnp.clip(rows - first, 0, WGMMA_M)
        position = place[0] + first, place[1], jnp.int32(0), left
        stores.store_rows(ctx.outputs[0], total, *position, order=order)
        plgpu.commit_smem()
        return
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the item before
    staged = tuple(view.at[consumer] for view in ctx.shared.result)
    values = total.astype(ctx.outputs[0].dtype)
    for block, part in enumerate(operand_tiles.column_blocks(values, ctx.shape.column_blocks)):
        operand_tiles.stage_rows(staged[0].at[pl.ds(block, 1)], part, reads_late=True)
    plgpu.commit_smem()
    left = jnp.clip(rows - first, 0, WGMMA_M)
    stores.store_staged(
        ctx,
        [staged],
        ctx.outputs,
        (place[0] + first, place[1]),
        (jnp.int32(0), left),
        is_full=left == WGMMA_M,
        is_partial=left < WGMMA_M,
        order=order,
    )


def _consume(ctx: Context) -> None:
    ctx.shared.blocks.release_all()
    ctx.shared.items.release_all()
    lax.fori_loop(0, ctx.item_count, functools.partial(_tile, ctx), jnp.int32(0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def d_query_kernel(
    d_scores: jax.Array,
    operands: Operands,
    rows: Rows,
    shape: Shape,
    config: AttentionBackwardConfig,
    dtype: Any,
) -> jax.Array:
    """Computes d_query [B * T, N, H], in the caller's order, of the keys that `shape` describes."""
    (d_query,) = launch(
        Roles(functools.partial(Context, shape, config), _produce, _consume),
        StoredOperands(d_scores, operands.key, rows.tiles, rows.order),
        (jax.ShapeDtypeStruct(shape.d_query, dtype),),
        config.stored_shared(shape.head_dim),
        dtype=operands.query.dtype,
        name="ikbo_attention_backward_stored",
        workers=shape.query_workers,
    )
    return d_query


def _send_keys(ctx: WarpgroupContext, item: Any, number: Any, step: Any) -> Any:
    """Sends a tile's descriptor and all its blocks; returns the next item's first step."""
    shape, shared, operands = ctx.shape, ctx.shared, ctx.operands
    tile, rest = lax.rem(number, shape.kv_tiles), lax.div(number, shape.kv_tiles)
    head, part = lax.rem(rest, shape.kv_heads), lax.div(rest, shape.kv_heads)
    first_row, rows, target, keys = (operands.words[part, i] for i in range(USER_WORDS))
    keys = keys - (shape.first_key + tile * BLOCK_KV)
    blocks = jnp.where(keys > 0, pl.cdiv(rows, WGMMA_M), 0)
    shared.items.send_words(item, (blocks, rows, part, head, tile, keys), after=shared.items)
    first_plane = head * shape.kv_tiles * NUM_CONSUMERS + tile * NUM_CONSUMERS
    last = lax.div(jnp.maximum(keys - 1, 0), WGMMA_M)

    @pl.loop(0, blocks)
    def _(block: Any) -> None:
        ring, begin = shared.blocks, block * WGMMA_M
        ring.await_free(step + block)
        ready, tiles = ring.ready_at(step + block), ring.copied(step + block)
        for i in range(NUM_CONSUMERS):
            # A tile without keys reads the last one that has some, which comes from L2.
            plane = first_plane + jnp.minimum(i, last)
            source = operands.d_scores.at[plane, pl.ds(target + begin, WGMMA_M)]
            plgpu.copy_gmem_to_smem(source, tiles.at[i], ready)
        columns = tiles.at[pl.ds(NUM_CONSUMERS, shape.column_blocks)]
        ctx.load(operands.factor, (pl.ds(first_row + begin, WGMMA_M), head), columns, ready)

    return step + blocks


def _produce_keys(ctx: WarpgroupContext) -> None:
    item = send_items(ctx, ctx.shape.items, functools.partial(_send_keys, ctx))
    ctx.shared.items.send_words(item, (jnp.int32(-1),), after=ctx.shared.items)
    ctx.shared.blocks.drain()
    ctx.shared.items.drain()


def _keys_tile(ctx: WarpgroupContext, item: Any, blocks: Any, first_step: Any) -> None:
    rows = ctx.shared.items.word(item, context.ROWS)
    store = functools.partial(_store_keys, ctx, item)
    products.sum_over_blocks(ctx, blocks, first_step, rows, store, is_transposed=True)


def _store_keys(ctx: WarpgroupContext, item: Any, total: jax.Array) -> None:
    """Stores the gradients of the consumer's 64 keys, zeros past the length; frees the item."""
    shared, (target,) = ctx.shared, ctx.outputs
    words = context.PART, context.HEAD, context.TILE, context.KEYS
    part, head, tile, keys = (shared.items.word(item, i) for i in words)
    consumer = mosaic.warpgroup_index()
    if target.dtype != jnp.float32:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the item before
    total = jnp.where(consumer * WGMMA_M < keys, total, jnp.float32(0))
    first = (tile * NUM_CONSUMERS + consumer) * WGMMA_M
    staged = [view.at[consumer] for view in shared.result]
    products.store_keys(ctx, [(target, total, staged)], part, head, first)
    shared.items.release(item)


def _consume_keys(ctx: WarpgroupContext) -> None:
    ctx.shared.blocks.release_all()
    ctx.shared.items.release_all()
    item = receive_items(ctx, functools.partial(_keys_tile, ctx))
    ctx.shared.items.release(item)  # the slot of the end
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def d_key_kernel(
    d_scores: jax.Array,
    operands: Operands,
    shape: Shape,
    config: AttentionBackwardConfig,
    dtype: Any,
) -> jax.Array:
    """d_key [U, keys, K, H] in `dtype`; `operands` have parts of users' rows."""
    own_dtype = operands.key.dtype
    (sums,) = launch(
        Roles(functools.partial(WarpgroupContext, shape, config), _produce_keys, _consume_keys),
        StoredOperands(d_scores, operands.query, operands.users),
        (query_rows.gradient_type(shape, own_dtype, dtype),),
        config.stored_shared(shape.head_dim),
        dtype=own_dtype,
        name="ikbo_attention_backward_stored_d_key",
        workers=shape.workers,
        has_counter=shape.items > shape.workers,
    )
    return query_rows.add_parts(sums, shape, dtype)
