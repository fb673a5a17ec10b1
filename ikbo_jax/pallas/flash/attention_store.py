"""The end of a pass of the attention kernel: checks, normalises and stores its rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.flash import softmax
from ikbo_jax.pallas.flash.attention_context import AttentionContext, Item
from ikbo_jax.pallas.hopper import operand_tiles, stores
from ikbo_jax.problems.hopper import WGMMA_M


def normalise_and_store(
    ctx: AttentionContext,
    item: Item,
    index: Any,
    acc: jax.Array,
    row_sum: jax.Array,
    maximum: jax.Array,
    unit: float = softmax.LN_2,
) -> None:
    """Divides `acc` by `row_sum` and stores the rows of a pass.

    Weights are relative to exp(`maximum` * `unit`).
    """
    shared = ctx.shared
    has_keys = item.length > 0
    inverse = softmax.inverse_sums(row_sum, ctx.shape.output_scale)
    out = (acc * lax.broadcast_in_dim(inverse, acc.shape, (0,))).astype(ctx.outputs.out.dtype)
    # Without keys the weights are NaN, and so may be the values that were read.
    out = jnp.where(has_keys, out, jnp.zeros((), out.dtype))
    if ctx.config.q_slots == 1:
        stores.store_rows(
            ctx.outputs.out,
            out,
            item.first_row,
            item.head,
            item.begin,
            item.end,
            ctx.staging(),
            order=ctx.row_order,
            interpret=ctx.interpret,
        )
    else:
        _store_staged(ctx, item, index, out)
    if ctx.outputs.lse is not None:
        lse = jnp.log(row_sum) + maximum * jnp.float32(unit)
        lse = jnp.where(has_keys & (row_sum != 0), lse, -jnp.inf)
        stores.store_rows(
            ctx.outputs.lse,
            lse,
            item.first_row,
            item.head,
            item.begin,
            item.end,
            shared.row_value_staging.at[ctx.consumer] if ctx.interpret else None,
            order=ctx.row_order,
            interpret=ctx.interpret,
        )


def _store_staged(ctx: AttentionContext, item: Item, index: Any, out: jax.Array) -> None:
    """Stages the output in the pass's query slot.

    TMA stores it if all rows belong to the pass, and stay side by side.
    """
    staged = tuple(
        view.at[ctx.shared.query.slot(index), ctx.consumer] for view in ctx.shared.query.tiles
    )
    matrix_view = staged[0]
    for i, columns in enumerate(operand_tiles.column_blocks(out, matrix_view.shape[0])):
        matrix_view.at[i][...] = columns
    plgpu.commit_smem()
    is_end = item.first_row + item.end == ctx.shape.rows
    is_full = (item.begin == 0) & (item.end > 0) & ((item.end == WGMMA_M) | is_end)
    stores.store_staged(
        ctx,
        [staged],
        [ctx.outputs.out],
        (item.first_row, item.head),
        (item.begin, item.end),
        is_full=is_full,
        is_partial=~is_full if ctx.shape.has_partial_passes else None,
        order=ctx.row_order,
    )


def _flag_if_inexact(
    ctx: AttentionContext, item: Item, acc: jax.Array, sums: jax.Array
) -> jax.Array:
    """Row sums [64]; flags the pass if the first maximum was inexact in one of its rows."""
    # Past a user's length weights are zero, but values may be infinite or NaN; and where weights
    # exceed 1, large values may overflow.
    row_sum = jnp.sum(softmax.nan_where_not_finite(sums, acc), axis=1)
    softmax.flag_rows(
        ctx.shared.flags.at[ctx.consumer],
        item.flag,
        row_sum,
        item.begin,
        jnp.where(
            item.length > 0, item.end, item.begin
        ),  # a pass without keys needs no second result
        ctx.shape.sum_limit,
        ctx.interpret,
    )
    return row_sum


def check_and_store(
    ctx: AttentionContext,
    item: Item,
    index: Any,
    acc: jax.Array,
    sums: jax.Array,
    maximum: jax.Array,
) -> None:
    """Flags pass `index` if it is inexact, and stores its rows."""
    row_sum = _flag_if_inexact(ctx, item, acc, sums)
    normalise_and_store(ctx, item, index, acc, row_sum, maximum)
