"""Statistics of rows in device memory, by warps beside the producer's.

A quad of lanes reads a row, each every fourth of its vectors of 16 bytes, eight at a time.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, math

from ikbo_jax.pallas.hopper import inline, mosaic, row_vectors, stores, warps
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.linear.rows import NUMBERS, WORDS
from ikbo_jax.problems.hopper import TILE_ROWS
from ikbo_jax.reference.norm_linear import Norm

#: Lanes that read a row; rows that a warp reads at once; vectors of a lane that are in flight.
_QUAD, _ROWS, _FLIGHT = 4, 8, 8


def compute(x: Any, first: Any, target: Any, norm: Norm, warp_count: int) -> None:
    """Writes mean and scale of the rows [first, first + 128) of `x` to `target`, [2, 128] f32.

    The last row counts for those past it. The warps are those from the warpgroup's third one on.
    """
    (rows, features), dtype = x.shape, x.dtype
    if mosaic.is_interpreted():

        @pl.loop(0, TILE_ROWS)
        def _(r: Any) -> None:
            row = x[jnp.minimum(first + r, rows - 1), :].astype(jnp.float32)
            mean = jnp.float32(0) if norm.kind == "rms" else jnp.mean(row)
            row = row - mean
            target[0, r] = mean
            target[1, r] = 1 / jnp.sqrt(jnp.mean(row * row) + norm.eps)

        return

    @pl.loop(jnp.int32(0), jnp.int32(TILE_ROWS // (_ROWS * warp_count)))
    def _(step: Any) -> None:
        @inline.code(x, target, first, step)
        def _(x: ir.Value, target: ir.Value, first: Integer, step: Integer) -> None:
            thread = stores.late_thread_number() - 2 * warps.LANES
            of_row, row = stores.digits(thread, (_QUAD, _ROWS * warp_count))
            row = step * (_ROWS * warp_count) + row
            source = (first + row).at_most(rows - 1)
            base = stores.device_address(x, [(source, features)], 2)
            sums = _sums(base, of_row, features, norm, dtype)
            mean, scale = _finish(*sums, features, norm)
            is_first = of_row.equals(0)
            for i, number in enumerate((mean, scale)):
                place = row + i * TILE_ROWS
                warps.store_shared(target, place, inline.word(number), is_first)


def _sums(
    base: ir.Value, of_row: Integer, features: int, norm: Norm, dtype: Any
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Computes a lane's (shift, sum of x - shift, sum of its squares); see `rows.Sums`."""
    byte, word = (ir.IntegerType.get_signless(bits) for bits in (8, 32))
    zero, count = inline.f32(0.0), features // NUMBERS
    shift = total = squares = zero
    if norm.kind != "rms":
        loaded = inline.issue("ld.global.b32 $0, [$1];", base, result_types=word)
        shift = row_vectors.unpacked(loaded, dtype)[0]
    numbers = [of_row + i for i in range(0, count, _QUAD)]
    for begin in range(0, len(numbers), _FLIGHT):
        part = numbers[begin : begin + _FLIGHT]
        wanted = [i < count for i in part]
        vectors = [
            inline.issue(
                "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; "
                "mov.b32 $2, 0; mov.b32 $3, 0; @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
                mgpu.utils.getelementptr(base, [i * (2 * NUMBERS)], byte),
                arith.extui(word, is_wanted),
                result_types=[word] * WORDS,
            )
            for i, is_wanted in zip(part, wanted, strict=True)
        ]
        for vector, is_wanted in zip(vectors, wanted, strict=True):
            for x in (x for w in vector for x in row_vectors.unpacked(w, dtype)):
                x = arith.select(is_wanted, arith.subf(x, shift), zero)
                total = arith.addf(total, x)
                squares = arith.addf(squares, arith.mulf(x, x))
    return shift, total, squares


def _finish(
    shift: ir.Value, total: ir.Value, squares: ir.Value, features: int, norm: Norm
) -> tuple[ir.Value, ir.Value]:
    """Computes mean and scale of a quad's sums."""
    for distance in (1, 2):
        total, squares = (
            arith.addf(x, mgpu.utils.shfl_bfly(x, distance)) for x in (total, squares)
        )
    share = inline.f32(1 / features)
    variance, mean = arith.mulf(squares, share), inline.f32(0.0)
    if norm.kind == "layer":
        distance = arith.mulf(total, share)
        variance = arith.subf(variance, arith.mulf(distance, distance))
        variance = arith.maximumf(variance, inline.f32(0.0))
        mean = arith.addf(distance, shift)
    return mean, math.rsqrt(arith.addf(variance, inline.f32(norm.eps)))
