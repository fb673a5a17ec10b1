"""WGMMA products: accumulators as values, control over the first and the last WGMMA instruction.

`plgpu.wgmma` multiplies whole swizzled blocks along k and adds to an accumulator that must be
zeroed while the tensor core waits. `wgmma` here overwrites the accumulator in the first k step of a
tile, and ends the last block early: K = 866 takes 55 instructions instead of 56.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from ikbo_jax.pallas.hopper import inline, mosaic
from ikbo_jax.problems.hopper import BLOCK_K, WGMMA_K, WGMMA_M


def with_accumulator(body: Callable[[Any], Any], columns: int) -> Any:
    """Calls `body` with an accumulator [64, columns] f32; the first `wgmma` must overwrite it."""
    if mosaic.is_interpreted():
        return pl.run_scoped(body, plgpu.ACC((64, columns)))
    return body(None)


def with_block_accumulators(body: Callable[[Any], Any], blocks: int) -> Any:
    """Calls `body` with a total for `add_tile_product` of column blocks; it must begin with it."""
    if mosaic.is_interpreted():
        return pl.run_scoped(lambda *total: body(total), *(plgpu.ACC((WGMMA_M, BLOCK_K)),) * blocks)
    return body(None)


def with_row_blocks(body: Callable[[Any], Any], number: int, width: int, columns: int) -> Any:
    """Calls `body` with `number` accumulators [64, columns] for `wgmma_blocks`."""
    if not mosaic.is_interpreted():
        return body((None,) * number)
    blocks = WGMMA_M // width  # the interpreter multiplies block by block

    def grouped(*parts: Any) -> Any:
        return body(tuple(parts[i : i + blocks] for i in range(0, len(parts), blocks)))

    return pl.run_scoped(grouped, *(plgpu.ACC((width, columns)),) * (blocks * number))


def accumulate(begin: Any, end: Any, body: Callable[[Any, Any], Any], acc: Any) -> Any:
    """Runs `lax.fori_loop` over an accumulator."""
    if mosaic.is_interpreted():

        @pl.loop(begin, end)
        def _(i: Any) -> None:
            body(i, acc)

        return acc
    return lax.fori_loop(begin, end, body, acc)


def zeros(columns: int, dtype: Any) -> jax.Array:
    """Makes [64, columns] zeros in an accumulator's layout."""
    return plgpu.layout_cast(jnp.zeros((64, columns), dtype), plgpu.Layout.WGMMA)


def pad(values: jax.Array, width: int) -> jax.Array:
    """Pads values [64, at most width] to [64, width] with zeros."""
    columns = values.shape[1]
    if columns == width:
        return values
    return jnp.concatenate([values, zeros(width - columns, values.dtype)], axis=1)


def wait(pending: int) -> None:
    """Waits until no more than `pending` of this warpgroup's WGMMA groups are in flight."""
    if not mosaic.is_interpreted():
        plgpu.wgmma_wait(pending)
        return
    # The interpreter multiplies at once and ignores waits; tests watch for this read instead.
    pl.run_scoped(lambda acc: plgpu.wgmma_accumulator_load(acc, wait_n=pending), plgpu.ACC((64, 8)))


def after_wait(acc: Any) -> jax.Array:
    """Returns the value of `acc` after the wait for its WGMMAs; no use moves before the wait."""
    if mosaic.is_interpreted():
        if isinstance(acc, tuple):
            # Blocks of rows (`with_row_blocks`) or of columns.
            axis = 0 if acc[0].shape[0] < WGMMA_M else 1
            return jnp.concatenate([part[...] for part in acc], axis=axis)
        return acc if isinstance(acc, jax.Array) else acc[...]

    @inline.code(acc, returns=acc)
    def pinned(array: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        return mgpu.optimization_barrier(array)

    return pinned


def round_early(values: jax.Array, dtype: Any) -> jax.Array:
    """Rounds f32 values [64, columns] while products fly, for `rounded`, which makes an operand.

    Neighbours are exchanged until then: a register that is computed before the wait would otherwise
    become the next product's, and ptxas serialise all products (C7513).
    """
    if mosaic.is_interpreted():
        return values.astype(dtype)
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[jnp.dtype(dtype).name]
    return _by_words(f"cvt.rn.{kind}.f32 $0, $1, $2;", values, dtype)


def rounded(values: jax.Array) -> jax.Array:
    """Returns what `round_early` rounded, once no product is in flight."""
    if mosaic.is_interpreted():
        return values
    return _by_words("prmt.b32 $0, $1, $1, 0x1032;", values, values.dtype)


def _by_words(ptx: str, values: jax.Array, dtype: Any) -> jax.Array:
    """Computes registers of two elements of 16 bits from one word, or from two of f32."""

    @inline.code(values, returns=jax.ShapeDtypeStruct(values.shape, dtype))
    def computed(array: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        kind = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype)))
        registers = array.registers.copy()
        for i, pair in enumerate(registers.flat):
            is_word = values.dtype == dtype
            parts = [pair] if is_word else [vector.extract(pair, [], [j]) for j in (0, 1)]
            word = inline.issue_word(ptx, *map(inline.word, parts))
            registers.flat[i] = mgpu.utils.bitcast(word, kind)
        return inline.accumulator(registers)

    return computed


def undefined(columns: int) -> jax.Array:
    """Makes [64, columns] f32 without a defined value, for `add_product` with a false `is_defined`.

    A finished accumulator in its place would keep its registers occupied until that product.
    """
    if mosaic.is_interpreted():
        return jnp.full((64, columns), jnp.nan, jnp.float32)

    @inline.code(returns=accumulator_type(columns))
    def made() -> mgpu.FragmentedArray:
        return _as_array([llvm.mlir_undef(ir.F32Type.get())] * (columns // 2), columns)

    return made


def wgmma(
    acc: Any, a: Any, b_t: Any, *, overwrite: bool, k: int = 64, a_is_transposed: bool = True
) -> Any:
    """Issues acc + a.T[:, :k] @ b_t[:, :k].T (`overwrite`: without acc) as one WGMMA group.

    `acc` is [64, columns] f32, or from `with_accumulator`; `a` [64, 64] and `b_t` [columns, 64] are
    operand tiles; `k` is a multiple of 16. Without `a_is_transposed`, `a` is rows by k.
    """
    if mosaic.is_interpreted():  # rows past k are zero
        plgpu.wgmma(acc, a.transpose((1, 0)) if a_is_transposed else a, b_t.transpose((1, 0)))
        return acc

    a_bytes = mosaic.SWIZZLE if a_is_transposed else 2  # from one k to the next
    steps = [(i * WGMMA_K * a_bytes, i * WGMMA_K * 2) for i in range(k // WGMMA_K)]
    operands = mosaic.operand(a), mosaic.operand(b_t)
    leading = 8 * mosaic.SWIZZLE * a_is_transposed, 0
    transposes = f"{int(a_is_transposed)}, 0"
    return _issue(None if overwrite else acc, operands, b_t.shape[0], steps, transposes, leading)


def wgmma_blocks(
    acc: Any, a: Any, b_t: Any, *, overwrite: bool, k: int = 64, block_bytes: int = 0
) -> Any:
    """Like `wgmma`, for an operand of column blocks [64 / width, 64, width], k by rows, side by
    side.

    A single block is repeated. Under interpretation, `acc` is an accumulator [width, columns] for
    each block. `b_t` may be [depth / 64, columns, 64] for blocks of more or fewer than 64 rows, of
    `block_bytes` each.
    """
    if mosaic.is_interpreted():
        for i, part in enumerate(acc):
            block = min(i, a.shape[0] - 1)
            if len(b_t.shape) == 2:
                plgpu.wgmma(part, a.at[block].transpose((1, 0)), b_t.transpose((1, 0)))
                continue
            for begin in range(0, k, 64):
                rows = min(64, k - begin)
                left = a.at[block, pl.ds(begin, rows)].transpose((1, 0))
                plgpu.wgmma(part, left, b_t.at[begin // 64, :, pl.ds(0, rows)].transpose((1, 0)))
        return acc

    blocks, depth, width = a.shape
    row_bytes = 2 * width
    swizzled = inline.Typed(a, plgpu.RefType((mosaic.row_swizzle(a.shape, a.dtype),)))
    steps = [
        (i * WGMMA_K * row_bytes, block * block_bytes + b_bytes)
        for i, (block, b_bytes) in enumerate(_k_steps(k))
    ]
    operands, acc = (swizzled, mosaic.operand(b_t)), None if overwrite else acc
    # An operand whose rows are contiguous: the stride is from eight of k to the next eight.
    leading = depth * row_bytes if blocks > 1 else 0, 0
    return _issue(acc, operands, b_t.shape[-2], steps, "1, 0", leading, row_bytes)


def product(q: Any, k: Any, depth: int, *, columns: int | None = None) -> jax.Array:
    """Issues q @ k[:columns].T, [64, columns] f32, as one WGMMA group; read it by `wait`,
    `after_wait`.

    `q` and `k` are operand tiles [column blocks, 64 or rows, 64]. `depth` is rounded up to a
    multiple of 16; `columns`, a multiple of 8, are rows of k; None: all.
    """
    blocks, k_rows, _ = k.shape
    columns = columns or k_rows
    if mosaic.is_interpreted():

        def multiply(acc: Any) -> jax.Array:
            for i in range(blocks):  # columns past the depth are zero
                plgpu.wgmma(acc, q.at[i], k.at[i, :columns].transpose((1, 0)))
            return plgpu.wgmma_accumulator_load(acc, wait_n=1)

        return pl.run_scoped(multiply, plgpu.ACC((64, columns)))

    steps = [
        (block * 64 * mosaic.SWIZZLE + within, block * k_rows * mosaic.SWIZZLE + within)
        for block, within in _k_steps(depth)
    ]
    return _issue(None, (mosaic.operand(q), mosaic.operand(k)), columns, steps, "0, 0")


def add_product(
    acc: jax.Array | None,
    p: jax.Array,
    v: Any,
    staging: Any,
    *,
    columns: int | None = None,
    is_defined: Any = None,
    begin: int = 0,
) -> jax.Array:
    """Issues acc + p @ v[begin : begin + depth], [64, columns] f32, as one WGMMA group.

    Args:
      acc: None is zero: an accumulator that enters its first product as zero would occupy registers
        from the previous tile's stores on.
      p: [64, depth] in v's dtype, depth a multiple of 16.
      v: operand tiles [column blocks, rows, 64] in shared memory, each with 64 columns.
      staging: shared memory [64, at least depth] for the interpreter, which cannot multiply from
        registers.
      is_defined: bool scalar; `acc` counts as zero if it is false. None: true.
      begin: the first row of v that is multiplied, a multiple of 16.
    """
    depth = p.shape[1]
    columns = columns or (0 if acc is None else acc.shape[1])
    blocks, v_rows, _ = v.shape
    if mosaic.is_interpreted():
        staging[:, :depth] = p
        plgpu.commit_smem()
        products = []
        for i in range(blocks):

            def multiply(part: Any, i: int = i) -> jax.Array:
                plgpu.wgmma(part, staging.at[:, :depth], v.at[i, pl.ds(begin, depth)])
                return plgpu.wgmma_accumulator_load(part, wait_n=1)

            products.append(pl.run_scoped(multiply, plgpu.ACC((64, 64))))
        total = jnp.concatenate(products, axis=1)[:, :columns]
        if acc is None:
            return total
        return total + (acc if is_defined is None else jnp.where(is_defined, acc, 0.0))

    accumulator = () if acc is None else (acc,)
    if is_defined is not None:
        accumulator += (is_defined.astype(jnp.int32),)

    @inline.code(mosaic.operand(v), p, *accumulator, returns=accumulator_type(columns))
    def issued(v: ir.Value, p: Any, acc: Any = None, is_defined: Any = None) -> Any:
        p = mgpu.optimization_barrier(p)  # no instruction that computes p moves past the fence
        words = [inline.word(pair) for pair in p.registers.flat]
        base = descriptor(v, v_rows * mosaic.SWIZZLE)
        with Group(v, columns, *([] if acc is None else [acc])) as group:
            for step in range(depth // WGMMA_K):
                v_step = advance(base, (begin + step * WGMMA_K) * mosaic.SWIZZLE)
                a = words[4 * step : 4 * step + 4]
                group.multiply(a, v_step, transposes="1", scale=is_defined if step == 0 else None)
        return group.result

    return issued


def add_tile_product(total: Any, d_scores: Any, keys: Any, *, is_transposed: bool = False) -> Any:
    """Issues total + d_scores @ keys as one WGMMA group; `is_transposed`: d_scores.T.

    `total` is [64, columns] f32, or None for zero; or the interpreter's accumulators, one for each
    column block. `d_scores` [64, 64] and `keys` [column blocks, 64, 64] are operand tiles.
    """
    if mosaic.is_interpreted():
        first = d_scores.transpose((1, 0)) if is_transposed else d_scores
        for i, part in enumerate(total):
            plgpu.wgmma(part, first, keys.at[i])
        return total
    columns = keys.shape[0] * BLOCK_K if total is None else total.shape[1]
    step_bytes = WGMMA_K * mosaic.SWIZZLE
    a_bytes = step_bytes if is_transposed else WGMMA_K * 2
    steps = [(i * a_bytes, i * step_bytes) for i in range(WGMMA_M // WGMMA_K)]
    operands = mosaic.operand(d_scores), mosaic.operand(keys)
    leading, transposes = (0, WGMMA_M * mosaic.SWIZZLE), f"{int(is_transposed)}, 1"
    return _issue(total, operands, columns, steps, transposes, leading)


def _k_steps(depth: int) -> list[tuple[int, int]]:
    """Lists (block of 64, bytes in a row of the block) of every 16 columns of K-major tiles."""
    steps = (divmod(i, 64 // WGMMA_K) for i in range(pl.cdiv(depth, WGMMA_K)))
    return [(block, within * WGMMA_K * 2) for block, within in steps]


def _issue(
    acc: jax.Array | None,
    operands: tuple[inline.Typed, inline.Typed],
    columns: int,
    steps: list[tuple[int, int]],
    transposes: str,
    leading: tuple[int, int] = (0, 0),
    swizzle: int = mosaic.SWIZZLE,
) -> Any:
    """Issues acc (None: 0) + a product of operand tiles a and b as one WGMMA group.

    `steps` are bytes of a and of b, where each instruction begins; `leading` bytes, of a and of b,
    are from a block of columns to the next; `swizzle` is of a.
    """

    @inline.code(*operands, *(() if acc is None else (acc,)), returns=accumulator_type(columns))
    def issued(a: ir.Value, b: ir.Value, *acc: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        a_base, b_base = descriptor(a, leading[0], swizzle=swizzle), descriptor(b, leading[1])
        with Group(b, columns, *acc) as group:
            for a_bytes, b_bytes in steps:
                a_step, b_step = advance(a_base, a_bytes), advance(b_base, b_bytes)
                group.multiply([a_step], b_step, transposes=transposes)
        return group.result

    return issued


def accumulator_type(columns: int) -> Any:
    """Declares an accumulator [64, columns] f32 that a WGMMA group returns."""
    return jax.ShapeDtypeStruct((WGMMA_M, columns), jnp.float32)


def descriptor(tiles: ir.Value, leading: int = 0, *, swizzle: int = mosaic.SWIZZLE) -> ir.Value:
    """Makes a descriptor of operand tiles; `leading`: bytes from a block of columns to the next."""
    return mma_utils.encode_descriptor(
        tiles, leading_byte_offset=leading, stride_byte_offset=8 * swizzle, swizzle=swizzle
    )


def advance(descriptor: ir.Value, num_bytes: int) -> ir.Value:
    """Makes the descriptor of operand tiles that begin `num_bytes` later."""
    i64 = ir.IntegerType.get_signless(64)
    return arith.addi(descriptor, mgpu.c(num_bytes >> 4, i64)) if num_bytes else descriptor


def _as_array(registers: list[ir.Value], columns: int) -> mgpu.FragmentedArray:
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    pairs = [vector.from_elements(pair, registers[i : i + 2]) for i in range(0, len(registers), 2)]
    return inline.array(pairs, (WGMMA_M, columns))


class Group:
    """A WGMMA group that is being issued; `registers` is its accumulator."""

    def __init__(self, b: ir.Value, columns: int, *acc: mgpu.FragmentedArray) -> None:
        """`b` is the operand whose dtype the instructions take; without `acc`, they overwrite."""
        self.dtype, self.columns = str(ir.MemRefType(b.type).element_type), columns
        self.registers = [
            vector.extract(pair, [], [i]) for x in acc for pair in x.registers.flat for i in (0, 1)
        ]

    def __enter__(self) -> Self:
        nvvm.wgmma_fence_aligned()
        return self

    def __exit__(self, *_: object) -> None:
        nvvm.wgmma_commit_group_sync_aligned()

    @property
    def result(self) -> mgpu.FragmentedArray:
        return _as_array(self.registers, self.columns)

    def multiply(
        self, a: Sequence[ir.Value], b: ir.Value, *, transposes: str, scale: ir.Value | None = None
    ) -> None:
        """Issues one wgmma.mma_async of `a`, a descriptor or four registers.

        `transposes` says of each operand in shared memory whether it is "0", k-major, or "1". The
        instruction overwrites an accumulator without registers, and one with `scale` 0.
        """
        acc, f32, n = self.registers, ir.F32Type.get(), self.columns // 2
        shape, dtype = f"m64n{self.columns}k{WGMMA_K}", self.dtype
        first = 2 * n if acc else n
        from_registers = len(a) > 1
        names = [f"${first + i}" for i in range(len(a))]
        operand = f"{{{', '.join(names)}}}" if from_registers else names[0]
        predicate = f"${first + len(a) + 1}" if scale is not None else str(int(bool(acc)))
        ptx = (
            f"{{ .reg .pred p; setp.ne.b32 p, {predicate}, 0; "
            f"wgmma.mma_async.sync.aligned.{shape}.f32.{dtype}.{dtype} "
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
        self.registers = [llvm.extractvalue(f32, result, [i]) for i in range(n)]
