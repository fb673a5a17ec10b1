"""WGMMA products of the attention backward kernel, besides `mma.product`.

Both read one operand with its rows as the depth, which WGMMA calls transposed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WGMMA_K, WGMMA_M

#: Bytes of WGMMA_K rows of an operand tile.
STEP_BYTES = WGMMA_K * mosaic.SWIZZLE


def add_rows(total: jax.Array, p: jax.Array, tiles: Any, staging: Any, *, interpret: bool) -> Any:
    """Issues total + p @ tiles as one WGMMA group.

    Args:
      total: [64, width] f32.
      p: [64, depth] in the tiles' dtype, in registers.
      tiles: operand tiles [column blocks, depth, 64] in shared memory, each with 64 columns.
      staging: this warpgroup's shared memory [64, at least depth], only under interpretation: the
        interpreter cannot multiply from registers.

    Returns:
      [64, width] f32; read its value by `mma.wait`, then `mma.after_wait`.
    """
    width, depth = total.shape[1], p.shape[1]
    blocks, height, _ = tiles.shape
    if interpret:
        staging[:, :depth] = p
        plgpu.commit_smem()
        parts = []
        for i in range(blocks):

            def multiply(part: Any, i: int = i) -> jax.Array:
                plgpu.wgmma(part, staging.at[:, :depth], tiles.at[i])
                return plgpu.wgmma_accumulator_load(part, wait_n=1)

            parts.append(pl.run_scoped(multiply, plgpu.ACC((WGMMA_M, 64))))
        return total + jnp.concatenate(parts, axis=1)[:, :width]

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(mosaic.operand_transforms(tiles.dtype)),
            plgpu.Layout.WGMMA,
            plgpu.Layout.WGMMA,
        ),
        return_type=_type(width),
    )
    def issue(_: Any, tiles: ir.Value, p: Any, total: Any) -> mgpu.FragmentedArray:
        dtype = str(ir.MemRefType(tiles.type).element_type)
        p = mgpu.optimization_barrier(p)  # no instruction that computes p moves past the fence
        i32 = ir.IntegerType.get_signless(32)
        words = [mgpu.utils.bitcast(pair, i32) for pair in p.registers.flat]
        base = _descriptor(tiles, height * mosaic.SWIZZLE)
        registers = [vector.extract(r, [], [i]) for r in total.registers.flat for i in (0, 1)]
        nvvm.wgmma_fence_aligned()
        for step in range(depth // WGMMA_K):
            a, b = words[4 * step : 4 * step + 4], _advance(base, step * STEP_BYTES)
            registers = _instruction(registers, a, b, width, dtype, "1")
        nvvm.wgmma_commit_group_sync_aligned()
        return _as_array(registers, width)

    return issue(tiles, p, total)


def sum_over_keys(
    keys: Any, d_scores: Any, column_block: Any, rows: Any, *, interpret: bool
) -> Any:
    """Issues sum(keys[c, column_block].T @ d_scores[c, rows].T) over consumers c as one group.

    Args:
      keys: operand tiles [2 consumers, column blocks, 64, 64] in shared memory, keys by columns.
      d_scores: operand tiles [2 consumers, block, 64] in shared memory, queries by keys.
      column_block: int32.
      rows: (first row, a multiple of 8 as int32; number of rows) of `d_scores`.

    Returns:
      [64, number of rows] f32, columns of the head width by queries; see `add_rows`.
    """
    begin, count = rows
    if interpret:

        def multiply(acc: Any) -> jax.Array:
            for c in range(NUM_CONSUMERS):
                plgpu.wgmma(
                    acc,
                    keys.at[c, column_block].transpose((1, 0)),
                    d_scores.at[c, pl.ds(begin, count)].transpose((1, 0)),
                )
            return plgpu.wgmma_accumulator_load(acc, wait_n=1)

        return pl.run_scoped(multiply, plgpu.ACC((WGMMA_M, count)))

    _, blocks, key_rows, _ = keys.shape
    _, block, _ = d_scores.shape
    operand = plgpu.RefType(mosaic.operand_transforms(keys.dtype))
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(operand, operand, scalar, scalar), return_type=_type(count))
    def issue(_: Any, keys: ir.Value, d_scores: ir.Value, *scalars: Any) -> mgpu.FragmentedArray:
        dtype = str(ir.MemRefType(keys.type).element_type)
        column_block, begin = (s.registers.item() for s in scalars)
        key_base = _offset(_descriptor(keys, 0), column_block, key_rows * mosaic.SWIZZLE)
        d_scores_base = _offset(_descriptor(d_scores, 0), begin, mosaic.SWIZZLE)
        registers: list[ir.Value] = []
        nvvm.wgmma_fence_aligned()
        for c in range(NUM_CONSUMERS):
            for step in range(key_rows // WGMMA_K):
                a = _advance(key_base, c * blocks * key_rows * mosaic.SWIZZLE + step * STEP_BYTES)
                b = _advance(d_scores_base, c * block * mosaic.SWIZZLE + step * WGMMA_K * 2)
                registers = _instruction(registers, [a], b, count, dtype, "1, 0")
        nvvm.wgmma_commit_group_sync_aligned()
        return _as_array(registers, count)

    return issue(keys, d_scores, column_block, begin)


def _type(columns: int) -> Any:
    return plgpu.ShapeDtypeStruct((WGMMA_M, columns), jnp.float32, layout=plgpu.Layout.WGMMA)


def _descriptor(tiles: ir.Value, leading_bytes: int) -> ir.Value:
    return mma_utils.encode_descriptor(
        tiles,
        leading_byte_offset=leading_bytes,
        stride_byte_offset=8 * mosaic.SWIZZLE,
        swizzle=mosaic.SWIZZLE,
    )


def _offset(descriptor: ir.Value, count: ir.Value, num_bytes: int) -> ir.Value:
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(descriptor, arith.muli(arith.extui(i64, count), mgpu.c(num_bytes >> 4, i64)))


def _advance(descriptor: ir.Value, num_bytes: int) -> ir.Value:
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(descriptor, mgpu.c(num_bytes >> 4, i64)) if num_bytes else descriptor


def _as_array(registers: list[ir.Value], columns: int) -> mgpu.FragmentedArray:
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    pairs = [vector.from_elements(pair, registers[i : i + 2]) for i in range(0, len(registers), 2)]
    shape = mgpu.WGMMA_LAYOUT.registers_shape((WGMMA_M, columns))
    return mgpu.FragmentedArray(
        _registers=np.array(pairs, dtype=object).reshape(shape),
        _layout=mgpu.WGMMA_LAYOUT,
        _is_signed=None,
    )


def _instruction(
    acc: list[ir.Value], a: list[ir.Value], b: ir.Value, columns: int, dtype: str, transposes: str
) -> list[ir.Value]:
    """One wgmma.mma_async, which overwrites an empty `acc`.

    Args:
      a: a descriptor, or four registers.
      transposes: the instruction's last arguments: of b if `a` is in registers, of a and b if not.
    """
    f32 = ir.F32Type.get()
    n = columns // 2
    first = 2 * n if acc else n
    names = [f"${first + i}" for i in range(len(a))]
    operand = f"{{{', '.join(names)}}}" if len(a) > 1 else names[0]
    ptx = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(bool(acc))}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{WGMMA_K}.f32.{dtype}.{dtype} "
        f"{{{', '.join(f'${i}' for i in range(n))}}}, {operand}, ${first + len(a)}, "
        f"p, 1, 1, {transposes}; }}"
    )
    tied = [str(i) for i in range(n)] if acc else []
    kinds = ["r"] * 4 if len(a) > 1 else ["l"]
    result = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * n),
        [*acc, *a, b],
        ptx,
        ",".join(["=f"] * n + tied + kinds + ["l"]),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(f32, result, [i]) for i in range(n)]
