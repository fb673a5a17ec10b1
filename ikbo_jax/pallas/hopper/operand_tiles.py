"""Reads and writes of operand tiles, 64 rows by 64 columns of 16 bits in shared memory."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir

from ikbo_jax.pallas.hopper import inline, mma, mosaic, stores
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.problems.hopper import BLOCK_K, WARPGROUP_SIZE, WGMMA_M


def column_blocks(values: jax.Array, blocks: int) -> list[jax.Array]:
    """Slices values [64, width], padded with zeros, into blocks of 64 columns."""
    width = blocks * BLOCK_K
    values = mma.pad(values, width)
    return [lax.slice(values, (0, i), (WGMMA_M, i + BLOCK_K)) for i in range(0, width, BLOCK_K)]


def stage_rows(
    tiles: Any, values: jax.Array, *, reads_late: bool = False, place: Any = None
) -> None:
    """Writes [64, width] of 16 bits to operand tiles [column blocks, 64, 64], zeros past width.

    An assignment in Pallas would also read the old values. With `reads_late`, addresses derive from
    `stores.late_thread_number`. Row r becomes row place(r), except under interpretation.
    """
    blocks = tiles.shape[0]
    if mosaic.is_interpreted():
        for i, columns in enumerate(column_blocks(values, blocks)):
            tiles[i, :, :] = columns
        return

    @inline.code(mosaic.operand(tiles), values)
    def _(tiles: ir.Value, values: mgpu.FragmentedArray) -> None:
        words = [inline.word(pair) for pair in values.registers.flat]
        words += [inline.i32(0)] * (blocks * BLOCK_K // 4 - len(words))
        thread = stores.late_thread_number() if reads_late else stores.thread_number()
        for step, address in enumerate(_matrices(tiles, thread, len(words) // 4, place)):
            inline.issue(
                "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
                address,
                *words[4 * step : 4 * step + 4],
                convergent=True,
            )


def read_rows(tiles: Any) -> jax.Array:
    """Reads an operand tile [64, 64] of 16 bits in an accumulator's layout."""
    if mosaic.is_interpreted():
        return tiles[...]

    @inline.code(
        mosaic.operand(tiles), returns=jax.ShapeDtypeStruct((WGMMA_M, BLOCK_K), tiles.dtype)
    )
    def read(tiles: ir.Value) -> mgpu.FragmentedArray:
        return read_matrices(tiles, stores.late_thread_number(), BLOCK_K)

    return read


def read_matrices(
    tiles: ir.Value,
    thread: Integer,
    columns: int,
    place: Callable[[Integer], ir.Value] | None = None,
) -> mgpu.FragmentedArray:
    """Reads [64, columns] of operand tiles of 16 bits in inline code: row place(r) as row r."""
    pair, words = ir.VectorType.get((2,), ir.MemRefType(tiles.type).element_type), []
    for address in _matrices(tiles, thread, columns // 16, place):
        ptx = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];"
        words += inline.issue_words(ptx, 4, address, convergent=True)
    return inline.array([mgpu.utils.bitcast(word, pair) for word in words], (WGMMA_M, columns))


def _matrices(
    tiles: ir.Value,
    thread: Integer,
    count: int,
    place: Callable[[Integer], ir.Value] | None = None,
) -> Iterator[ir.Value]:
    """Yields the thread's address for stmatrix or ldmatrix of every 16 columns of operand tiles.

    A warp's instruction takes four 8 x 8 matrices: lane l provides the address of row l % 8 of
    matrix l / 8. Matrix 1 is below matrix 0, matrix 2 is beside it.
    """
    byte = ir.IntegerType.get_signless(8)
    row_of_8, lower, right, warp = stores.digits(thread, (8, 2, 2, 4))
    row, height = warp * 16 + row_of_8 + lower * 8, WGMMA_M
    if place is not None:
        row, height = Integer(place(row)), ir.MemRefType(tiles.type).shape[-4] * 8
        row_of_8 = row % 8
    row_offset = row * mosaic.SWIZZLE
    base = mgpu.utils.memref_ptr(tiles)
    for step in range(count):
        block, within = divmod(step, BLOCK_K // 16)
        vector_of_row = right + 2 * within
        offset = row_offset + block * height * mosaic.SWIZZLE + (vector_of_row ^ row_of_8) * 16
        yield mgpu.utils.getelementptr(base, [offset], byte)


def zero_rows(tiles: Any, begin: Any) -> None:
    """Zeroes operand tiles [column blocks, rows, 64] of 16 bits from row `begin` on."""
    blocks, rows, width = tiles.shape
    if mosaic.is_interpreted():

        @pl.loop(jnp.maximum(begin, 0), rows)
        def _(r: Any) -> None:
            for i in range(blocks):
                tiles[i, r, :] = jnp.zeros((width,), tiles.dtype)

        return

    @inline.code(mosaic.operand(tiles), begin)
    def _(tiles: ir.Value, begin: Integer) -> None:
        # A row is 128 contiguous bytes; swizzling permutes it only within them.
        byte = ir.IntegerType.get_signless(8)
        base = mgpu.utils.memref_ptr(tiles)
        thread = stores.late_thread_number()
        vectors = mosaic.SWIZZLE // 16
        zero = inline.i32(0)
        for i in range(blocks * rows * vectors // WARPGROUP_SIZE):
            vector_index = thread + i * WARPGROUP_SIZE
            row = vector_index // vectors % rows
            offset = vector_index * 16
            inline.issue(
                "st.shared.v4.b32 [$0], {$1, $1, $1, $1};",
                mgpu.utils.getelementptr(base, [offset], byte),
                zero,
                predicate=row >= begin,
            )


def zero_tiles(tiles: Any) -> None:
    """Zeroes operand tiles [column blocks, rows, 64] of 16 bits in shared memory."""
    if not mosaic.is_interpreted():
        zero_rows(tiles, jnp.int32(0))
        return
    for i in range(tiles.shape[0]):  # row by row would take the interpreter seconds
        tiles[i, :, :] = jnp.zeros(tiles.shape[1:], tiles.dtype)
