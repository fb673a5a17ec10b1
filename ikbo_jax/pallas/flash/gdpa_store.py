"""Stores of the GDPA forward kernel: rows of items, and zeros for tiles without keys."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.activations import weights as gdpa_weights
from ikbo_jax.pallas.flash.gdpa_context import GdpaContext
from ikbo_jax.pallas.hopper import mma, operand_tiles, stores
from ikbo_jax.pallas.worklist import lists
from ikbo_jax.problems.hopper import WGMMA_M


def _stage(ctx: GdpaContext, slot: Any, out: jax.Array) -> None:
    """Stages a result in a query slot."""
    tiles = ctx.shared.query.tiles[0].at[slot, ctx.consumer]
    for i, columns in enumerate(operand_tiles.column_blocks(out, tiles.shape[0])):
        block = tiles.at[pl.ds(i, 1)]
        operand_tiles.stage_rows(block, columns, reads_late=True, interpret=ctx.interpret)
    plgpu.commit_smem()


def _store_staged(ctx: GdpaContext, slot: Any, head: Any, first_row: Any, rows: Any) -> None:
    """Stores the first `rows` of the 64 rows staged in a query slot; all 64 by TMA."""
    stores.store_staged(
        ctx,
        [tuple(view.at[slot, ctx.consumer] for view in ctx.shared.query.tiles)],
        [ctx.outputs],
        (first_row, head),
        (0 * rows, rows),
        is_full=rows == WGMMA_M,
        is_partial=(rows > 0) & (rows < WGMMA_M),
    )


def _consumer_rows(ctx: GdpaContext, target: Any, rows: Any) -> tuple[Any, Any]:
    """(first row in the result, rows) of this consumer's part of a tile."""
    before = ctx.consumer * WGMMA_M
    return target + before, jnp.clip(rows - before, 0, WGMMA_M)


def store_item(ctx: GdpaContext, index: Any, acc: jax.Array) -> None:
    """Stores the rows of an item."""
    head, target, rows = ctx.destination(index)
    first_row, rows = _consumer_rows(ctx, target, rows)
    store = functools.partial(_store, ctx, index, head, first_row, rows, acc)
    if ctx.config.skip_empty:
        pl.when(rows > 0)(store)
    else:
        store()


def _store(
    ctx: GdpaContext, index: Any, head: Any, first_row: Any, rows: Any, acc: jax.Array
) -> None:
    out = gdpa_weights.scale_result(ctx.shape.activation, head, acc).astype(ctx.outputs.dtype)
    if ctx.config.q_slots > 1:
        slot = ctx.shared.query.slot(index)
        _stage(ctx, slot, out)
        _store_staged(ctx, slot, head, first_row, rows)
        return
    stores.store_rows(
        ctx.outputs,
        out,
        first_row,
        head,
        0 * rows,
        rows,
        ctx.staging(),
        interpret=ctx.interpret,
    )


def zero_rest(ctx: GdpaContext) -> None:
    """Zeroes the results of tiles without keys: rows with empty sequences, rows of no sequence."""
    heads = ctx.shape.q_heads
    with_keys, tiles = (ctx.operands.counts[i] for i in range(2))
    count = ctx.work_items((tiles - with_keys) * heads)

    @pl.when(count > 0)
    def _() -> None:
        slot = jnp.int32(0)
        _stage(ctx, slot, mma.zeros(ctx.shape.head_dim, ctx.outputs.dtype))

        @pl.loop(0, count)
        def _(i: Any) -> None:
            number = ctx.work_item(i)
            tile, head = with_keys + lax.div(number, heads), lax.rem(number, heads)
            words = ctx.operands.words
            target, rows = words[tile, lists.TARGET], words[tile, lists.ROWS]
            _store_staged(ctx, slot, head, *_consumer_rows(ctx, target, rows))
