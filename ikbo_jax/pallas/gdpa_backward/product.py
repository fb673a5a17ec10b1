"""A WGMMA product of registers and some rows of a block in shared memory.

Unlike `accumulator.add_product`, it can overwrite its accumulator. An accumulator that enters its
first product would occupy registers from the previous tile's stores on, and a thread has too few
registers for two of them beside scores.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import nvvm, vector

from ikbo_jax.pallas.hopper import accumulator, mosaic


def add_rows(
    total: jax.Array | None,
    p: jax.Array,
    v: Any,
    begin: int,
    columns: int,
    staging: Any,
    *,
    interpret: bool,
) -> jax.Array:
    """Issues total + p @ v[begin : begin + rows] as one WGMMA group.

    Args:
      total: [64, columns] f32; None is zero.
      p: [64, rows] in v's dtype, rows a multiple of 16.
      v: operand tiles [column blocks, block, 64] in shared memory, each with 64 columns.
      begin: the first row of v, a multiple of 16.
      columns: columns of v that are multiplied.
      staging: this warpgroup's shared memory [64, block], only under interpretation: the
        interpreter cannot multiply from registers.

    Returns:
      [64, columns] f32; read its value by `accumulator.wait`, then `accumulator.after_wait`.
    """
    blocks, height, _ = v.shape
    rows = p.shape[1]
    if interpret:
        staged, some = staging.at[:, pl.ds(begin, rows)], v.at[:, pl.ds(begin, rows)]
        if total is None:
            total = jnp.zeros((p.shape[0], columns), jnp.float32)
        return accumulator.add_product(total, jnp.bool_(True), p, some, staged, interpret=interpret)
    operands = (p,) if total is None else (p, total)

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(mosaic.operand_transforms(v.dtype)),
            *(plgpu.Layout.WGMMA,) * len(operands),
        ),
        return_type=plgpu.ShapeDtypeStruct((64, columns), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def issue(_: Any, v: ir.Value, p: Any, *total: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        dtype = str(ir.MemRefType(v.type).element_type)
        p = mgpu.optimization_barrier(p)  # no instruction that computes p moves past the fence
        i32 = ir.IntegerType.get_signless(32)
        words = [mgpu.utils.bitcast(pair, i32) for pair in p.registers.flat]
        base = mma_utils.encode_descriptor(
            v,
            leading_byte_offset=height * mosaic.SWIZZLE,
            stride_byte_offset=8 * mosaic.SWIZZLE,
            swizzle=mosaic.SWIZZLE,
        )
        registers: list[ir.Value] = []
        if total:
            registers = [
                vector.extract(r, [], [i]) for r in total[0].registers.flat for i in (0, 1)
            ]
        nvvm.wgmma_fence_aligned()
        for step in range(rows // accumulator.WGMMA_K):
            row = begin + step * accumulator.WGMMA_K
            v_step = accumulator._advance(base, row * mosaic.SWIZZLE)
            a = words[4 * step : 4 * step + 4]
            registers = accumulator._mma(registers, None, a, v_step, columns, dtype)
        nvvm.wgmma_commit_group_sync_aligned()
        return accumulator._as_array(registers, columns)

    return issue(v, *operands)
