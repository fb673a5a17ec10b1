"""Accumulators whose 16-row parts, one of each warp, belong to different rows of a batch.

A *granule* is 16 embedding columns of one row of a batch: the rows of a WGMMA accumulator that one
warp holds. Word w of lane l in group g of 16 compressed rows of granule r's fragment (see
`fragment`) is at [r, g, l, w].
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ikbo_jax.pallas.hopper import fragment, inline, mosaic, per_thread, stores
from ikbo_jax.pallas.hopper.fragment import Fragment
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.hopper.warps import LANES
from ikbo_jax.problems.hopper import WARPGROUP_SIZE, WGMMA_M
from ikbo_jax.problems.packed_compression import GRANULE

#: Words of a lane in a group of 16 columns: of the upper and of the lower plane.
WORDS = Fragment(4, 2)
#: Granules of an accumulator.
GRANULES = WGMMA_M // GRANULE


def types(columns: int, granules: int) -> Fragment:
    """Types of the fragments of `granules` granules in device memory."""
    return fragment.types(columns, (granules,), LANES)


def look_up(index: Any, first: Any, count: int, *, of_row: int, coarser_rows: int) -> Any:
    """Granules of the coarser level that belong to the granules of `count` accumulators.

    `index` [B] int32 is clamped; granules from `first` on past B count as the last row's. Returns
    each thread's numbers, one for each accumulator; under interpretation, each warp's.
    """
    last = index.shape[0] - 1
    if mosaic.is_interpreted():

        def of(granule: Any) -> Any:
            row = jnp.minimum(lax.div(granule, of_row), last)
            return jnp.clip(index[row], 0, coarser_rows - 1) * of_row + lax.rem(granule, of_row)

        return jnp.stack([of(first + i) for i in range(count * GRANULES)])

    shape = (count * WARPGROUP_SIZE,)

    @inline.code(index, first, returns=jax.ShapeDtypeStruct(shape, jnp.int32))
    def read(index: ir.Value, first: Integer) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        base = fragment.device_pointer(index)
        granule, found = first + _warp(), []
        for i in range(count):
            number = granule + i * GRANULES
            row = (number // of_row).at_most(last)
            user = Integer(llvm.load(i32, mgpu.utils.getelementptr(base, [row], i32)))
            found.append(user.at_least(0).at_most(coarser_rows - 1) * of_row + number % of_row)
        return inline.array(found, shape)

    return read


def load(
    memory: Fragment, numbers: Any, count: int, begin: Any, columns: int
) -> tuple[Fragment, ...]:
    """Issues loads of `count` accumulators' fragments (`types`), `columns` from `begin`."""
    if mosaic.is_interpreted():

        def part(plane: Any, i: int) -> jax.Array:
            parts = (numbers[GRANULES * i + j] for j in range(GRANULES))
            return jnp.concatenate([plane[n, :, pl.ds(begin, columns)] for n in parts])

        return tuple(Fragment(*(part(plane, i) for plane in memory)) for i in range(count))

    types = fragment.register_types(columns)

    @inline.code(*memory, numbers, begin, returns=tuple(types) * count)
    def parts(upper: ir.Value, lower: ir.Value, numbers: Any, begin: Integer) -> Any:
        found = []
        for register in numbers.registers.flat:
            number = vector.extract(register, [], [0])
            uppers, lowers = (
                fragment.load_words(
                    _address(plane, number, begin, width), columns // 16, width, LANES
                )
                for plane, width in zip((upper, lower), WORDS, strict=True)
            )
            found.append(fragment.upper_in_registers(uppers, columns))
            found.append(fragment.lower_in_registers(lowers))
        return tuple(found)

    return tuple(Fragment(*parts[i : i + 2]) for i in range(0, len(parts), 2))


def store(memory: Fragment, value: jax.Array, first: Any, begin: Any) -> None:
    """Stores an accumulator [64, columns] f32 as fragments (`types`) of four granules."""
    total, columns = memory.upper.shape[0], value.shape[1]
    if mosaic.is_interpreted():
        for i in range(GRANULES):

            @pl.when(first + i < total)
            def _(i: int = i) -> None:
                part = lax.slice(value, (i * GRANULE, 0), ((i + 1) * GRANULE, columns))
                memory.upper[first + i, :, pl.ds(begin, columns)] = part
                memory.lower[first + i, :, pl.ds(begin, columns)] = jnp.zeros_like(part)

        return

    @inline.code(*memory, value, first, begin)
    def _(upper: ir.Value, lower: ir.Value, array: Any, first: Integer, begin: Integer) -> None:
        number = first + _warp()
        exists = number < total
        planes = fragment.words_of(array)
        for plane, width, words in zip((upper, lower), WORDS, planes, strict=True):
            address = _address(plane, number, begin, width)
            for i in range(0, len(words), width):
                per_thread.store_words(address, words[i : i + width], exists, 4 * LANES * i)


def stage_transposed(blocks: Any, values: jax.Array, *, is_swizzled: bool = True) -> None:
    """Writes values [64, rows] of 16 bits to column blocks [64 / width, rows, width], transposed.

    Rows are a multiple of 8. Without `is_swizzled`, the blocks are `memory.Rows`.
    """
    count, rows, width = blocks.shape
    if mosaic.is_interpreted():
        for i in range(count):
            blocks[i] = lax.slice(values, (i * width, 0), ((i + 1) * width, rows)).T
        return
    swizzles = (mosaic.row_swizzle(blocks.shape, blocks.dtype),) if is_swizzled else ()

    @inline.code(inline.Typed(blocks, plgpu.RefType(swizzles)), values)
    def _(blocks: ir.Value, values: mgpu.FragmentedArray) -> None:
        words, thread = [inline.word(x) for x in values.registers.flat], stores.thread_number()
        # A warp's stmatrix stores four transposed 8 x 8 matrices: lane l provides the address of
        # row l % 8 of matrix l / 8. Matrix 1 is right of matrix 0, matrix 2 is below it.
        row = thread % 8 + thread // 16 % 2 * 8
        # Vectors of 8 columns: of the accumulator's 64 columns, and of a block.
        vector_of_all = thread // 32 % 4 * 2 + thread // 8 % 2
        vectors = width // 8
        block, vector_of_row = vector_of_all // vectors, vector_of_all % vectors
        # A swizzle exchanges the vectors of a row by the bits of the address from 128 bytes on.
        swizzle = row // (64 // width) % vectors
        offset = block * (rows * width * 2) + row * (width * 2)
        if is_swizzled:
            vector_of_row = vector_of_row ^ swizzle
        vector_at = vector_of_row * 16
        start, byte = mgpu.utils.memref_ptr(blocks), ir.IntegerType.get_signless(8)
        address = mgpu.utils.getelementptr(start, [offset + vector_at], byte)
        for step in range(0, len(words), 4):
            matrices = words[step : step + 4]
            operands = ", ".join(f"${i + 1}" for i in range(len(matrices)))
            inline.issue(
                f"stmatrix.sync.aligned.m8n8.x{len(matrices)}.trans.shared.b16 "
                f"[$0 + {step * 4 * width * 2}], {{{operands}}};",
                address,
                *matrices,
                convergent=True,
            )


def _warp() -> Integer:
    """This thread's warp in its warpgroup."""
    return stores.thread_number() // LANES


def _address(plane: ir.Value, granule: ir.Value, begin: Integer, words: int) -> ir.Value:
    """Computes the global address of this lane's words of the group at column `begin`."""
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    groups = ir.MemRefType(plane.type).shape[1]
    lane = stores.thread_number() % LANES
    within = begin // 16 * (LANES * words) + lane * words
    offset = Integer(arith.extui(i64, granule)) * (groups * LANES * words)
    offset = offset + arith.extui(i64, within)
    return mgpu.utils.getelementptr(fragment.device_pointer(plane), [offset], i32)
