"""The last launch of `d_query="stored"`: d_query from gradients of scores in device memory.

    d_query = scale * dS @ key

An item is a tile of 128 query rows of one user and key head. d_query stays in registers, while
blocks of 64 of the user's keys, and the gradients of their scores, follow one another. Device
memory limits it.

Warpgroups: 0 and 1 are the consumers, with 64 rows each; one warp of warpgroup 2 is the producer.

Synchronisations:
  1. `items_ready[s]`, `items_free[s]`    slot s has an item's descriptor.
  2. `blocks_ready[s]`, `blocks_free[s]`  stage s has a block of keys and gradients of scores.
  3. A named barrier: the consumers wait for each other after keys past the length are zeroed.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.attention_backward import products
from ikbo_jax.pallas.attention_backward.context import Operands, Shape
from ikbo_jax.pallas.hopper import mosaic, operand_tiles, stores
from ikbo_jax.pallas.hopper.launch import Roles, WarpgroupContext, launch
from ikbo_jax.pallas.worklist.numbering import TILE_WORDS
from ikbo_jax.problems.attention_backward import STORED_BLOCK_KV, AttentionBackwardConfig
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WGMMA_M

#: Words of a tile's descriptor: `TILE_WORDS` in device memory; with the head, in shared memory.
FIRST_ROW, ROWS, USER, KEYS, TARGET, HEAD = range(6)


class StoredOperands(NamedTuple):
    """Device memory that the launch reads."""

    d_scores: Any  # see `context.Outputs`
    key: Any  # [U, S, K, H]
    tiles: Any  # [most tiles + 1, TILE_WORDS] int32; the last entry begins with the number of tiles
    order: Any  # [B] int32, candidates in user order; None if the caller's order is that


@dataclasses.dataclass(frozen=True)
class Context(WarpgroupContext):
    """The context of a warpgroup; a *step* numbers the blocks of keys that the CTA loads."""

    def blocks(self, keys: Any) -> Any:
        return pl.cdiv(keys, STORED_BLOCK_KV)

    @property
    def items(self) -> Any:
        tiles = self.operands.tiles
        return tiles[tiles.shape[0] - 1, FIRST_ROW] * self.shape.kv_heads

    @property
    def item_count(self) -> Any:
        return (self.items - self.worker + self.shape.workers - 1) // self.shape.workers


def _send_item(ctx: Context, item: Any, step: Any) -> Any:
    """Sends a tile's descriptor and all its blocks; returns the next item's first step."""
    shape, shared, operands = ctx.shape, ctx.shared, ctx.operands
    # The gradients that were stored last may still be in L2.
    number = ctx.items - 1 - ctx.worker - item * shape.workers
    tile, head = lax.div(number, shape.kv_heads), lax.rem(number, shape.kv_heads)
    words = [operands.tiles[tile, i] for i in range(TILE_WORDS)]
    words[KEYS] = jnp.clip(words[KEYS] - shape.first_key, 0, shape.kv_len)
    shared.items.send_words(item, (*words, head), after=shared.items)
    last_tile = lax.div(jnp.maximum(words[ROWS] - 1, 0), WGMMA_M)
    blocks = ctx.blocks(words[KEYS])

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
        ctx.load(operands.key, index, columns, ready)

    return step + blocks


def _produce(ctx: Context) -> None:
    lax.fori_loop(0, ctx.item_count, lambda item, step: _send_item(ctx, item, step), jnp.int32(0))
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
    blocks = ctx.blocks(keys)
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
    lax.fori_loop(0, ctx.item_count, lambda item, step: _tile(ctx, item, step), jnp.int32(0))
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def stored_kernel(
    d_scores: jax.Array,
    operands: Operands,
    tiles: Any,
    order: jax.Array | None,
    shape: Shape,
    config: AttentionBackwardConfig,
    *,
    num_sms: int,
    dtype: Any,
) -> jax.Array:
    """Computes d_query [B * T, N, H], in the caller's order, of the keys that `shape` describes."""
    workers = min(num_sms, (tiles.shape[0] - 1) * shape.kv_heads)
    shape = dataclasses.replace(shape, workers=workers)
    (d_query,) = launch(
        Roles(functools.partial(Context, shape, config), _produce, _consume),
        StoredOperands(d_scores, operands.key, tiles, order),
        (jax.ShapeDtypeStruct(shape.d_query, dtype),),
        config.stored_shared(shape.head_dim),
        dtype=operands.query.dtype,
        name="ikbo_attention_backward_stored",
        workers=workers,
    )
    return d_query
