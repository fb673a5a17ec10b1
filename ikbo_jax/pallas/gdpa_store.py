"""What leaves the GDPA forward kernel: rows of items, and zeros for tiles without keys."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas import gdpa_tiles, gdpa_weights, softmax, stores
from ikbo_jax.pallas.gdpa_role import Role
from ikbo_jax.tuning.configs import BLOCK_K, WGMMA_M


def _stage(role: Role, slot: Any, out: jax.Array) -> None:
    """Writes a result where the queries of a slot were."""
    shape = role.shape
    matrix_view = role.shared.query[0].at[slot, role.consumer]
    width = shape.column_blocks * BLOCK_K
    if shape.head_dim < width:  # what lies past the head width is left out
        padding = jnp.zeros((WGMMA_M, width - shape.head_dim), out.dtype)
        out = jnp.concatenate([out, plgpu.layout_cast(padding, plgpu.Layout.WGMMA)], axis=1)
    for i in range(shape.column_blocks):
        columns = lax.slice(out, (0, i * BLOCK_K), (WGMMA_M, (i + 1) * BLOCK_K))
        softmax.stage_tile(matrix_view.at[i], columns, interpret=role.interpret)
    plgpu.commit_smem()


def _store_staged(role: Role, slot: Any, head: Any, first_row: Any, rows: Any) -> None:
    """Stores the first `rows` rows of what is staged in a slot: by TMA if it is all of them."""
    shape = role.shape
    matrix_view, copy_view = (view.at[slot, role.consumer] for view in role.shared.query)

    @pl.when(rows == WGMMA_M)
    def _() -> None:
        for i in range(shape.column_blocks):
            plgpu.copy_smem_to_gmem(
                copy_view.at[i],
                role.out.at[pl.ds(first_row, WGMMA_M), head, role.columns(i)],
            )

    @pl.when((rows > 0) & (rows < WGMMA_M))
    def _() -> None:
        stores.store_staged_rows(
            role.out, matrix_view, first_row, head, 0 * rows, rows, interpret=role.interpret
        )
        plgpu.commit_smem()  # TMA writes the next queries where these threads have just read


def _own_rows(role: Role, target: Any, rows: Any) -> tuple[Any, Any]:
    """(first row in the result, rows) of this consumer's part of a tile."""
    before = role.consumer * WGMMA_M
    return target + before, jnp.clip(rows - before, 0, WGMMA_M)


def finish(role: Role, index: Any, acc: jax.Array) -> None:
    """Stores the rows of an item."""
    head, target, rows = role.place(index)
    first_row, rows = _own_rows(role, target, rows)
    store = functools.partial(_store, role, index, head, first_row, rows, acc)
    if role.config.skip_empty:
        pl.when(rows > 0)(store)
    else:
        store()


def _store(role: Role, index: Any, head: Any, first_row: Any, rows: Any, acc: jax.Array) -> None:
    out = gdpa_weights.finish(role.shape.weighing, head, acc).astype(role.out.dtype)
    if role.config.q_slots > 1:
        slot = role.slot(index)
        _stage(role, slot, out)
        _store_staged(role, slot, head, first_row, rows)
        return
    softmax.store_rows(
        role.out,
        out,
        first_row,
        head,
        0 * rows,
        rows,
        role.shared.rows.at[role.consumer] if role.interpret else None,
        interpret=role.interpret,
    )


def zero_rest(role: Role) -> None:
    """Zeroes the results of tiles without keys: of empty sequences, and of rows of none."""
    heads = role.shape.q_heads
    done, tiles = (role.operands.counts[i] for i in range(2))
    count = role.share((tiles - done) * heads)

    @pl.when(count > 0)
    def _() -> None:
        slot = jnp.int32(0)
        zeros = jnp.zeros((WGMMA_M, role.shape.head_dim), role.out.dtype)
        _stage(role, slot, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))

        @pl.loop(0, count)
        def _(i: Any) -> None:
            number = role.turn(i)
            tile, head = done + lax.div(number, heads), lax.rem(number, heads)
            words = role.operands.words
            target, rows = words[tile, gdpa_tiles.TARGET], words[tile, gdpa_tiles.ROWS]
            _store_staged(role, slot, head, *_own_rows(role, target, rows))
