"""WGMMA accumulators as values, with control over their first and last instruction.

Pallas' own WGMMA takes whole swizzled blocks of k and always adds to its accumulator, which then
has to be zeroed: 56 two-register instructions a thread at the start of every tile, while the
tensor core waits. The one here overwrites the accumulator in the first step of a tile, and stops
early within the last block: K = 866 takes 55 instructions instead of 56.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from ikbo_jax.pallas import mosaic

#: The k of one WGMMA instruction on 16-bit operands.
WGMMA_K = 16


def with_accumulator(run: Callable[[Any], Any], columns: int, *, interpret: bool) -> Any:
    """Calls `run` with an accumulator [64, columns] f32 that `wgmma` has yet to overwrite."""
    if interpret:
        return pl.run_scoped(run, plgpu.ACC((64, columns)))
    return run(None)


def accumulate(
    begin: Any, end: Any, body: Callable[[Any, Any], Any], acc: Any, *, interpret: bool
) -> Any:
    """`lax.fori_loop` over an accumulator."""
    if interpret:

        @pl.loop(begin, end)
        def _(i: Any) -> None:
            body(i, acc)

        return acc
    return lax.fori_loop(begin, end, body, acc)


def accumulated(acc: Any, columns: int, *, interpret: bool) -> jax.Array:
    """The value of an accumulator whose WGMMAs have been waited for."""
    if interpret:
        return acc[...]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((64, columns), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def settle(_: Any, array: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        return mgpu.optimization_barrier(array)  # no use of a register moves before the wait

    return settle(acc)


def wgmma(acc: Any, a_t: Any, b_t: Any, *, overwrite: bool, k: int = 64, interpret: bool) -> Any:
    """Issues acc + a_t[:k].T @ b_t[:, :k].T (without acc under `overwrite`) as one WGMMA group.

    Args:
      acc: [64, columns] f32, or what `with_accumulator` gave.
      a_t: shared memory tile [64, 64] of an `operand_tile`, k by rows.
      b_t: shared memory tile [columns, 64] of an `operand_tile`, columns by k.
    """
    if interpret:  # rows past k are zero
        plgpu.wgmma(acc, a_t.transpose((1, 0)), b_t.transpose((1, 0)))
        return acc

    columns = b_t.shape[0]
    operand = plgpu.RefType(mosaic.operand_transforms(b_t.dtype))
    accumulator = () if overwrite else (plgpu.Layout.WGMMA,)

    @plgpu.inline_mgpu(
        arg_types=(operand, operand, *accumulator),
        return_type=plgpu.ShapeDtypeStruct((64, columns), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def issue(_: Any, a: ir.Value, b: ir.Value, *acc: mgpu.FragmentedArray) -> Any:
        a, b = (mgpu.memref_transpose(x, (1, 0, 3, 2)) for x in (a, b))
        dtype = ir.MemRefType(a.type).element_type
        a_descriptor, a_stride = _descriptor(a, (64, 64), is_lhs=True)
        b_descriptor, b_stride = _descriptor(b, (64, columns), is_lhs=False)
        registers = []
        if acc:
            registers = [vector.extract(r, [], [i]) for r in acc[0].registers.flat for i in (0, 1)]
        nvvm.wgmma_fence_aligned()
        for step in range(k // WGMMA_K):
            registers = _wgmma_instruction(
                registers,
                _advance(a_descriptor, step * a_stride),
                _advance(b_descriptor, step * b_stride),
                columns,
                str(dtype),
            )
        nvvm.wgmma_commit_group_sync_aligned()
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        pairs = [
            vector.from_elements(pair, registers[i : i + 2]) for i in range(0, len(registers), 2)
        ]
        shape = mgpu.WGMMA_LAYOUT.registers_shape((64, columns))
        return mgpu.FragmentedArray(
            _registers=np.array(pairs, dtype=object).reshape(shape),
            _layout=mgpu.WGMMA_LAYOUT,
            _is_signed=None,
        )

    return issue(a_t, b_t, *(() if overwrite else (acc,)))


def _descriptor(tile: ir.Value, group: tuple[int, int], *, is_lhs: bool) -> tuple[ir.Value, int]:
    """WGMMA's shared memory descriptor of a tile; its bytes from one instruction to the next."""
    (base, strides), _, _ = mma_utils.create_descriptor(
        tile,
        swizzle=mosaic.SWIZZLE,
        large_tile=(64, 64),
        group_size=group,
        logical_k_major=not is_lhs,
    )
    return base, strides[1][0]


def _advance(descriptor: ir.Value, num_bytes: int) -> ir.Value:
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(descriptor, mgpu.c(num_bytes >> 4, i64)) if num_bytes else descriptor


def _wgmma_instruction(
    acc: list[ir.Value], a: ir.Value, b: ir.Value, columns: int, dtype: str
) -> list[ir.Value]:
    """One wgmma.mma_async; A is transposed (its m contiguous), an empty `acc` is overwritten."""
    f32 = ir.F32Type.get()
    n = columns // 2
    first = 2 * n if acc else n
    ptx = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(bool(acc))}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{WGMMA_K}.f32.{dtype}.{dtype} "
        f"{{{', '.join(f'${i}' for i in range(n))}}}, ${first}, ${first + 1}, p, 1, 1, 1, 0; }}"
    )
    tied = [str(i) for i in range(n)] if acc else []
    result = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * n),
        [*acc, a, b],
        ptx,
        ",".join(["=f"] * n + tied + ["l", "l"]),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(f32, result, [i]) for i in range(n)]
