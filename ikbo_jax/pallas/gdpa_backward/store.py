"""Stores of a backward kernel's rows: into shared memory, and of f32 rows to device memory.

Addresses derive from `stores.thread_number`, so that no compiler computes them before the loops.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.hopper import mosaic, stores


def zero_tiles(tiles: Any, *, interpret: bool) -> None:
    """Zeroes operand tiles [column blocks, rows, 64] of 16 bits in shared memory."""
    if not interpret:
        stores.zero_rows(tiles, jnp.int32(0), interpret=interpret)
        return
    for i in range(tiles.shape[0]):  # row by row would take the interpreter seconds
        tiles[i, :, :] = jnp.zeros(tiles.shape[1:], tiles.dtype)


def stage_rows(tiles: Any, values: jax.Array, *, interpret: bool) -> None:
    """Writes [64, width] of 16 bits to operand tiles [column blocks, 64, 64], zeros past width."""
    blocks, rows, columns = tiles.shape
    width = values.shape[1]
    if interpret:
        for i in range(blocks):
            part = values[:, i * columns : (i + 1) * columns]
            tiles[i, :, :] = jnp.pad(part, ((0, 0), (0, columns - part.shape[1])))
        return

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(mosaic.operand_transforms(tiles.dtype)),
            plgpu.Layout.WGMMA,
        )
    )
    def write(_: Any, tiles: ir.Value, values: mgpu.FragmentedArray) -> None:
        i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        words = [mgpu.utils.bitcast(pair, i32) for pair in values.registers.flat]
        words += [mgpu.c(0, i32)] * ((blocks * columns - width) // 4)
        base = mgpu.utils.memref_ptr(tiles)
        thread = stores.thread_number()

        def part(heads_per_streamed: int, count: int) -> ir.Value:
            whole = arith.divui(thread, mgpu.c(heads_per_streamed, i32))
            return arith.remui(whole, mgpu.c(count, i32))

        # A warp's stmatrix stores four 8 x 8 matrices; each lane provides the address of one row.
        row_of_8, lower, right, warp = part(1, 8), part(8, 2), part(16, 2), part(32, 4)
        row = arith.addi(arith.muli(warp, mgpu.c(16, i32)), row_of_8)
        row = arith.addi(row, arith.muli(lower, mgpu.c(8, i32)))
        row_offset = arith.muli(row, mgpu.c(mosaic.SWIZZLE, i32))
        per_block = columns // 16
        for step in range(blocks * per_block):
            block, within = divmod(step, per_block)
            vector_of_row = arith.addi(right, mgpu.c(2 * within, i32))
            offset = arith.addi(
                arith.addi(row_offset, mgpu.c(block * rows * mosaic.SWIZZLE, i32)),
                arith.muli(arith.xori(vector_of_row, row_of_8), mgpu.c(16, i32)),
            )
            mgpu.utils.inline_ptx(
                "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
                mgpu.utils.getelementptr(base, [offset], byte),
                *words[4 * step : 4 * step + 4],
                has_side_effects=True,
                convergent=True,
            )

    write(tiles, values)


def store_f32_rows(
    output: Any,
    values: jax.Array,
    first_row: Any,
    head: Any,
    rows: Any,
    staging: Any,
    *,
    interpret: bool,
) -> None:
    """output[first_row + r, head] = values[r] for r in [0, rows).

    Args:
      output: device memory [rows, heads, width] f32.
      values: [64, width] f32.
      staging: this warpgroup's shared memory [64, at least width] f32, only under interpretation.
    """
    _, heads, width = output.shape
    if interpret:
        staging[:, :width] = values

        @pl.loop(jnp.int32(0), rows)
        def _(r: Any) -> None:
            output[first_row + r, head, :] = staging[r, :width]

        return

    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, scalar, scalar, scalar))
    def write(_: Any, output: ir.Value, values: mgpu.FragmentedArray, *scalars: Any) -> None:
        i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
        first_row, head, rows = (s.registers.item() for s in scalars)
        thread = stores.thread_number()
        column = arith.muli(arith.remui(thread, mgpu.c(4, i32)), mgpu.c(2, i32))
        pairs = [mgpu.utils.bitcast(pair, i64) for pair in values.registers.flat]
        for half in (0, 1):
            row = stores.thread_row(thread, half)
            target = arith.addi(first_row, row)
            terms = [(target, heads * width), (head, width), (column, 1)]
            address = stores.device_address(output, terms, 4)
            for i, pair in enumerate(pairs[half::2]):
                mgpu.utils.inline_ptx(
                    f"st.global.b64 [$0 + {32 * i}], $1;",
                    address,
                    pair,
                    predicate=arith.cmpi(arith.CmpIPredicate.slt, row, rows),
                    has_side_effects=True,
                )

    write(output, values, first_row, head, rows)
