"""Normalises rows in operand tiles [64, 64] of 16 bits, where WGMMA will read them.

The four threads that hold a row of an accumulator share the same row here: of the eight vectors of
16 bytes of a row's block, each reads two. Neighbouring rows read different ones at a time, so that
eight threads hit all banks of shared memory.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ikbo_jax.pallas.hopper import inline, mma, mosaic, row_vectors, stores
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.hopper.stores import ROW_LAYOUT
from ikbo_jax.problems.hopper import BLOCK_K, WGMMA_M

#: Numbers of a vector of 16 bytes, and words.
NUMBERS, WORDS = 8, 4


class Sums(NamedTuple):
    """Sums over a part of every row, [64] f32; on a GPU, over a thread's part of its two rows.

    `shift`, the row's first number, is subtracted from every number, so that the squares of rows
    whose mean is far from 0 do not cancel: the mean of (x − shift)² is at most F + 1 times the
    variance.
    """

    shift: jax.Array | None  # None: 0
    first: jax.Array | None  # sum of x − shift; None for an RMS norm
    second: jax.Array  # sum of (x − shift)²


class Statistics(NamedTuple):
    """The mean of every row, or None for 0, and the reciprocal of its deviation: [64] f32."""

    mean: jax.Array | None
    scale: jax.Array


class _Vectors:
    """A thread's vectors of an operand tile [64, 64]: two of each of its two rows."""

    def __init__(self, tiles: ir.Value) -> None:
        thread = stores.late_thread_number()
        of_row, row_of_8 = stores.digits(thread, (4, 8))
        #: Number of the thread's first vector of a row; the other one is 4 vectors before or after.
        self.first = of_row + row_of_8 % 2 * 4
        self._tiles = tiles
        row_offset = stores.thread_row(thread, 0) * mosaic.SWIZZLE
        self._offset = row_offset + (self.first ^ row_of_8) * 16

    def number(self, i: int) -> Integer:
        """Returns the number of vector `i`, 0 or 1, of a row's eight."""
        return self.first ^ 4 * i

    def _address(self, half: int, i: int) -> ir.Value:
        offset = (self._offset ^ 4 * i * 16) + half * 8 * mosaic.SWIZZLE
        return inline.address(self._tiles, offset, 8)

    def load(self, half: int, i: int) -> list[ir.Value]:
        ptx = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
        return list(inline.issue_words(ptx, WORDS, self._address(half, i)))

    def store(self, half: int, i: int, words: list[ir.Value]) -> None:
        ptx = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"
        inline.issue(ptx, self._address(half, i), *words)


def _floats(words: list[ir.Value], dtype: Any) -> list[ir.Value]:
    return [x for word in words for x in row_vectors.unpacked(word, dtype)]


def _fma(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    return llvm.intr_fma(a, b, c)


def begin_sums(tiles: Any, kind: str) -> Sums:
    """Begins the sums of rows whose first block is in `tiles`."""
    zero = plgpu.layout_cast(jnp.zeros((WGMMA_M,), jnp.float32), ROW_LAYOUT)
    if kind == "rms":
        return Sums(None, None, zero)
    if mosaic.is_interpreted():
        return Sums(tiles[...].astype(jnp.float32)[:, 0], zero, zero)
    dtype = tiles.dtype

    @inline.code(mosaic.operand(tiles), returns=zero)
    def shift(tiles: ir.Value) -> mgpu.FragmentedArray:
        thread, shifts = stores.late_thread_number(), []
        for half in (0, 1):
            row = stores.thread_row(thread, half)
            swizzled = row % 8 * 16
            address = inline.address(tiles, row * mosaic.SWIZZLE + swizzled, 8)
            word = inline.issue_word("ld.shared.b32 $0, [$1];", address)
            shifts.append(row_vectors.unpacked(word, dtype)[0])
        return stores.row_array(shifts)

    return Sums(shift, zero, zero)


def add_sums(sums: Sums, tiles: Any, columns: int) -> Sums:
    """Adds the first `columns` numbers, a multiple of 8, of every row of a block."""
    is_rms = sums.first is None
    if mosaic.is_interpreted():
        x = tiles[...].astype(jnp.float32)[:, :columns]
        if sums.shift is not None:
            x = x - sums.shift[:, None]
        first = None if sums.first is None else sums.first + jnp.sum(x, axis=1)
        return Sums(sums.shift, first, sums.second + jnp.sum(x * x, axis=1))

    held, dtype = [x for x in sums if x is not None], tiles.dtype

    @inline.code(mosaic.operand(tiles), *held, returns=(sums.second,) * (1 if is_rms else 2))
    def found(tiles: ir.Value, *arrays: mgpu.FragmentedArray) -> Any:
        vectors = _Vectors(tiles)
        *rest, seconds = map(stores.row_numbers, arrays)
        loaded = [[vectors.load(half, i) for i in (0, 1)] for half in (0, 1)]
        for half in (0, 1):
            for i in (0, 1):
                numbers = _floats(loaded[half][i], dtype)
                if not is_rms:
                    numbers = [arith.subf(x, rest[0][half]) for x in numbers]
                if columns < BLOCK_K:  # TMA has filled the other columns with zeros
                    is_column = vectors.number(i).below(columns // NUMBERS)
                    zero = inline.f32(0.0)
                    numbers = [arith.select(is_column, x, zero) for x in numbers]
                for x in numbers:
                    seconds[half] = _fma(x, x, seconds[half])
                    if not is_rms:
                        rest[1][half] = arith.addf(rest[1][half], x)
        return tuple(map(stores.row_array, (*rest[1:], seconds)))

    return Sums(sums.shift, None if is_rms else found[0], found[-1])


def statistics(sums: Sums, features: int, eps: float) -> Statistics:
    """Computes mean and scale of rows of `features` numbers; adds the parts of a row's threads."""

    def total(x: jax.Array) -> jax.Array:
        if mosaic.is_interpreted():
            return x

        @inline.code(x, returns=x)
        def of_threads(x: mgpu.FragmentedArray) -> Any:
            numbers: list[Any] = stores.row_numbers(x)
            for distance in (1, 2):
                numbers = [arith.addf(y, mgpu.utils.shfl_bfly(y, distance)) for y in numbers]
            return stores.row_array(numbers)

        return of_threads

    share = jnp.float32(1 / features)
    variance, mean = total(sums.second) * share, None
    if sums.first is not None:
        distance = total(sums.first) * share
        variance = jnp.maximum(variance - distance * distance, jnp.float32(0))
        mean = distance + sums.shift
    return Statistics(mean, jax.lax.rsqrt(variance + jnp.float32(eps)))


def load_statistics(ref: Any, consumer: Any, kind: str | None) -> Statistics:
    """Loads the statistics of the consumer's rows from shared memory, [2, 128] f32."""

    def load(i: int) -> jax.Array:
        place = ref.at[i, pl.ds(consumer * WGMMA_M, WGMMA_M)]
        if mosaic.is_interpreted():
            return place[...]
        return plgpu.load(place, layout=ROW_LAYOUT, optimized=False)

    mean, scale = map(load, range(2))
    return Statistics(None if kind == "rms" else mean, scale)


def normalise(tiles: Any, of_rows: Statistics, factors: tuple[Any, Any], block: Any) -> None:
    """Normalises a block of rows in place; WGMMA may read it after `commit_smem`.

    `factors` are device memory of norm scale and norm bias, [F] f32, or None; number `block` of the
    64 columns that `tiles` have.
    """
    if mosaic.is_interpreted():
        x = tiles[...].astype(jnp.float32)
        if of_rows.mean is not None:
            x = x - of_rows.mean[:, None]
        x = x * of_rows.scale[:, None]
        scale, bias = (
            None if y is None else y[pl.ds(block * BLOCK_K, BLOCK_K)][None] for y in factors
        )
        x = x if scale is None else x * scale
        x = x if bias is None else x + bias
        tiles[...] = x.astype(tiles.dtype)
        return

    held, dtype = [x for x in of_rows if x is not None], tiles.dtype
    memory = [x for x in factors if x is not None]

    @inline.code(mosaic.operand(tiles), block, *memory, *held)
    def _(tiles: ir.Value, block: Integer, *rest: Any) -> None:
        vectors = _Vectors(tiles)
        refs = iter(rest[: len(memory)])
        *means, scales = map(stores.row_numbers, rest[len(memory) :])
        loaded = [[vectors.load(half, i) for half in (0, 1)] for i in (0, 1)]
        parts = [None if x is None else next(refs) for x in factors]
        first = block * BLOCK_K
        for i in (0, 1):
            column = first + vectors.number(i) * NUMBERS
            factor, bias = (None if ref is None else _vector_of(ref, column) for ref in parts)
            for half in (0, 1):
                numbers = _floats(loaded[i][half], dtype)
                if means:
                    numbers = [arith.subf(x, means[0][half]) for x in numbers]
                numbers = [arith.mulf(x, scales[half]) for x in numbers]
                if factor is not None and bias is not None:
                    numbers = list(map(_fma, numbers, factor, bias))
                elif factor is not None:
                    numbers = list(map(arith.mulf, numbers, factor))
                elif bias is not None:
                    numbers = list(map(arith.addf, numbers, bias))
                pairs = [numbers[j : j + 2] for j in range(0, NUMBERS, 2)]
                vectors.store(half, i, [row_vectors.packed(pair, dtype) for pair in pairs])


def _vector_of(ref: ir.Value, index: ir.Value) -> list[ir.Value]:
    """Loads eight f32 numbers of device memory, from a multiple of 4 on."""
    f32 = ir.F32Type.get()
    address = inline.address(ref, index)
    found: list[ir.Value] = []
    for i in (0, 4):
        ptx = f"ld.global.nc.v4.f32 {{$0, $1, $2, $3}}, [$4 + {4 * i}];"
        found += mgpu.utils.inline_ptx(ptx, address, result_types=[f32] * 4)
    return found


def padded(vector: jax.Array, multiple: int) -> jax.Array:
    """Makes f32 numbers of an array, and zeros up to a multiple."""
    vector = vector.reshape(-1).astype(jnp.float32)
    return jnp.pad(vector, (0, -vector.shape[0] % multiple))


def of_columns(ref: Any, first: Any, width: int) -> jax.Array:
    """Loads ref[first : first + width] of device memory for all rows: [64, width] f32."""
    dtype = ref.dtype
    if mosaic.is_interpreted():
        columns = ref[pl.ds(first, width)].astype(jnp.float32)
        return jnp.broadcast_to(columns[None], (WGMMA_M, width))

    @inline.code(ref, first, returns=mma.accumulator_type(width))
    def loaded(ref: ir.Value, first: Integer) -> mgpu.FragmentedArray:
        f32 = ir.F32Type.get()
        pair_type = ir.VectorType.get((2,), f32)
        pair = stores.late_thread_number() % 4 * 2
        bits = jnp.dtype(dtype).itemsize * 8
        address = inline.address(ref, first + pair, bits)
        registers: list[ir.Value] = []
        for i in range(width // 8):
            numbers: Any
            if dtype == jnp.float32:
                ptx = f"ld.global.nc.v2.f32 {{$0, $1}}, [$2 + {32 * i}];"
                numbers = mgpu.utils.inline_ptx(ptx, address, result_types=[f32] * 2)
            else:
                ptx = f"ld.global.nc.b32 $0, [$1 + {16 * i}];"
                numbers = row_vectors.unpacked(inline.compute_word(ptx, address), dtype)
            registers += [vector.from_elements(pair_type, list(numbers))] * 2  # of both rows
        return inline.array(registers, (WGMMA_M, width))

    return loaded
