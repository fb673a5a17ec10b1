"""Loads operands by a warpgroup's threads, where TMA would need aligned rows, or short boxes."""

import itertools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from ikbo_jax.pallas.hopper import inline, mosaic, stores
from ikbo_jax.pallas.hopper.inline import Integer
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

    @pl.loop(jnp.int32(0), jnp.int32(pl.cdiv(count, unrolled * WARPGROUP_SIZE)))
    def copy(iteration: Any) -> None:
        @inline.code(weight, mosaic.operand(tiles), iteration, first_row, first_k)
        def _(weight: Any, tiles: Any, iteration: Integer, first_row: Any, first_k: Any) -> None:
            unit = iteration * (unrolled * WARPGROUP_SIZE) + stores.thread_number()
            waiting = []
            for i in range(unrolled):
                number = unit + i * WARPGROUP_SIZE
                row, column = _divided(number, of_row)
                column = column * elements
                target = inline.address(tiles, _offset(row, column, rows, region), 8)
                row, column = first_row + row, first_k + column
                is_wanted = number < count
                is_inside = (row < m) & (column < k)
                zero = inline.i32(0)
                row, column = (is_inside.select(x, zero) for x in (row, column))
                source = stores.device_address(weight, [(row, k), (column, 1)], 2)
                if not is_aligned:
                    valid = (k - column).at_most(elements)
                    valid = (is_inside & is_wanted).select(valid, zero)
                    words = _load_unaligned(weight, m * k, source, valid)
                    waiting.append((target, source, valid, words, is_wanted))
                    continue
                size = inline.i32(2 * elements)
                kind = "cg" if elements == 8 else "ca"
                inline.issue(
                    f"cp.async.{kind}.shared.global [$0], [$1], {2 * elements}, $2;",
                    target,
                    source,
                    is_inside.select(size, zero),
                    predicate=is_wanted,
                )
            for loaded in waiting:
                _store_unaligned(*loaded)

    if is_aligned or m * k % elements == 0:
        return

    # The threads that wrote zeros there copy the elements after the last whole vector.
    @inline.code(weight, mosaic.operand(tiles), first_row, first_k)
    def copy_end(weight: ir.Value, tiles: ir.Value, first_row: Integer, first_k: Integer) -> None:
        thread = stores.thread_number()
        for at in range(m * k - m * k % elements, m * k):
            row, column = at // k - first_row, at % k - first_k
            number = row * of_row + _divided(column, elements)[0]
            is_copier = _divided(number, WARPGROUP_SIZE)[1].equals(thread)
            is_mine = row.below(parts * rows)
            is_mine = is_mine & column.below(blocks * BLOCK_K) & is_copier
            offset = is_mine.select(_offset(row, column, rows, region), 0)
            inline.issue(
                "{ .reg .u16 x; @$2 ld.global.nc.u16 x, [$1]; @$2 st.shared.u16 [$0], x; }",
                inline.address(tiles, offset, 8),
                stores.device_address(weight, [(inline.i32(at), 1)], 2),
                is_mine,
            )


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
    swizzle = mosaic.row_swizzle(tiles.shape, tiles.dtype)

    swizzled_tiles = inline.Typed(tiles, plgpu.RefType((swizzle,)))

    @pl.loop(jnp.int32(0), jnp.int32(pl.cdiv(count, UNROLLED * WARPGROUP_SIZE)))
    def _(iteration: Any) -> None:
        @inline.code(embedding, swizzled_tiles, iteration, first, first_k)
        def _(embedding: Any, tiles: Any, iteration: Integer, first: Any, first_k: Any) -> None:
            zero, size = inline.i32(0), inline.i32(16)
            unit = iteration * (UNROLLED * WARPGROUP_SIZE) + stores.thread_number()
            for i in range(UNROLLED):
                number = unit + i * WARPGROUP_SIZE
                rest, vector = _divided(number, vectors)
                rest, r = _divided(rest, depth)
                step, block = _divided(rest, blocks)
                # As TMA swizzles: a row's vectors by the bits of the address from 128 bytes on.
                swizzled = vector ^ _divided(_divided(r, 64 // width)[0], vectors)[1]
                offset = (rest * depth + r) * (width * 2) + swizzled * 16
                target = inline.address(tiles, offset, 8)
                row, of_row = _divided(first + block, blocks_of_row)
                row = row if batch > 1 else zero
                at_k = first_k + (step * depth + r)
                is_inside = (row < batch) & (at_k < k)
                row, at_k = (is_inside.select(x, zero) for x in (row, at_k))
                terms = [(row, k * n), (at_k, n), (of_row, width), (vector, 8)]
                inline.issue(
                    "cp.async.cg.shared.global [$0], [$1], 16, $2;",
                    target,
                    stores.device_address(embedding, terms, 2),
                    is_inside.select(size, zero),
                    predicate=number < count,
                )


def finish() -> None:
    """Waits for all threads' loads; the warpgroup's WGMMAs may read them afterwards."""
    if not mosaic.is_interpreted():
        inline.code()(lambda: inline.issue("cp.async.wait_all;"))
    plgpu.commit_smem()


def _divided(value: Integer, size: int) -> tuple[Integer, Integer]:
    """Returns quotient and remainder."""
    divisor = inline.i32(size)
    return value // divisor, value % divisor


def _offset(row: Integer, column: Integer, rows: int, region: Region) -> Integer:
    """Computes an element's byte in operand tiles of `rows` rows, swizzled."""
    part, row = _divided(row, rows)
    block, within = _divided(column, BLOCK_K)
    vector, element = _divided(within, 8)
    vector = vector ^ _divided(row, 8)[1]
    tile_bytes = rows * mosaic.SWIZZLE
    total = inline.i32(region.first * tile_bytes) + part * (region.blocks_of_part * tile_bytes)
    return total + block * tile_bytes + row * mosaic.SWIZZLE + vector * 16 + element * 2


def _load_unaligned(memory: ir.Value, elements: int, source: ir.Value, valid: ir.Value) -> Any:
    """Loads the one or two whole vectors that hold the `valid` elements from `source` on; 0
    elsewhere.

    A vector that ends past the memory's `elements` of 16 bits is not loaded.
    """
    size = mgpu.c(2 * elements, ir.IntegerType.get_signless(64))
    end = inline.address(memory, size, 8)
    low, high = ("{" + ", ".join(f"${i + j}" for j in range(4)) + "}" for i in (0, 4))
    return inline.issue_words(
        "{ .reg .b64 first, next; .reg .b32 size, skipped; .reg .pred p, q; "
        "and.b64 first, $8, -16; "
        "cvt.u32.u64 skipped, $8; and.b32 skipped, skipped, 14; "
        "shl.b32 size, $9, 1; add.s32 size, size, skipped; "
        "add.u64 next, first, 16; setp.le.u64 p, next, $10; setp.gt.and.s32 p, $9, 0, p; "
        "add.u64 next, next, 16; setp.le.u64 q, next, $10; setp.gt.and.s32 q, size, 16, q; "
        + " ".join(f"mov.b32 ${i}, 0;" for i in range(_WORDS))
        + f" @p ld.global.nc.v4.b32 {low}, [first];"
        f" @q ld.global.nc.v4.b32 {high}, [first + 16]; }}",
        _WORDS,
        source,
        valid,
        end,
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
    inline.issue("{ " + " ".join(lines) + " }", target, source, valid, is_wanted, *words)


def _moved(bit: str, by: int, count: int, name: str, offset: int = 0) -> list[str]:
    """Returns PTX that moves words down by `by` if the address has `bit`."""
    lines = [f"and.b32 t, skipped, {bit}; setp.ne.u32 p, t, 0;"]
    for i in range(count):
        high, low = name.format(i + by + offset), name.format(i + offset)
        lines.append(f"selp.b32 w{i}, {high}, {low}, p;")
    return lines
