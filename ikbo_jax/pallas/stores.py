"""Stores of rows that a warpgroup has staged in shared memory.

LLVM and ptxas compute values that are constant across tiles before all loops; such values would
occupy registers in the main loop, which has none to spare.  So addresses derive from a thread
number that neither compiler knows to be constant, and loop bounds are unknown to both.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas import mosaic, softmax


def thread_number() -> ir.Value:
    """This thread's number in its warpgroup; ptxas may move a read of %tid, but not a shuffle."""
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(
        "{ .reg .u32 lane; mov.u32 lane, %laneid; mov.u32 $0, %tid.x; and.b32 $0, $0, 127; "
        "shfl.sync.idx.b32 $0, $0, lane, 31, 0xffffffff; }",
        result_types=i32,
        has_side_effects=True,
        convergent=True,
    )


def store_staged_rows(
    output: Any,
    tiles: Any,
    first_row: Any,
    head: Any,
    begin: Any,
    end: Any,
    *,
    interpret: bool,
) -> None:
    """output[first_row + r, head] = row r of `tiles` for r in [begin, end).

    Stores from registers would need addresses of rows and columns beside the values, and spill.
    The stores are a loop: for unrolled stores, ptxas computes 56 registers of addresses before all
    other loops.

    Args:
      output: device memory [rows, heads, width].
      tiles: operand tiles [column blocks, 64, 64], committed; they are read when this returns.
    """
    _, heads, width = output.shape
    blocks, height, columns = tiles.shape
    if interpret:

        @pl.loop(begin, end)
        def _(r: Any) -> None:
            for i in range(blocks):
                part = min(columns, width - i * columns)
                output[first_row + r, head, pl.ds(i * columns, part)] = tiles[i, r, :part]

        return
    scalar = plgpu.Layout.WG_SPLAT(())
    vectors = mosaic.SWIZZLE // 16  # of a row of a block
    per_step = softmax.WARPGROUP_SIZE // vectors  # rows

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            plgpu.RefType(mosaic.operand_transforms(tiles.dtype)),
            *(scalar,) * 5,
        )
    )
    def write(_: Any, output: ir.Value, tiles: ir.Value, *scalars: Any) -> None:
        i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        step, first_row, head, begin, end = (s.registers.item() for s in scalars)
        thread = thread_number()
        vector_of_row = arith.remui(thread, mgpu.c(vectors, i32))
        row = arith.addi(
            arith.muli(step, mgpu.c(per_step, i32)), arith.divui(thread, mgpu.c(vectors, i32))
        )
        swizzled = arith.xori(vector_of_row, arith.remui(row, mgpu.c(vectors, i32)))
        offset = arith.addi(
            arith.muli(row, mgpu.c(mosaic.SWIZZLE, i32)), arith.muli(swizzled, mgpu.c(16, i32))
        )
        column = arith.muli(vector_of_row, mgpu.c(columns // vectors, i32))
        terms = [(arith.addi(first_row, row), heads * width), (head, width), (column, 1)]
        address = softmax.device_address(output, terms, 2)
        source = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(tiles), [offset], byte)
        is_row = softmax.within(row, begin, end)
        for block in range(blocks):
            left = mgpu.c(width - block * columns, i32)
            mgpu.utils.inline_ptx(
                "{ .reg .b32 a, b, c, d; "
                f"@$2 ld.shared.v4.b32 {{a, b, c, d}}, [$1 + {block * height * mosaic.SWIZZLE}]; "
                f"@$2 st.global.v4.b32 [$0 + {block * columns * 2}], {{a, b, c, d}}; }}",
                address,
                source,
                arith.andi(is_row, arith.cmpi(arith.CmpIPredicate.slt, column, left)),
                has_side_effects=True,
            )

    @pl.loop(jnp.int32(0), pl.cdiv(end, per_step))
    def write_step(step: Any) -> None:
        write(output, tiles, step, first_row, head, begin, end)
