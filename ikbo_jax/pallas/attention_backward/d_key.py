"""The launch of `d_query="stored"` for wide heads that computes d_key from stored dS.

    d_key = scale * dS.T @ query

An item is a tile of 128 keys of one part of a user's rows and one key head. d_key stays in
registers, while blocks of 64 of the user's queries, and the gradients of their scores, follow one
another; rows past the last of the user's part are zeroed. A consumer whose 64 keys are past the
user's length stores zeros.

Warpgroups and synchronisations are those of `stored`; a slot of items may have the end instead.
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
from ikbo_jax.pallas.attention_backward import rows as query_rows
from ikbo_jax.pallas.attention_backward.context import (
    HEAD,
    KEYS,
    PART,
    ROWS,
    TILE,
    Operands,
    Shape,
    receive_items,
    send_items,
)
from ikbo_jax.pallas.hopper import mosaic, operand_tiles, stores
from ikbo_jax.pallas.hopper.launch import Roles, WarpgroupContext, launch
from ikbo_jax.pallas.worklist.numbering import USER_WORDS
from ikbo_jax.problems.attention_backward import AttentionBackwardConfig
from ikbo_jax.problems.hopper import NUM_CONSUMERS, TILE_ROWS, WGMMA_M

#: Query rows of a block: WGMMA reads an operand tile of gradients of scores.
BLOCK_ROWS = WGMMA_M


class DKeyOperands(NamedTuple):
    """Device memory that the launch reads."""

    d_scores: Any  # see `context.Outputs`
    query: Any  # [rows, K, H], see `context.Operands`
    users: Any  # [U * splits, USER_WORDS] int32


@dataclasses.dataclass(frozen=True)
class Context(WarpgroupContext):
    """The context of a warpgroup; a *step* numbers the blocks of queries that the CTA loads."""

    @property
    def tiles(self) -> int:
        """Items of a part of a user's rows and a key head."""
        return pl.cdiv(self.shape.kv_len, TILE_ROWS)

    @property
    def items(self) -> int:
        return self.shape.users * self.shape.splits * self.shape.kv_heads * self.tiles


def _send_item(ctx: Context, item: Any, number: Any, step: Any) -> Any:
    """Sends a tile's descriptor and all its blocks; returns the next item's first step."""
    shape, shared, operands = ctx.shape, ctx.shared, ctx.operands
    tile, rest = lax.rem(number, ctx.tiles), lax.div(number, ctx.tiles)
    head, part = lax.rem(rest, shape.kv_heads), lax.div(rest, shape.kv_heads)
    first_row, rows, target, keys = (operands.users[part, i] for i in range(USER_WORDS))
    keys = keys - (shape.first_key + tile * TILE_ROWS)
    blocks = jnp.where(keys > 0, pl.cdiv(rows, BLOCK_ROWS), 0)
    shared.items.send_words(item, (blocks, rows, part, head, tile, keys), after=shared.items)
    first_plane = head * shape.kv_tiles * NUM_CONSUMERS + tile * NUM_CONSUMERS
    last = lax.div(jnp.maximum(keys - 1, 0), WGMMA_M)

    @pl.loop(0, blocks)
    def _(block: Any) -> None:
        ring, begin = shared.blocks, block * BLOCK_ROWS
        ring.await_free(step + block)
        ready, tiles = ring.ready_at(step + block), ring.copied(step + block)
        for i in range(NUM_CONSUMERS):
            # A tile without keys reads the last one that has some, which comes from L2.
            plane = first_plane + jnp.minimum(i, last)
            source = operands.d_scores.at[plane, pl.ds(target + begin, BLOCK_ROWS)]
            plgpu.copy_gmem_to_smem(source, tiles.at[i], ready)
        columns = tiles.at[pl.ds(NUM_CONSUMERS, shape.column_blocks)]
        ctx.load(operands.query, (pl.ds(first_row + begin, BLOCK_ROWS), head), columns, ready)

    return step + blocks


def _produce(ctx: Context) -> None:
    item = send_items(ctx, ctx.items, functools.partial(_send_item, ctx))
    ctx.shared.items.send_words(item, (jnp.int32(-1),), after=ctx.shared.items)
    # All arrivals must happen before the barriers' memory is released.
    ctx.shared.blocks.drain()
    ctx.shared.items.drain()


def _tile(ctx: Context, item: Any, blocks: Any, first_step: Any) -> None:
    rows, store = ctx.shared.items.word(item, ROWS), functools.partial(_store, ctx, item)
    products.sum_over_blocks(ctx, blocks, first_step, rows, store, is_transposed=True)


def _store(ctx: Context, item: Any, total: jax.Array) -> None:
    """Stores the gradients of the consumer's 64 keys, zeros past the length; frees the item."""
    shape, shared, (target,) = ctx.shape, ctx.shared, ctx.outputs
    part, head, tile, keys = (ctx.shared.items.word(item, i) for i in (PART, HEAD, TILE, KEYS))
    consumer = mosaic.warpgroup_index()
    if target.dtype != jnp.float32:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the item before
    total = jnp.where(consumer * WGMMA_M < keys, total, jnp.float32(0))
    first = (tile * NUM_CONSUMERS + consumer) * WGMMA_M
    if target.dtype == jnp.float32:
        rows = jnp.clip(shape.kv_len - first, 0, WGMMA_M)
        place = (part * shape.kv_len + first, head, jnp.int32(0), rows)
        stores.store_rows(target, total, *place)
    else:
        values, staged = total.astype(target.dtype), shared.result[0].at[consumer]
        for block, columns in enumerate(operand_tiles.column_blocks(values, shape.column_blocks)):
            operand_tiles.stage_rows(staged.at[pl.ds(block, 1)], columns, reads_late=True)
        plgpu.commit_smem()

        @pl.when(first < shape.kv_len)
        def _() -> None:
            tiles = shared.result[1].at[consumer]
            ctx.store(tiles, target, (part, pl.ds(first, WGMMA_M), head))

    shared.items.release(item)


def _consume(ctx: Context) -> None:
    ctx.shared.blocks.release_all()
    ctx.shared.items.release_all()
    item = receive_items(ctx, functools.partial(_tile, ctx))
    ctx.shared.items.release(item)  # the slot of the end
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)


def d_key_kernel(
    d_scores: jax.Array,
    operands: Operands,
    shape: Shape,
    config: AttentionBackwardConfig,
    *,
    dtype: Any,
    num_sms: int,
) -> jax.Array:
    """d_key [U, keys, K, H] in `dtype`; `operands` have parts of users' rows."""
    context = functools.partial(Context, shape, config)
    key = operands.key
    keys = (shape.users, shape.kv_len, *key.shape[2:])
    workers = min(num_sms, shape.items)
    (sums,) = launch(
        Roles(context, _produce, _consume),
        DKeyOperands(d_scores, operands.query, operands.users),
        (query_rows.gradient_type(keys, key.dtype, shape.splits, dtype),),
        config.stored_shared(shape.head_dim),
        dtype=key.dtype,
        name="ikbo_attention_backward_stored_d_key",
        workers=1 if mosaic.is_interpreted() else workers,
        has_counter=context(None, None, None).items > workers,
    )
    return query_rows.add_parts(sums, keys, shape.splits, dtype)
