"""The end of a pass of the attention kernel: checks, normalises and stores its rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.flash import softmax
from ikbo_jax.pallas.flash.attention_context import Item, WarpgroupContext
from ikbo_jax.pallas.hopper import stores
from ikbo_jax.problems.hopper import BLOCK_K, WGMMA_M


def normalise_and_store(
    ctx: WarpgroupContext,
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
    inverse = jnp.where(row_sum > 0, 1 / row_sum, 0.0)
    # A NaN sum gives a NaN row.
    inverse = jnp.where(row_sum != row_sum, row_sum, inverse)
    if ctx.shape.output_scale != 1:
        inverse = inverse * jnp.float32(ctx.shape.output_scale)
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
            shared.staging.at[ctx.consumer] if ctx.interpret else None,
            interpret=ctx.interpret,
        )
    else:
        _store_staged(ctx, item, index, out)
    if ctx.outputs.lse is not None:
        lse = jnp.log(row_sum) + maximum * jnp.float32(unit)
        lse = jnp.where(has_keys & (row_sum != 0), lse, -jnp.inf)
        stores.store_row_values(
            ctx.outputs.lse,
            lse,
            item.first_row,
            item.head,
            item.begin,
            item.end,
            shared.row_value_staging.at[ctx.consumer] if ctx.interpret else None,
            interpret=ctx.interpret,
        )


def _store_staged(ctx: WarpgroupContext, item: Item, index: Any, out: jax.Array) -> None:
    """Stages the output in the pass's query slot; TMA stores it if all rows belong to the pass."""
    shape = ctx.shape
    matrix_view, copy_view = (view.at[ctx.slot(index), ctx.consumer] for view in ctx.shared.query)
    width = shape.column_blocks * BLOCK_K
    if shape.head_dim < width:  # TMA leaves out columns past the head width
        padding = jnp.zeros((WGMMA_M, width - shape.head_dim), out.dtype)
        out = jnp.concatenate([out, plgpu.layout_cast(padding, plgpu.Layout.WGMMA)], axis=1)
    for i in range(shape.column_blocks):
        matrix_view.at[i][...] = lax.slice(out, (0, i * BLOCK_K), (WGMMA_M, (i + 1) * BLOCK_K))
    plgpu.commit_smem()
    is_end = item.first_row + item.end == shape.rows
    is_full = (item.begin == 0) & (item.end > 0) & ((item.end == WGMMA_M) | is_end)

    @pl.when(is_full)
    def _() -> None:
        for i in range(shape.column_blocks):
            plgpu.copy_smem_to_gmem(
                copy_view.at[i],
                ctx.outputs.out.at[pl.ds(item.first_row, WGMMA_M), item.head, ctx.columns(i)],
            )

    if shape.has_partial_passes:

        @pl.when(~is_full)
        def _() -> None:
            stores.store_staged_rows(
                ctx.outputs.out,
                matrix_view,
                item.first_row,
                item.head,
                item.begin,
                item.end,
                interpret=ctx.interpret,
            )
            plgpu.commit_smem()  # TMA will write queries where these threads have read


def _flag_if_inexact(
    ctx: WarpgroupContext, item: Item, acc: jax.Array, sums: jax.Array
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
    ctx: WarpgroupContext,
    item: Item,
    index: Any,
    acc: jax.Array,
    sums: jax.Array,
    maximum: jax.Array,
) -> None:
    """Flags pass `index` if it is inexact, and stores its rows."""
    row_sum = _flag_if_inexact(ctx, item, acc, sums)
    normalise_and_store(ctx, item, index, acc, row_sum, maximum)
