"""Sums of products of rows, by a small kernel; also parts of it for others.

XLA adds up rows of 64 to 128 numbers of 16 bits at a third to a half of the bandwidth of an H100.
Here four threads add up a row: a CTA is 32 rows.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import math as mlir_math

from ikbo_jax.pallas.hopper import inline, mosaic, per_thread, stores
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.hopper.launch import WarpgroupContext, launch_threads
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import WARPGROUP_SIZE

#: Threads of a row, and rows of a CTA.
ROW_THREADS = 4
CTA_ROWS = WARPGROUP_SIZE // ROW_THREADS
#: 16-bit numbers of one access of a thread, 16 bytes.
VECTOR = 8


def sums(one: jax.Array, other: jax.Array) -> jax.Array:
    """Adds one * other along the last axis, in f32.

    A barrier keeps XLA from adding up a row where it reads the sum, by one thread: 49 us for 62,902
    rows of 4 heads of 64, whose bytes take 16.
    """
    *shape, width = one.shape
    if mosaic.is_interpreted() or not one.size or width % (ROW_THREADS * VECTOR):
        products = one.astype(jnp.float32) * other.astype(jnp.float32)
        return lax.optimization_barrier(jnp.sum(products, axis=-1))
    rows = one.reshape(-1, width), other.reshape(-1, width)
    count = rows[0].shape[0]
    found: jax.Array = launch_threads(
        _add,
        count,
        rows,
        jax.ShapeDtypeStruct((count,), jnp.float32),
        memory.shared(),
        name="ikbo_row_products",
        workers=pl.cdiv(count, CTA_ROWS),
    )
    return found.reshape(shape)


def _add(ctx: WarpgroupContext) -> None:
    """Stores the sums of a CTA's rows."""
    first = ctx.worker * CTA_ROWS

    @inline.code(*ctx.operands, ctx.outputs, first)
    def _(one: ir.Value, other: ir.Value, output: ir.Value, first: Integer) -> None:
        width = ir.MemRefType(one.type).shape[1]
        thread = Integer(mgpu.thread_idx()) % WARPGROUP_SIZE
        part, row = thread % ROW_THREADS, first + thread // ROW_THREADS
        place = row.at_most(ctx.shape - 1)
        words, others = (loaded_row(x, place, part, width) for x in (one, other))
        total = row_sum(words, others, ir.MemRefType(one.type).element_type)
        inline.issue(
            "st.global.f32 [$0], $1;",
            stores.device_address(output, [(place, 1)], 4),
            total,
            predicate=part.equals(0) & (row < ctx.shape),
        )


def loaded_row(array: ir.Value, row: ir.Value, part: Integer, width: int) -> list[Integer]:
    """Loads this thread's quarter of array[row], in words of 32 bits."""
    found = []
    for step in range(width // (ROW_THREADS * VECTOR)):
        # The threads of a row read 64 bytes side by side.
        column = part + step * ROW_THREADS
        address = stores.device_address(array, [(row, width), (column, VECTOR)], 2)
        found += per_thread.load_words(address, 4)
    return found


def row_sum(x: Sequence[ir.Value], y: Sequence[ir.Value], dtype: ir.Type) -> ir.Value:
    """Adds products of two rows' elements in f32, in all four threads of a row."""
    f32 = ir.F32Type.get()
    pair, pair_f32 = ir.VectorType.get((2,), dtype), ir.VectorType.get((2,), f32)
    sums = [inline.f32(0.0)] * 4
    for i, both in enumerate(zip(x, y, strict=True)):
        wide = [arith.extf(pair_f32, mgpu.utils.bitcast(word, pair)) for word in both]
        for j in (0, 1):
            a, b = (vector.extract(w, [], [j]) for w in wide)
            k = 2 * (i % 2) + j
            sums[k] = mlir_math.fma(a, b, sums[k])
    total = arith.addf(arith.addf(sums[0], sums[1]), arith.addf(sums[2], sums[3]))
    for distance in (1, 2):
        total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
    return total
