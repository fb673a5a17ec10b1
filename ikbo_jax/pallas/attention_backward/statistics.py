"""A small kernel for what every query row of attention's gradient needs: lse, and delta.

    delta = sum(d_out * out) - d_lse

XLA reads `out` and `d_out` at 1.1 TB/s of an H100's 3.0 when it computes delta (118 us of 1.47 ms
at 2,048 candidates of 64 queries, N = 2, H = 128), and takes four kernels to put the results where
the backward kernel reads them. Here four threads add up a row, and store its two numbers at the
row's target. Nothing is shared: a CTA is 32 rows, and no thread waits for another one's memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import math as mlir_math

from ikbo_jax.pallas.hopper import mosaic, stores
from ikbo_jax.problems.hopper import WARPGROUP_SIZE
from ikbo_jax.reference.attention import HUGE_LSE, LSE_ERROR

#: Threads of a row, and rows of a CTA.
ROW_THREADS = 4
CTA_ROWS = WARPGROUP_SIZE // ROW_THREADS
#: 16-bit numbers of one access of a thread, 16 bytes.
VECTOR = 8


class Inputs(NamedTuple):
    """Device memory; a row is a query of a query head, in the order of the candidates."""

    out: Any  # [rows, H]
    d_out: Any  # [rows, H]
    lse: Any  # [rows] f32
    d_lse: Any  # [rows] f32, or None for zeros
    targets: Any  # [rows / K] int32: where a row's statistics go, by candidate, query and group
    poison: Any  # [1] f32, added to every number: 0, or NaN; None: nothing is added


def statistics_kernel(inputs: Inputs, *, kv_heads: int, group: int, count: int) -> jax.Array:
    """[K, 2, count] f32: lse in powers of 2 and delta, at the targets; undefined elsewhere."""
    rows = inputs.out.shape[0]
    arrays, tree = jax.tree.flatten(inputs)

    def body(*refs: Any) -> None:
        _store(jax.tree.unflatten(tree, refs[:-1]), refs[-1], lax.axis_index("worker"), group)

    result: jax.Array = mosaic.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((kv_heads, 2, count), jnp.float32),
        grid=(pl.cdiv(rows, CTA_ROWS),),
        grid_names=("worker",),
        kernel_name="ikbo_attention_backward_statistics",
        compiler_params=mosaic.compiler_params(),
    )(*arrays)
    return result


def _store(inputs: Inputs, output: Any, worker: Any, group: int) -> None:
    """Stores the statistics of a CTA's rows."""
    refs, tree = jax.tree.flatten(inputs)
    scalar = plgpu.Layout.WG_SPLAT(())

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * (len(refs) + 1), scalar))
    def store(_: Any, *arguments: Any) -> None:
        *memory, output, worker = arguments
        found = jax.tree.unflatten(tree, memory)
        i32 = ir.IntegerType.get_signless(32)
        rows, width = ir.MemRefType(found.out.type).shape
        thread = arith.remui(mgpu.thread_idx(), mgpu.c(WARPGROUP_SIZE, i32))
        part = arith.remui(thread, mgpu.c(ROW_THREADS, i32))
        begin = arith.muli(worker.registers.item(), mgpu.c(CTA_ROWS, i32))
        row = arith.addi(begin, arith.divui(thread, mgpu.c(ROW_THREADS, i32)))
        is_row = arith.cmpi(arith.CmpIPredicate.slt, row, mgpu.c(rows, i32))
        row = arith.minsi(row, mgpu.c(rows - 1, i32))
        load = functools.partial(_number, row=row)
        delta = _row_sum(found.out, found.d_out, row, part, width)
        if found.d_lse is not None:
            delta = arith.subf(delta, load(found.d_lse))
        lse = load(found.lse)
        exponent = _exponent(lse)
        is_empty = arith.cmpf(arith.CmpFPredicate.OEQ, lse, _f32(-math.inf))
        delta = arith.select(is_empty, _f32(0.0), delta)
        if found.poison is not None:
            poison = _number(found.poison, mgpu.c(0, i32))
            exponent, delta = arith.addf(exponent, poison), arith.addf(delta, poison)
        kv_heads, _, count = ir.MemRefType(output.type).shape
        heads = mgpu.c(kv_heads * group, i32)
        head, query = arith.remui(row, heads), arith.divui(row, heads)
        in_group = arith.remui(head, mgpu.c(group, i32))
        place = arith.addi(arith.muli(query, mgpu.c(group, i32)), in_group)
        target = _loaded(found.targets, [(place, 1)], 1)[0]
        terms = [(arith.divui(head, mgpu.c(group, i32)), 2 * count), (target, 1)]
        is_first = arith.cmpi(arith.CmpIPredicate.eq, part, mgpu.c(0, i32))
        for number, value in enumerate((exponent, delta)):
            mgpu.utils.inline_ptx(
                f"st.global.f32 [$0 + {number * count * 4}], $1;",
                stores.device_address(output, terms, 4),
                value,
                predicate=arith.andi(is_row, is_first),
                has_side_effects=True,
            )

    store(*refs, output, worker)


def _f32(value: float) -> ir.Value:
    return mgpu.c(value, ir.F32Type.get())


def _number(array: ir.Value, row: ir.Value) -> ir.Value:
    """The f32 number of a row."""
    return mgpu.utils.bitcast(_loaded(array, [(row, 1)], 1)[0], ir.F32Type.get())


def _loaded(array: ir.Value, terms: list[tuple[ir.Value, int]], words: int) -> list[ir.Value]:
    """Words of 32 bits from element sum(value * stride) on."""
    i32 = ir.IntegerType.get_signless(32)
    size = mgpu.utils.bitwidth(ir.MemRefType(array.type).element_type) // 8
    names = ", ".join(f"${i}" for i in range(words))
    kind, names = ("b32", names) if words == 1 else (f"v{words}.b32", f"{{{names}}}")
    found = mgpu.utils.inline_ptx(
        f"ld.global.nc.{kind} {names}, [${words}];",
        stores.device_address(array, terms, size),
        result_types=[i32] * words,
    )
    return list(found)


def _row_sum(x: ir.Value, y: ir.Value, row: ir.Value, part: ir.Value, width: int) -> ir.Value:
    """sum(x[row] * y[row]) in f32, in all four threads of a row."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    pair = ir.VectorType.get((2,), ir.MemRefType(x.type).element_type)
    pair_f32 = ir.VectorType.get((2,), f32)
    steps = range(width // (ROW_THREADS * VECTOR))
    words: list[list[ir.Value]] = []
    for array in (x, y):
        found: list[ir.Value] = []
        for step in steps:
            # The threads of a row read 64 bytes side by side.
            column = arith.addi(part, mgpu.c(step * ROW_THREADS, i32))
            found += _loaded(array, [(row, width), (column, VECTOR)], 4)
        words.append(found)
    sums = [_f32(0.0)] * 4
    for i, both in enumerate(zip(*words, strict=True)):
        wide = [arith.extf(pair_f32, mgpu.utils.bitcast(word, pair)) for word in both]
        for j in (0, 1):
            a, b = (vector.extract(w, [], [j]) for w in wide)
            k = 2 * (i % 2) + j
            sums[k] = mlir_math.fma(a, b, sums[k])
    total = arith.addf(arith.addf(sums[0], sums[1]), arith.addf(sums[2], sums[3]))
    for distance in (1, 2):
        total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
    return total


def _exponent(lse: ir.Value) -> ir.Value:
    """`reference.attention.weight_exponents`."""
    size = mlir_math.absf(lse)
    lowered = arith.subf(lse, arith.mulf(size, _f32(LSE_ERROR)))
    is_huge = arith.cmpf(arith.CmpFPredicate.OGE, size, _f32(HUGE_LSE))
    exponent = arith.mulf(arith.select(is_huge, lowered, lse), _f32(math.log2(math.e)))
    is_empty = arith.cmpf(arith.CmpFPredicate.OEQ, lse, _f32(-math.inf))
    return arith.select(is_empty, _f32(math.inf), exponent)
