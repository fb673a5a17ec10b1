"""WGMMA accumulators as values, with control over the first and the last WGMMA instruction.

`plgpu.wgmma` multiplies whole swizzled blocks along k and always adds to its accumulator, which
must therefore be zeroed: 56 two-register instructions per thread at the start of every tile, while
the tensor core waits. `wgmma` here overwrites the accumulator in the first k step of a tile, and
ends the last block early: K = 866 takes 55 instructions instead of 56.
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

from ikbo_jax.pallas.hopper import mosaic

#: The k of one WGMMA instruction on 16-bit operands.
WGMMA_K = 16


def with_accumulator(body: Callable[[Any], Any], columns: int, *, interpret: bool) -> Any:
    """Calls `body` with an accumulator [64, columns] f32; the first `wgmma` must overwrite it."""
    if interpret:
        return pl.run_scoped(body, plgpu.ACC((64, columns)))
    return body(None)


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


def value_after_wait(acc: Any, columns: int, *, interpret: bool) -> jax.Array:
    """The value of an accumulator, after the wait for its WGMMAs."""
    if interpret:
        return acc[...]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((64, columns), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def pin(_: Any, array: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        return mgpu.optimization_barrier(array)  # no use of a register moves before the wait

    return pin(acc)


def wgmma(acc: Any, a_t: Any, b_t: Any, *, overwrite: bool, k: int = 64, interpret: bool) -> Any:
    """Issues acc + a_t[:k].T @ b_t[:, :k].T (`overwrite`: without acc) as one WGMMA group.

    Args:
      acc: [64, columns] f32, or the accumulator from `with_accumulator`.
      a_t: operand tile [64, 64] in shared memory, k by rows; see `mosaic.operand_tile`.
      b_t: operand tile [columns, 64] in shared memory, columns by k.
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
    """(WGMMA's descriptor of an operand tile, bytes by which it advances per instruction)."""
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
    """One wgmma.mma_async; A is transposed (m is contiguous).  It overwrites an empty `acc`."""
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


# Attention: scores = q @ k.T from shared memory, and p @ v with p in registers.


def product(
    q: Any, k: Any, depth: int, *, columns: int | None = None, interpret: bool
) -> jax.Array:
    """Issues q @ k[:columns].T as one WGMMA group; read its value by `wait`, then `after_wait`.

    Args:
      q: operand tiles [column blocks, 64, 64] in shared memory, each with 64 columns of the depth.
      k: operand tiles [column blocks, rows, 64], likewise.
      depth: columns of q and k that are multiplied.
      columns: rows of k that are multiplied, a multiple of 8; None: all.

    Returns:
      [64, columns] f32.
    """
    blocks, k_rows, _ = k.shape
    columns = columns or k_rows
    if interpret:

        def multiply(acc: Any) -> jax.Array:
            for i in range(blocks):  # columns past the depth are zero
                plgpu.wgmma(acc, q.at[i], k.at[i, :columns].transpose((1, 0)))
            return plgpu.wgmma_accumulator_load(acc, wait_n=1)

        return pl.run_scoped(multiply, plgpu.ACC((64, columns)))

    operand = plgpu.RefType(mosaic.operand_transforms(k.dtype))

    @plgpu.inline_mgpu(
        arg_types=(operand, operand),
        return_type=plgpu.ShapeDtypeStruct((64, columns), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def issue(_: Any, q: ir.Value, k: ir.Value) -> mgpu.FragmentedArray:
        dtype = str(ir.MemRefType(k.type).element_type)
        q_base, k_base = (_row_major_descriptor(x) for x in (q, k))
        registers: list[ir.Value] = []
        nvvm.wgmma_fence_aligned()
        for step in range(depth // WGMMA_K):
            block, within = divmod(step, 64 // WGMMA_K)
            q_step, k_step = (
                _advance(base, block * rows * mosaic.SWIZZLE + within * WGMMA_K * 2)
                for base, rows in ((q_base, 64), (k_base, k_rows))
            )
            registers = _mma(registers, None, [q_step], k_step, columns, dtype)
        nvvm.wgmma_commit_group_sync_aligned()
        return _as_array(registers, columns)

    return issue(q, k)


def add_product(
    acc: jax.Array, is_defined: Any, p: jax.Array, v: Any, staging: Any, *, interpret: bool
) -> jax.Array:
    """Issues acc + p @ v as one WGMMA group; `acc` counts as zero unless `is_defined`.

    Args:
      acc: [64, columns] f32.
      is_defined: bool scalar.
      p: [64, depth] in v's dtype.
      v: operand tiles [column blocks, rows, 64] in shared memory, each with 64 columns; the first
        `depth` rows are multiplied.
      staging: this warpgroup's shared memory [64, at least rows], only under interpretation: the
        interpreter cannot multiply from registers.

    Returns:
      [64, columns] f32; read its value by `wait`, then `after_wait`.
    """
    columns, depth = acc.shape[1], p.shape[1]
    blocks, v_rows, _ = v.shape
    if interpret:
        staging[:, :depth] = p
        plgpu.commit_smem()
        products = []
        for i in range(blocks):

            def multiply(part: Any, i: int = i) -> jax.Array:
                plgpu.wgmma(part, staging.at[:, :depth], v.at[i, :depth])
                return plgpu.wgmma_accumulator_load(part, wait_n=1)

            products.append(pl.run_scoped(multiply, plgpu.ACC((64, 64))))
        return jnp.where(is_defined, acc, 0.0) + jnp.concatenate(products, axis=1)[:, :columns]

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            plgpu.Layout.WG_SPLAT(()),
            plgpu.Layout.WGMMA,
            plgpu.RefType(mosaic.operand_transforms(v.dtype)),
        ),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def issue(_: Any, acc: Any, is_defined: Any, p: Any, v: ir.Value) -> mgpu.FragmentedArray:
        dtype = str(ir.MemRefType(v.type).element_type)
        i32 = ir.IntegerType.get_signless(32)
        p = mgpu.optimization_barrier(p)  # no instruction that computes p moves past the fence
        words = [mgpu.utils.bitcast(pair, i32) for pair in p.registers.flat]
        registers = [vector.extract(r, [], [i]) for r in acc.registers.flat for i in (0, 1)]
        base = mma_utils.encode_descriptor(
            v,
            leading_byte_offset=v_rows * mosaic.SWIZZLE,
            stride_byte_offset=8 * mosaic.SWIZZLE,
            swizzle=mosaic.SWIZZLE,
        )
        scale = is_defined.registers.item()
        nvvm.wgmma_fence_aligned()
        for step in range(depth // WGMMA_K):
            v_step = _advance(base, step * WGMMA_K * mosaic.SWIZZLE)
            a = words[4 * step : 4 * step + 4]
            registers = _mma(registers, scale if step == 0 else None, a, v_step, columns, dtype)
        nvvm.wgmma_commit_group_sync_aligned()
        return _as_array(registers, columns)

    return issue(acc, is_defined.astype(jnp.int32), p, v)


def undefined(columns: int, *, interpret: bool) -> jax.Array:
    """[64, columns] f32 without a defined value, for `add_product` with a false `is_defined`.

    A finished accumulator in its place would keep its registers occupied until that product.
    """
    if interpret:
        return jnp.full((64, columns), jnp.nan, jnp.float32)

    @plgpu.inline_mgpu(
        return_type=plgpu.ShapeDtypeStruct((64, columns), jnp.float32, layout=plgpu.Layout.WGMMA)
    )
    def make(_: Any) -> mgpu.FragmentedArray:
        return _as_array([llvm.mlir_undef(ir.F32Type.get())] * (columns // 2), columns)

    return make()


def wait(pending: int, *, interpret: bool) -> None:
    """Waits until no more than `pending` of this warpgroup's WGMMA groups are in flight."""
    if not interpret:
        plgpu.wgmma_wait(pending)
        return
    # The interpreter multiplies at once and ignores waits; tests watch for this read instead.
    pl.run_scoped(lambda acc: plgpu.wgmma_accumulator_load(acc, wait_n=pending), plgpu.ACC((64, 8)))


def after_wait(acc: jax.Array, *, interpret: bool) -> jax.Array:
    """`acc` after the wait for its WGMMAs: the compiler moves no use of it before the wait."""
    return acc if interpret else value_after_wait(acc, acc.shape[1], interpret=False)


def _row_major_descriptor(tiles: ir.Value) -> ir.Value:
    return mma_utils.encode_descriptor(
        tiles,
        leading_byte_offset=0,
        stride_byte_offset=8 * mosaic.SWIZZLE,
        swizzle=mosaic.SWIZZLE,
    )


def _as_array(registers: list[ir.Value], columns: int) -> mgpu.FragmentedArray:
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    pairs = [vector.from_elements(pair, registers[i : i + 2]) for i in range(0, len(registers), 2)]
    return mgpu.FragmentedArray(
        _registers=np.array(pairs, dtype=object).reshape(
            mgpu.WGMMA_LAYOUT.registers_shape((64, columns))
        ),
        _layout=mgpu.WGMMA_LAYOUT,
        _is_signed=None,
    )


def _mma(
    acc: list[ir.Value],
    scale: ir.Value | None,
    a: list[ir.Value],
    b: ir.Value,
    columns: int,
    dtype: str,
) -> list[ir.Value]:
    """One wgmma.mma_async.

    Either `a` is one descriptor, and a and b are k-major; or `a` is four registers, and b has its
    columns contiguous.  The instruction overwrites an empty `acc`, and an `acc` with `scale` 0.
    """
    f32 = ir.F32Type.get()
    n = columns // 2
    first = 2 * n if acc else n
    from_registers = len(a) > 1
    names = [f"${first + i}" for i in range(len(a))]
    operand = f"{{{', '.join(names)}}}" if from_registers else names[0]
    predicate = f"${first + len(a) + 1}" if scale is not None else str(int(bool(acc)))
    transposes = "1" if from_registers else "0, 0"
    ptx = (
        f"{{ .reg .pred p; setp.ne.b32 p, {predicate}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{WGMMA_K}.f32.{dtype}.{dtype} "
        f"{{{', '.join(f'${i}' for i in range(n))}}}, {operand}, ${first + len(a)}, "
        f"p, 1, 1, {transposes}; }}"
    )
    tied = [str(i) for i in range(n)] if acc else []
    kinds = ["r"] * 4 if from_registers else ["l"]
    result = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * n),
        [*acc, *a, b, *([] if scale is None else [scale])],
        ptx,
        ",".join(["=f"] * n + tied + kinds + ["l"] + ([] if scale is None else ["r"])),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [llvm.extractvalue(f32, result, [i]) for i in range(n)]
