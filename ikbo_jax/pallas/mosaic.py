"""Small parts that the Mosaic GPU kernels share.

Whatever Pallas' GPU interpreter cannot run sits in one function here, beside an equal formulation
for interpretation, so that the tests on a CPU exercise the kernel body that runs on the GPU.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

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

#: Bytes of a shared memory row under the widest swizzle, which every operand tile here uses.
SWIZZLE = 128
#: Threads of a warpgroup.
WARPGROUP_SIZE = 128
#: The k of one WGMMA instruction on 16-bit operands.
WGMMA_K = 16


def compiler_params() -> plgpu.CompilerParams:
    """Parameters under which a kernel places every barrier itself."""
    return plgpu.CompilerParams(
        approx_math=True,
        unsafe_no_auto_barriers=True,
        reduction_scratch_bytes=0,
        lowering_semantics=plgpu.LoweringSemantics.Lane,
    )


def swizzle_columns(dtype: Any) -> int:
    """Elements of one swizzled shared memory row."""
    return SWIZZLE // jnp.dtype(dtype).itemsize


def operand_tile(shape: tuple[int, ...], dtype: Any, *, interpret: bool) -> Any:
    """Type of a shared memory tile [..., rows, 64] that TMA fills and WGMMA reads, or the reverse.

    WGMMA and stmatrix address tiles of 8 rows.  TMA would refuse such a tile where the array's rows
    are no multiple of 8 (K = 866, M = 433), but needs none: with one swizzled column block a
    row-major tile is the same bytes.  So the tile is a union of both views (see `tile_views`).
    The interpreter gives the members of a union separate memory; there, one plain tile is both.
    """
    if shape[-1] != swizzle_columns(dtype) or shape[-2] % 8:
        raise ValueError(f"a tile needs {swizzle_columns(dtype)} columns and 8n rows, got {shape}")
    if interpret:
        return plgpu.SMEM(shape, dtype)
    swizzle = plgpu.SwizzleTransform(SWIZZLE)
    tiling = plgpu.TilingTransform((8, shape[-1]))
    return plgpu.RefUnion(
        plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle)),
        plgpu.SMEM(shape, dtype, transforms=(swizzle,)),
    )


def tile_views(ref: Any, *, interpret: bool) -> tuple[Any, Any]:
    """(view for WGMMA and register stores, view for TMA) of an `operand_tile`."""
    if interpret:
        return ref, ref
    matrix_view, copy_view = ref
    return matrix_view, copy_view


def tile_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


# Accumulators.  Pallas' own WGMMA takes whole swizzled blocks of k and always adds to its accumulator,
# which then has to be zeroed: 56 instructions a thread at the start of every tile, while the tensor
# core waits.  The one here multiplies into the accumulator's registers (first step of a tile) and stops
# early within a block (last step: K = 866 takes 55 instructions instead of 56).


def with_accumulator(run: Any, columns: int, *, interpret: bool) -> Any:
    """Calls `run` with an accumulator [64, columns] f32 that `wgmma` has yet to overwrite."""
    if interpret:
        return pl.run_scoped(run, plgpu.ACC((64, columns)))
    return run(None)


def accumulate(begin: Any, end: Any, body: Any, acc: Any, *, interpret: bool) -> Any:
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
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(SWIZZLE))
    operand = plgpu.RefType(transforms)
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
    """WGMMA's shared memory descriptor of a tile, and its bytes from one instruction to the next."""
    (base, strides), _, _ = mma_utils.create_descriptor(
        tile,
        swizzle=SWIZZLE,
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
    """One wgmma.mma_async: A transposed (its m contiguous), B not; overwrites where `acc` is empty."""
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


# A fragment is a [64, columns] f32 WGMMA accumulator on its way between CTAs, through device memory.
# It travels as f32 rounded to 24 bits (16 significant ones, f32's range), split in two planes: the
# upper 16 bits of every value, which are a bf16, and the 8 bits below.  Registers stand in memory in
# their own order: word w of thread t at [w // 4, t, w % 4], so that every access of a warp is 512
# contiguous bytes.


class Fragment(NamedTuple):
    """A fragment in registers, or its type, or the device memory that holds it."""

    upper: Any  # bf16 [64, columns] in WGMMA layout; memory: int32 [columns / 16, 128, 4]
    lower: Any  # int32 [columns / 8 * 128]; memory: int32 [columns / 16, 128, 2]


def fragment_types(columns: int, leading: tuple[int, ...], *, interpret: bool) -> Fragment:
    """Types of an array of fragments in device memory."""
    if interpret:
        shape = (*leading, 64, columns)
        return Fragment(
            jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)
        )
    groups = columns // 16
    return Fragment(
        jax.ShapeDtypeStruct((*leading, groups, WARPGROUP_SIZE, 4), jnp.int32),
        jax.ShapeDtypeStruct((*leading, groups, WARPGROUP_SIZE, 2), jnp.int32),
    )


def fragment_columns(memory: Fragment, begin: Any, columns: int, *, interpret: bool) -> Fragment:
    """The part of a fragment in device memory that holds `columns` columns from `begin`."""
    if interpret:
        return Fragment(*(plane.at[:, pl.ds(begin, columns)] for plane in memory))
    groups = pl.ds(begin // 16, columns // 16)
    return Fragment(*(plane.at[groups] for plane in memory))


def _device_pointer(ref: ir.Value) -> ir.Value:
    """Pointer known to be to device memory: a generic one would make slower instructions."""
    return llvm.addrspacecast(ir.Type.parse("!llvm.ptr<1>"), mgpu.utils.memref_ptr(ref))


def _thread_vector(base: ir.Value, index: int, width: int) -> ir.Value:
    """Address of this thread's vector number `index`, of `width` 32-bit words."""
    i32 = ir.IntegerType.get_signless(32)
    thread = arith.remui(mgpu.thread_idx(), mgpu.c(WARPGROUP_SIZE, i32))
    offset = arith.addi(
        arith.muli(thread, mgpu.c(width, i32)), mgpu.c(index * WARPGROUP_SIZE * width, i32)
    )
    return mgpu.utils.getelementptr(base, [offset], i32)


def _load_words(source: ir.Value, vectors: int, width: int) -> list[ir.Value]:
    i32 = ir.IntegerType.get_signless(32)
    base = _device_pointer(source)
    words = []
    for v in range(vectors):
        vec = llvm.load(
            ir.VectorType.get((width,), i32), _thread_vector(base, v, width), alignment=4 * width
        )
        words += [vector.extract(vec, [], [i]) for i in range(width)]
    return words


def _store_words(target: ir.Value, words: list[ir.Value], width: int) -> None:
    i32 = ir.IntegerType.get_signless(32)
    base = _device_pointer(target)
    for v in range(len(words) // width):
        vec = vector.from_elements(
            ir.VectorType.get((width,), i32), words[v * width : (v + 1) * width]
        )
        llvm.store(vec, _thread_vector(base, v, width), alignment=4 * width)


def _lower_layout(columns: int) -> plgpu.Layout:
    return plgpu.Layout.WG_STRIDED((columns // 8 * WARPGROUP_SIZE,), vec_size=1)


def load_fragment(memory: Fragment, columns: int, *, interpret: bool) -> Fragment:
    """Asks for a fragment; the values arrive while the caller goes on."""
    if interpret:
        return Fragment(memory.upper[...], memory.lower[...])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=(
            plgpu.ShapeDtypeStruct((64, columns), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
            plgpu.ShapeDtypeStruct(
                (columns // 8 * WARPGROUP_SIZE,), jnp.int32, layout=_lower_layout(columns)
            ),
        ),
    )
    def load(_: Any, upper: ir.Value, lower: ir.Value) -> Any:
        bf16, i32 = ir.BF16Type.get(), ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), bf16)
        pairs = [mgpu.utils.bitcast(w, pair) for w in _load_words(upper, columns // 16, 4)]
        words = [
            vector.from_elements(ir.VectorType.get((1,), i32), [w])
            for w in _load_words(lower, columns // 16, 2)
        ]
        shape = mgpu.WGMMA_LAYOUT.registers_shape((64, columns))
        layout = _lower_layout(columns).to_mgpu()
        return (
            mgpu.FragmentedArray(
                _registers=np.array(pairs, dtype=object).reshape(shape),
                _layout=mgpu.WGMMA_LAYOUT,
                _is_signed=None,
            ),
            mgpu.FragmentedArray(
                _registers=np.array(words, dtype=object).reshape(
                    layout.registers_shape((columns // 8 * WARPGROUP_SIZE,))
                ),
                _layout=layout,
                _is_signed=True,
            ),
        )

    return Fragment(*load(*memory))


def store_fragment(memory: Fragment, value: jax.Array, *, interpret: bool) -> None:
    """Stores an accumulator [64, columns] f32 as a fragment."""
    if interpret:
        memory.upper[...] = value
        memory.lower[...] = jnp.zeros_like(value)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(_: Any, upper: ir.Value, lower: ir.Value, array: mgpu.FragmentedArray) -> None:
        i32 = ir.IntegerType.get_signless(32)
        bits = [
            _round_to_24_bits(mgpu.utils.bitcast(vector.extract(pair, [], [i]), i32))
            for pair in array.registers.flat
            for i in range(2)
        ]
        uppers = [_permute_bytes(a, b, 0x7632) for a, b in zip(bits[::2], bits[1::2], strict=True)]
        halves = [_permute_bytes(a, b, 0x0051) for a, b in zip(bits[::2], bits[1::2], strict=True)]
        lowers = [
            _permute_bytes(a, b, 0x5410) for a, b in zip(halves[::2], halves[1::2], strict=True)
        ]
        _store_words(upper, uppers, 4)
        _store_words(lower, lowers, 2)

    store(*memory, value)


def _permute_bytes(a: ir.Value, b: ir.Value, selector: int) -> ir.Value:
    """PTX prmt: byte i of the result is byte selector[i] of b:a."""
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(f"prmt.b32 $0, $1, $2, 0x{selector:04x};", a, b, result_types=i32)


def _round_to_24_bits(bits: ir.Value) -> ir.Value:
    """Rounds the bits of a finite f32 so that `add_fragment` recovers it to 16 significant bits.

    Unpacking repeats byte 1 in byte 0, which saves it an instruction a value; subtracting half of
    that range before truncation centres the error.  Infinities and NaNs keep their upper bits.
    """
    i32 = ir.IntegerType.get_signless(32)
    magnitude = arith.andi(bits, mgpu.c(0x7FFFFFFF, i32))
    finite = arith.cmpi(arith.CmpIPredicate.ult, magnitude, mgpu.c(0x7F7FFF00, i32))
    low = arith.andi(arith.shrui(bits, mgpu.c(8, i32)), mgpu.c(0xFF, i32))
    rounded = arith.addi(arith.subi(bits, low), mgpu.c(0x80, i32))
    # a value below 0x100 would wrap; those are denormal numbers, which truncation keeps as well
    normal = arith.cmpi(arith.CmpIPredicate.ugt, magnitude, mgpu.c(0x00800000, i32))
    return arith.select(arith.andi(finite, normal), rounded, bits)


def add_fragment(acc: jax.Array, fragment: Fragment, *, interpret: bool) -> jax.Array:
    """acc + fragment, f32 [64, columns]."""
    if interpret:
        return acc + fragment.upper

    columns = acc.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA, _lower_layout(columns)),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def add(_: Any, acc: Any, upper: Any, lower: Any) -> Any:
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        lowers = [vector.extract(r, [], [0]) for r in lower.registers.flat]
        registers = acc.registers.copy()
        for r, (pair, value) in enumerate(
            zip(upper.registers.flat, acc.registers.flat, strict=True)
        ):
            word = mgpu.utils.bitcast(pair, i32)
            low = lowers[r // 2]
            sums = []
            for i in range(2):
                byte = 4 + 2 * (r % 2) + i
                selector = (0x1000 if i == 0 else 0x3000) + (0x0000 if i == 0 else 0x0200)
                selector += (byte << 4) + byte
                bits = _permute_bytes(word, low, selector)
                sums.append(
                    arith.addf(vector.extract(value, [], [i]), mgpu.utils.bitcast(bits, f32))
                )
            registers.flat[r] = vector.from_elements(ir.VectorType.get((2,), f32), sums)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return add(acc, *fragment)


def release_to_device(*, interpret: bool) -> None:
    """Makes this thread's writes to device memory visible to whoever is signalled after it."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        mgpu.utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
        mgpu.utils.warpgroup_barrier()

    fence()
