"""Loads operands by a warpgroup's threads, where TMA would need aligned rows, or short boxes."""

import functools
import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.hopper import mosaic, stores
from ikbo_jax.problems.hopper import BLOCK_K, WARPGROUP_SIZE
from ikbo_jax.problems.resident_compression import elements_of_load, is_copied

#: Copies of a thread in an iteration. Rows that begin at other multiples than of 8 bytes are copied
#: through registers (`_load_unaligned`), and as many vectors as these are in flight at a time.
UNROLLED, UNROLLED_LOADS = 8, 6
#: Words of two vectors.
_WORDS = 8


class Region(NamedTuple):
    """Tiles that a weight fills: `blocks` from `first` on, of each part's `blocks_of_part`."""

    first: int
    blocks: int
    blocks_of_part: int


def load(weight: Any, tiles: Any, region: Region, first_row: Any, first_k: Any) -> None:
    """Fills operand tiles [parts * blocks_of_part, rows, 64] with a weight [M, K], 0 outside of it.

        tiles[p * blocks_of_part + first + i, r, c]
            = weight[first_row + p * rows + r, first_k + 64 * i + c]

    `first_k` is a multiple of 16. WGMMAs may read the tiles after `finish`.
    """
    m, k = weight.shape
    all_blocks, rows, _ = tiles.shape
    first, blocks, blocks_of_part = region
    parts = all_blocks // blocks_of_part
    if mosaic.is_interpreted():
        size = (parts * rows, blocks * BLOCK_K)
        padded = jnp.pad(weight[...], [(0, x) for x in size])
        whole = lax.dynamic_slice(padded, (first_row, first_k), size)
        for part, i in itertools.product(range(parts), range(blocks)):
            at = (part * rows, i * BLOCK_K)
            end = (at[0] + rows, at[1] + BLOCK_K)
            tiles[part * blocks_of_part + first + i] = lax.slice(whole, at, end)
        return

    elements = elements_of_load(k)
    of_row = blocks * BLOCK_K // elements
    count = parts * rows * of_row
    is_aligned = is_copied(k)
    unrolled = UNROLLED if is_aligned else UNROLLED_LOADS
    scalar = plgpu.Layout.WG_SPLAT(())
    ref = plgpu.RefType(mosaic.operand_transforms(tiles.dtype))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ref, *(scalar,) * 3))
    def copy(_: Any, weight: ir.Value, tiles: ir.Value, *scalars: Any) -> None:
        i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        iteration, first_row, first_k = (s.registers.item() for s in scalars)
        is_less = functools.partial(arith.cmpi, arith.CmpIPredicate.slt)
        unit = arith.muli(iteration, mgpu.c(unrolled * WARPGROUP_SIZE, i32))
        unit = arith.addi(unit, stores.thread_number())
        waiting = []
        for i in range(unrolled):
            number = arith.addi(unit, mgpu.c(i * WARPGROUP_SIZE, i32))
            row, column = _divided(number, of_row)
            column = arith.muli(column, mgpu.c(elements, i32))
            offset = _offset(row, column, rows, region)
            target = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(tiles), [offset], byte)
            row, column = arith.addi(first_row, row), arith.addi(first_k, column)
            is_wanted = is_less(number, mgpu.c(count, i32))
            is_inside = arith.andi(is_less(row, mgpu.c(m, i32)), is_less(column, mgpu.c(k, i32)))
            zero = mgpu.c(0, i32)
            row, column = (arith.select(is_inside, x, zero) for x in (row, column))
            source = stores.device_address(weight, [(row, k), (column, 1)], 2)
            if not is_aligned:
                valid = arith.minsi(arith.subi(mgpu.c(k, i32), column), mgpu.c(elements, i32))
                valid = arith.select(arith.andi(is_inside, is_wanted), valid, zero)
                words = _load_unaligned(weight, m * k, source, valid)
                waiting.append((target, source, valid, words, is_wanted))
                continue
            size = mgpu.c(2 * elements, i32)
            kind = "cg" if elements == 8 else "ca"
            mgpu.utils.inline_ptx(
                f"cp.async.{kind}.shared.global [$0], [$1], {2 * elements}, $2;",
                target,
                source,
                arith.select(is_inside, size, zero),
                predicate=is_wanted,
                has_side_effects=True,
            )
        for loaded in waiting:
            _store_unaligned(*loaded)

    @pl.loop(jnp.int32(0), jnp.int32(pl.cdiv(count, unrolled * WARPGROUP_SIZE)))
    def _iteration(iteration: Any) -> None:
        copy(weight, tiles, iteration, first_row, first_k)

    if not is_aligned and m * k % elements:
        _load_end(weight, tiles, region, first_row, first_k)


def _load_end(weight: Any, tiles: Any, region: Region, first_row: Any, first_k: Any) -> None:
    """Copies the elements after the last whole vector, by the threads that wrote zeros there."""
    m, k = weight.shape
    all_blocks, rows, _ = tiles.shape
    parts = all_blocks // region.blocks_of_part
    elements = elements_of_load(k)
    of_row = region.blocks * BLOCK_K // elements
    scalar = plgpu.Layout.WG_SPLAT(())
    ref = plgpu.RefType(mosaic.operand_transforms(tiles.dtype))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ref, scalar, scalar))
    def copy(_: Any, weight: ir.Value, tiles: ir.Value, *scalars: Any) -> None:
        i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        first_row, first_k = (s.registers.item() for s in scalars)
        is_below = functools.partial(arith.cmpi, arith.CmpIPredicate.ult)
        thread = stores.thread_number()
        for at in range(m * k - m * k % elements, m * k):
            row, column = (
                arith.subi(mgpu.c(x, i32), first)
                for x, first in zip(divmod(at, k), (first_row, first_k), strict=True)
            )
            number = arith.muli(row, mgpu.c(of_row, i32))
            number = arith.addi(number, _divided(column, elements)[0])
            is_copier = arith.cmpi(
                arith.CmpIPredicate.eq, _divided(number, WARPGROUP_SIZE)[1], thread
            )
            is_mine = arith.andi(
                is_below(row, mgpu.c(parts * rows, i32)),
                is_below(column, mgpu.c(region.blocks * BLOCK_K, i32)),
            )
            is_mine = arith.andi(is_mine, is_copier)
            offset = arith.select(is_mine, _offset(row, column, rows, region), mgpu.c(0, i32))
            mgpu.utils.inline_ptx(
                "{ .reg .u16 x; @$2 ld.global.nc.u16 x, [$1]; @$2 st.shared.u16 [$0], x; }",
                mgpu.utils.getelementptr(mgpu.utils.memref_ptr(tiles), [offset], byte),
                stores.device_address(weight, [(mgpu.c(at, i32), 1)], 2),
                is_mine,
                has_side_effects=True,
            )

    copy(weight, tiles, first_row, first_k)


def load_blocks(embedding: Any, tiles: Any, first: Any, blocks_of_row: int, first_k: Any) -> None:
    """Fills column blocks [k steps, blocks, depth, width] with an embedding [B, K, N], or with 0.

        tiles[s, i, r] = embedding[block // blocks_of_row, first_k + s * depth + r, columns]

    for block = first + i; a batch of one row is repeated. WGMMAs may read the tiles after `finish`.
    """
    batch, k, n = embedding.shape
    steps, blocks, depth, width = tiles.shape
    if mosaic.is_interpreted():
        padded = jnp.pad(embedding[...], ((0, blocks), (0, steps * depth), (0, 0)))
        for step, i in itertools.product(range(steps), range(blocks)):
            row, of_row = lax.div(first + i, blocks_of_row), lax.rem(first + i, blocks_of_row)
            row = row if batch > 1 else jnp.zeros_like(row)
            at = (row, first_k + step * depth, of_row * width)
            tiles[step, i] = lax.dynamic_slice(padded, at, (1, depth, width))[0]
        return

    vectors = width // 8
    count = steps * blocks * depth * vectors
    scalar = plgpu.Layout.WG_SPLAT(())
    swizzle = mosaic.row_swizzle(tiles.shape, tiles.dtype)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType((swizzle,)), *(scalar,) * 3))
    def copy(_: Any, embedding: ir.Value, tiles: ir.Value, *scalars: Any) -> None:
        i32, byte = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        iteration, first, first_k = (s.registers.item() for s in scalars)
        is_less = functools.partial(arith.cmpi, arith.CmpIPredicate.slt)
        zero, size = mgpu.c(0, i32), mgpu.c(16, i32)
        unit = arith.muli(iteration, mgpu.c(UNROLLED * WARPGROUP_SIZE, i32))
        unit = arith.addi(unit, stores.thread_number())
        for i in range(UNROLLED):
            number = arith.addi(unit, mgpu.c(i * WARPGROUP_SIZE, i32))
            rest, vector = _divided(number, vectors)
            rest, r = _divided(rest, depth)
            step, block = _divided(rest, blocks)
            # As TMA swizzles: the vectors of a row by the bits of the address from 128 bytes on.
            swizzled = arith.xori(vector, _divided(_divided(r, 64 // width)[0], vectors)[1])
            row_at = arith.addi(arith.muli(rest, mgpu.c(depth, i32)), r)
            offset = arith.muli(row_at, mgpu.c(width * 2, i32))
            offset = arith.addi(offset, arith.muli(swizzled, mgpu.c(16, i32)))
            target = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(tiles), [offset], byte)
            row, of_row = _divided(arith.addi(first, block), blocks_of_row)
            row = row if batch > 1 else zero
            at_k = arith.addi(first_k, arith.addi(arith.muli(step, mgpu.c(depth, i32)), r))
            is_inside = arith.andi(is_less(row, mgpu.c(batch, i32)), is_less(at_k, mgpu.c(k, i32)))
            row, at_k = (arith.select(is_inside, x, zero) for x in (row, at_k))
            terms = [(row, k * n), (at_k, n), (of_row, width), (vector, 8)]
            mgpu.utils.inline_ptx(
                "cp.async.cg.shared.global [$0], [$1], 16, $2;",
                target,
                stores.device_address(embedding, terms, 2),
                arith.select(is_inside, size, zero),
                predicate=is_less(number, mgpu.c(count, i32)),
                has_side_effects=True,
            )

    @pl.loop(jnp.int32(0), jnp.int32(pl.cdiv(count, UNROLLED * WARPGROUP_SIZE)))
    def _iteration(iteration: Any) -> None:
        copy(embedding, tiles, iteration, first, first_k)


def finish() -> None:
    """Waits for all threads' loads; the warpgroup's WGMMAs may read them afterwards."""

    @plgpu.inline_mgpu()
    def await_copies(_: Any) -> None:
        mgpu.utils.inline_ptx("cp.async.wait_all;", has_side_effects=True)

    if not mosaic.is_interpreted():
        await_copies()
    plgpu.commit_smem()


def _divided(value: ir.Value, size: int) -> tuple[ir.Value, ir.Value]:
    """Returns quotient and remainder."""
    divisor = mgpu.c(size, ir.IntegerType.get_signless(32))
    return arith.divui(value, divisor), arith.remui(value, divisor)


def _offset(row: ir.Value, column: ir.Value, rows: int, region: Region) -> ir.Value:
    """Computes an element's byte in operand tiles of `rows` rows, swizzled."""
    i32 = ir.IntegerType.get_signless(32)
    part, row = _divided(row, rows)
    block, within = _divided(column, BLOCK_K)
    vector, element = _divided(within, 8)
    vector = arith.xori(vector, _divided(row, 8)[1])
    tile_bytes = rows * mosaic.SWIZZLE
    terms = (
        (part, region.blocks_of_part * tile_bytes),
        (block, tile_bytes),
        (row, mosaic.SWIZZLE),
        (vector, 16),
        (element, 2),
    )
    total = mgpu.c(region.first * tile_bytes, i32)
    for value, stride in terms:
        total = arith.addi(total, arith.muli(value, mgpu.c(stride, i32)))
    return total


def _load_unaligned(memory: ir.Value, elements: int, source: ir.Value, valid: ir.Value) -> Any:
    """Loads the one or two whole vectors that hold the `valid` elements from `source` on; 0
    elsewhere.

    A vector that ends past the memory's `elements` of 16 bits is not loaded.
    """
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    byte = ir.IntegerType.get_signless(8)
    size = mgpu.c(2 * elements, i64)
    end = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [size], byte)
    low, high = ("{" + ", ".join(f"${i + j}" for j in range(4)) + "}" for i in (0, 4))
    return mgpu.utils.inline_ptx(
        "{ .reg .b64 first, next; .reg .b32 size, skipped; .reg .pred p, q; "
        "and.b64 first, $8, -16; "
        "cvt.u32.u64 skipped, $8; and.b32 skipped, skipped, 14; "
        "shl.b32 size, $9, 1; add.s32 size, size, skipped; "
        "add.u64 next, first, 16; setp.le.u64 p, next, $10; setp.gt.and.s32 p, $9, 0, p; "
        "add.u64 next, next, 16; setp.le.u64 q, next, $10; setp.gt.and.s32 q, size, 16, q; "
        + " ".join(f"mov.b32 ${i}, 0;" for i in range(_WORDS))
        + f" @p ld.global.nc.v4.b32 {low}, [first];"
        f" @q ld.global.nc.v4.b32 {high}, [first + 16]; }}",
        source,
        valid,
        end,
        result_types=[i32] * _WORDS,
        has_side_effects=True,
    )


def _store_unaligned(
    target: ir.Value, source: ir.Value, valid: ir.Value, words: Any, is_wanted: Any
) -> None:
    """Writes the `valid` elements from `source` on, then zeros, to a vector in shared memory.

    `words` are what `_load_unaligned` returned.
    """
    lines = [
        ".reg .b32 w0, w1, w2, w3, w4, w5, skipped, t; .reg .pred p;",
        "cvt.u32.u64 skipped, $1;",
        *_moved("8", 2, 6, "${}", offset=4),
        *_moved("4", 1, 5, "w{}"),
        "and.b32 t, skipped, 2; shl.b32 t, t, 3;",
        *(f"shf.r.wrap.b32 w{i}, w{i}, w{i + 1}, t;" for i in range(4)),
        # An invalid element may be NaN, which a product with 0 would keep.
        "shl.b32 skipped, $2, 4;",
    ]
    for i in range(4):
        lines += [
            f"sub.s32 t, skipped, {32 * i}; max.s32 t, t, 0;",
            f"shl.b32 t, -1, t; not.b32 t, t; and.b32 w{i}, w{i}, t;",
        ]
    lines += ["@$3 st.shared.v4.b32 [$0], {w0, w1, w2, w3};"]
    mgpu.utils.inline_ptx(
        "{ " + " ".join(lines) + " }",
        target,
        source,
        valid,
        is_wanted,
        *words,
        has_side_effects=True,
    )


def _moved(bit: str, by: int, count: int, name: str, offset: int = 0) -> list[str]:
    """Returns PTX that moves words down by `by` if the address has `bit`."""
    lines = [f"and.b32 t, skipped, {bit}; setp.ne.u32 p, t, 0;"]
    for i in range(count):
        high, low = name.format(i + by + offset), name.format(i + offset)
        lines.append(f"selp.b32 w{i}, {high}, {low}, p;")
    return lines
