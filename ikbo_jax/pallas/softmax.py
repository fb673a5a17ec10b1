"""The softmax of a warpgroup's 64 rows, and stores of single rows; scores are [64, keys] f32.

Scores are unscaled products, as the tensor core leaves them.  The exponent includes the scale times
log2(e): p = exp2(score * log2_scale - maximum), where `maximum` is the maximum scaled score.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.pallas import mosaic

#: Rows of a warpgroup, the m of a WGMMA.
ROWS = 64
#: Layout of one value per row, the result of a reduction along rows.
ROW_LAYOUT = plgpu.Layout.WGMMA.reduce(1)
#: Columns of a partial sum: with 8, a thread adds only values that it holds.
PARTIAL = 8
LN_2 = 0.6931471805599453
WARPGROUP_SIZE = 128

#: From these row sums on, a fixed maximum may have cost precision or range.  bf16 has f32's range:
#: its limit keeps sums of weights times values far from overflow.  f16 weights end at 65504.
SUM_LIMITS = {"bfloat16": 2.0**40, "float16": 2.0**15}
#: Row sums below this have lost the weight of the maximum, which should be 1.  `exponentials` takes
#: one instruction that rounds once, so beyond 2^24 that weight is exp2 of the maximum's rounding
#: error.
SUM_MINIMUM = 0.5


def row_extreme(scores: jax.Array, log2_scale: float) -> jax.Array:
    """[64], the unscaled score of each row whose scaled score is largest."""
    extreme = jnp.max if log2_scale > 0 else jnp.min
    return extreme(scores, axis=1)


def row_maximum(scores: jax.Array, log2_scale: float) -> jax.Array:
    """[64], the maximum of the scaled scores."""
    return row_extreme(scores, log2_scale) * jnp.float32(log2_scale)


def exponentials(scores: jax.Array, maximum: jax.Array, log2_scale: float) -> jax.Array:
    """exp2(score * log2_scale - maximum), [64, keys]."""
    shift = lax.broadcast_in_dim(maximum, scores.shape, (0,))
    return jnp.exp2(scores * jnp.float32(log2_scale) - shift)


def exact_exponentials(scores: jax.Array, extreme: jax.Array, log2_scale: float) -> jax.Array:
    """exp2((score - extreme) * log2_scale), [64, keys]: 1 at the extreme, however large it is.

    It takes one more instruction per element than `exponentials`.
    """
    shift = lax.broadcast_in_dim(extreme, scores.shape, (0,))
    return jnp.exp2((scores - shift) * jnp.float32(log2_scale))


def partial_sums(p: jax.Array) -> jax.Array:
    """[64, 8], whose row sums equal the row sums of `p`."""
    parts = [lax.slice(p, (0, i), (p.shape[0], i + PARTIAL)) for i in range(0, p.shape[1], PARTIAL)]
    while len(parts) > 1:
        pairs = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[2 * len(pairs) :]
    return parts[0]


def nan_where_not_finite(sums: jax.Array, acc: jax.Array) -> jax.Array:
    """`sums` [64, 8] with NaN in rows where `acc` [64, width] holds NaN or infinity."""
    for i in range(
        0, acc.shape[1], PARTIAL
    ):  # 0 times NaN or infinity is NaN; one FFMA per element
        sums = lax.slice(acc, (0, i), (acc.shape[0], i + PARTIAL)) * jnp.float32(0) + sums
    return sums


def mask(scores: jax.Array, keys: Any, log2_scale: float) -> jax.Array:
    """Masks scores from column `keys` on, so that their weights are 0."""
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
    nothing = jnp.float32(-jnp.inf if log2_scale > 0 else jnp.inf)
    return jnp.where(column < keys, scores, nothing)


def flag_rows(
    flags: Any, index: Any, row_sum: jax.Array, begin: Any, end: Any, limit: float, interpret: bool
) -> None:
    """Sets flags[index] and flags[0] to 1 if a row in [begin, end) has a sum outside
    [SUM_MINIMUM, limit).

    Every thread that holds such a row writes, so threads need not communicate.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW_LAYOUT)
    is_good = (row_sum < jnp.float32(limit)) & (row_sum >= jnp.float32(SUM_MINIMUM))
    is_good = is_good | (row < begin) | (row >= end)
    if interpret:

        @pl.when(~jnp.all(is_good))
        def _() -> None:
            flags[index] = 1
            flags[0] = 1

        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), ROW_LAYOUT))
    def write(_: Any, flags: ir.Value, index: Any, is_good: mgpu.FragmentedArray) -> None:
        i32 = ir.IntegerType.get_signless(32)
        first, second = (vector.extract(r, [], [0]) for r in is_good.registers.flat)
        bad = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(first, second), mgpu.c(0, i32))
        base = mgpu.utils.memref_ptr(flags)
        for at in (index.registers.item(), mgpu.c(0, i32)):
            address = mgpu.utils.getelementptr(base, [at], i32)
            mgpu.utils.inline_ptx(
                "st.shared.b32 [$0], $1;",
                address,
                mgpu.c(1, i32),
                predicate=bad,
                has_side_effects=True,
            )

    write(flags, index, is_good.astype(jnp.int32))


def _thread() -> ir.Value:
    """This thread's number in its warpgroup, read at each use.

    LLVM would keep a value that never changes in a register from the kernel's beginning on, through
    loops that have no register to spare.
    """
    i32 = ir.IntegerType.get_signless(32)
    thread = mgpu.utils.inline_ptx("mov.u32 $0, %tid.x;", result_types=i32, has_side_effects=True)
    return arith.remui(thread, mgpu.c(WARPGROUP_SIZE, i32))


def thread_row(thread: ir.Value, half: int) -> ir.Value:
    """The row of a thread's registers in a WGMMA accumulator; `half` is 0 or 1."""
    i32 = ir.IntegerType.get_signless(32)
    warp = arith.divui(thread, mgpu.c(32, i32))
    lane = arith.divui(arith.remui(thread, mgpu.c(32, i32)), mgpu.c(4, i32))
    row = arith.addi(arith.muli(warp, mgpu.c(16, i32)), lane)
    return arith.addi(row, mgpu.c(8 * half, i32))


def within(row: ir.Value, begin: ir.Value, end: ir.Value) -> ir.Value:
    """begin ≤ row < end."""
    i = arith.CmpIPredicate
    return arith.andi(arith.cmpi(i.sge, row, begin), arith.cmpi(i.slt, row, end))


def device_address(ref: ir.Value, terms: list[tuple[ir.Value, int]], size: int) -> ir.Value:
    """Address of element sum(value * stride), in 64 bits; `size` is an element's bytes."""
    i64 = ir.IntegerType.get_signless(64)
    offset = mgpu.c(0, i64)
    for value, stride in terms:
        wide = arith.extsi(i64, value)
        offset = arith.addi(offset, arith.muli(wide, mgpu.c(stride, i64)))
    byte = ir.IntegerType.get_signless(8)
    offset = arith.muli(offset, mgpu.c(size, i64))
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [offset], byte)


def store_rows(
    output: Any,
    values: jax.Array,
    first_row: Any,
    head: Any,
    begin: Any,
    end: Any,
    staging: Any,
    *,
    interpret: bool,
) -> None:
    """output[first_row + r, head] = values[r] for r in [begin, end), from registers.

    Args:
      output: device memory [rows, heads, width].
      values: [64, width] in its dtype.
      staging: this warpgroup's shared memory [64, at least width], only under interpretation.
    """
    _, heads, width = output.shape
    if interpret:
        staging[:, :width] = values

        @pl.loop(begin, end)
        def _(r: Any) -> None:
            output[first_row + r, head, :] = staging[r, :width]

        return

    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, scalar, scalar, scalar, scalar)
    )
    def write(_: Any, output: ir.Value, values: Any, *scalars: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        first_row, head, begin, end = (s.registers.item() for s in scalars)
        # Read at each use, the thread's number spills at H = 192 and 256; read early, at H = 128.
        early = arith.remui(mgpu.thread_idx(), mgpu.c(WARPGROUP_SIZE, i32))
        thread = _thread() if width <= 128 else early
        column = arith.muli(arith.remui(thread, mgpu.c(4, i32)), mgpu.c(2, i32))
        words = [mgpu.utils.bitcast(pair, i32) for pair in values.registers.flat]
        for half in (0, 1):
            row = thread_row(thread, half)
            is_wanted = within(row, begin, end)
            target = arith.addi(first_row, row)
            terms = [(target, heads * width), (head, width), (column, 1)]
            address = device_address(output, terms, 2)
            for i, word in enumerate(words[half::2]):
                mgpu.utils.inline_ptx(
                    f"st.global.b32 [$0 + {16 * i}], $1;",
                    address,
                    word,
                    predicate=is_wanted,
                    has_side_effects=True,
                )

    write(output, values, first_row, head, begin, end)


def stage_tile(tile: Any, values: jax.Array, *, interpret: bool) -> None:
    """tile[...] = values, [64, 64] of 16 bits, for an `operand_tile`'s view for WGMMA.

    An assignment in Pallas would also read the old values, and would keep addresses that depend on
    the thread's number from the kernel's beginning on.
    """
    if interpret:
        tile[...] = values
        return

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(mosaic.operand_transforms(tile.dtype)), plgpu.Layout.WGMMA)
    )
    def write(_: Any, tile: ir.Value, values: mgpu.FragmentedArray) -> None:
        i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        thread = _thread()
        # stmatrix stores four 8 x 8 matrices: lane l provides the address of row l % 8 of matrix
        # l / 8. Matrix 1 is below matrix 0, matrix 2 is beside it.
        row_of_8 = arith.remui(thread, mgpu.c(8, i32))
        matrix = arith.divui(arith.remui(thread, mgpu.c(32, i32)), mgpu.c(8, i32))
        half, beside = (op(matrix, mgpu.c(2, i32)) for op in (arith.remui, arith.divui))
        row = arith.muli(arith.divui(thread, mgpu.c(32, i32)), mgpu.c(16, i32))
        row = arith.addi(arith.addi(row, arith.muli(half, mgpu.c(8, i32))), row_of_8)
        row_offset = arith.muli(row, mgpu.c(mosaic.SWIZZLE, i32))
        base = mgpu.utils.memref_ptr(tile)
        words = [mgpu.utils.bitcast(pair, i32) for pair in values.registers.flat]
        for i in range(0, len(words), 4):
            vector_of_row = arith.addi(beside, mgpu.c(i // 2, i32))
            swizzled = arith.muli(arith.xori(vector_of_row, row_of_8), mgpu.c(16, i32))
            mgpu.utils.inline_ptx(
                "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
                mgpu.utils.getelementptr(base, [arith.addi(row_offset, swizzled)], byte),
                *words[i : i + 4],
                has_side_effects=True,
                convergent=True,
            )

    write(tile, values)


def store_row_values(
    output: Any,
    values: jax.Array,
    first_row: Any,
    head: Any,
    begin: Any,
    end: Any,
    staging: Any,
    *,
    interpret: bool,
) -> None:
    """output[first_row + r, head] = values[r] for r in [begin, end); [64] f32 to [rows, heads]."""
    _, heads = output.shape
    if interpret:
        staging[...] = values

        @pl.loop(begin, end)
        def _(r: Any) -> None:
            output[first_row + r, head] = staging[r]

        return

    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ROW_LAYOUT, scalar, scalar, scalar, scalar))
    def write(_: Any, output: ir.Value, values: Any, *scalars: Any) -> None:
        first_row, head, begin, end = (s.registers.item() for s in scalars)
        thread = _thread()
        for half, register in enumerate(values.registers.flat):
            row = thread_row(thread, half)
            terms = [(arith.addi(first_row, row), heads), (head, 1)]
            mgpu.utils.inline_ptx(  # the four threads of a row write the same value
                "st.global.f32 [$0], $1;",
                device_address(output, terms, 4),
                vector.extract(register, [], [0]),
                predicate=within(row, begin, end),
                has_side_effects=True,
            )

    write(output, values, first_row, head, begin, end)


def zero_rows(tiles: Any, begin: Any, *, interpret: bool) -> None:
    """Zeroes operand tiles [column blocks, rows, 64] of 16 bits from row `begin` on."""
    blocks, rows, width = tiles.shape
    if interpret:

        @pl.loop(begin, rows)
        def _(r: Any) -> None:
            for i in range(blocks):
                tiles[i, r, :] = jnp.zeros((width,), tiles.dtype)

        return

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(mosaic.operand_transforms(tiles.dtype)),
            plgpu.Layout.WG_SPLAT(()),
        )
    )
    def write(_: Any, tiles: ir.Value, begin: mgpu.FragmentedArray) -> None:
        # A row is 128 contiguous bytes; swizzling permutes it only within them.
        i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        base = mgpu.utils.memref_ptr(tiles)
        thread = _thread()
        vectors = mosaic.SWIZZLE // 16
        zero = mgpu.c(0, i32)
        for i in range(blocks * rows * vectors // WARPGROUP_SIZE):
            vector_index = arith.addi(thread, mgpu.c(i * WARPGROUP_SIZE, i32))
            row = arith.remui(arith.divui(vector_index, mgpu.c(vectors, i32)), mgpu.c(rows, i32))
            offset = arith.muli(vector_index, mgpu.c(16, i32))
            mgpu.utils.inline_ptx(
                "st.shared.v4.b32 [$0], {$1, $1, $1, $1};",
                mgpu.utils.getelementptr(base, [offset], byte),
                zero,
                predicate=arith.cmpi(arith.CmpIPredicate.sge, row, begin.registers.item()),
                has_side_effects=True,
            )

    write(tiles, begin)
