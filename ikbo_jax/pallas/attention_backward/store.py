"""Stores of the attention backward kernel into shared memory.

Addresses derive from `stores.thread_number`, so that no compiler computes them before the loops.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from ikbo_jax.pallas.hopper import inline, mosaic, stores
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.hopper.stores import digits
from ikbo_jax.problems.attention_backward import SUM_COLUMNS


def stage_transposed(tile: Any, values: jax.Array) -> None:
    """tile[...] = values.T for values [64, rows] of 16 bits and an operand tile [rows, 64]."""
    if mosaic.is_interpreted():
        tile[...] = values.T
        return

    @inline.code(mosaic.operand(tile), values)
    def _(tile: ir.Value, values: mgpu.FragmentedArray) -> None:
        words = [inline.word(pair) for pair in values.registers.flat]
        row_of_8, lower, beside, warp = digits(stores.thread_number(), (8, 2, 2, 4))
        # A warp's stmatrix transposes and stores four 8 x 8 matrices; each lane provides the
        # address of one row. Matrix 1 has the next 8 columns of the tile, matrix 2 the next rows.
        row, vector_of_row = beside * 8 + row_of_8, warp * 2 + lower
        offset = row * mosaic.SWIZZLE + (vector_of_row ^ row_of_8) * 16
        address = inline.address(tile, offset, 8)
        for step in range(len(words) // 4):
            inline.issue(
                "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 "
                f"[$0 + {step * 16 * mosaic.SWIZZLE}], {{$1, $2, $3, $4}};",
                address,
                *words[4 * step : 4 * step + 4],
                convergent=True,
            )


def stage_sums(tiles: Any, values: jax.Array, column_block: Any, begin: Any) -> None:
    """Stages [64, rows] f32, columns of the head width by queries, as TMA reads it.

    `tiles` [columns / 32, block, 32] f32 are swizzled, so that a warp's store of 32 values has no
    bank conflict; the values are of `column_block`, 64 columns, and of queries from `begin` on, a
    multiple of 8.
    """
    parts, height, _ = tiles.shape
    count = values.shape[1]
    if mosaic.is_interpreted():
        for i in range(2):
            part = jnp.minimum(2 * column_block + i, parts - 1)

            @pl.when(2 * column_block + i < parts)
            def _(i: int = i, part: Any = part) -> None:
                rows = values[i * SUM_COLUMNS : (i + 1) * SUM_COLUMNS].T
                tiles[part, pl.ds(begin, count), :] = rows

        return

    swizzle: Any = plgpu.SwizzleTransform
    swizzled = inline.Typed(tiles, plgpu.RefType((swizzle(mosaic.SWIZZLE),)))

    @inline.code(swizzled, values, column_block, begin)
    def write(
        tiles: ir.Value, values: mgpu.FragmentedArray, column_block: Integer, begin: Integer
    ) -> None:
        pair, low, high, odd, upper = digits(stores.thread_number(), (4, 4, 2, 2, 2))
        part = column_block * 2 + upper
        row = begin + pair * 2
        base = (part * height + row) * mosaic.SWIZZLE + low * 4
        is_part, first_vector = part < parts, odd * 4 + high
        registers = list(values.registers.flat)
        for half in (0, 1):
            for element in (0, 1):
                row_of_8, column_vector = pair * 2 + element, first_vector + 2 * half
                offset = base + (column_vector ^ row_of_8) * 16
                address = inline.address(tiles, offset, 8)
                for group in range(count // 8):
                    value = vector.extract(registers[2 * group + half], [], [element])
                    immediate = (8 * group + element) * mosaic.SWIZZLE
                    inline.issue(
                        f"st.shared.f32 [$0 + {immediate}], $1;", address, value, predicate=is_part
                    )


def fill_from(values: Any, begin: Any, fill: float) -> None:
    """values[begin:] = fill for an array [at most 128] f32 in shared memory."""
    (count,) = values.shape
    if mosaic.is_interpreted():

        @pl.loop(begin, count)
        def _(i: Any) -> None:
            values[i] = jnp.float32(fill)

        return

    @inline.code(values, begin)
    def _(values: ir.Value, begin: Integer) -> None:
        f32 = ir.F32Type.get()
        thread = stores.thread_number()
        inline.issue(
            "st.shared.f32 [$0], $1;",
            mgpu.utils.getelementptr(mgpu.utils.memref_ptr(values), [thread], f32),
            inline.f32(fill),
            predicate=stores.within(thread, begin, inline.i32(count)),
        )
