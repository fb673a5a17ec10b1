"""One consumer's part of an item, handed to the other consumer through shared memory.

Both consumers hold a tile in the same fragment layout, so a thread reads what the thread of the
same number wrote, in vectors of 16 bytes without bank conflicts.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.pallas.hopper.stores import ROW_LAYOUT, thread_number
from ikbo_jax.problems.hopper import WARPGROUP_SIZE, WGMMA_M

#: Words of a vector.
VECTOR = 4


def _address(memory: ir.Value, thread: ir.Value, number: int) -> ir.Value:
    """Address of this thread's vector `number`."""
    i32 = ir.IntegerType.get_signless(32)
    offset = arith.addi(
        arith.muli(thread, mgpu.c(VECTOR, i32)), mgpu.c(number * WARPGROUP_SIZE * VECTOR, i32)
    )
    return mgpu.utils.getelementptr(mgpu.utils.memref_ptr(memory), [offset], i32)


def give(ctx: Any, acc: jax.Array, maximum: jax.Array, sums: jax.Array) -> None:
    """Writes acc [64, H] f32, and maximum and sums [64] f32, to the exchange memory."""
    shared = ctx.shared
    if ctx.interpret:
        shared.exchange_staging[...] = acc
        shared.row_staging[2] = maximum
        shared.row_staging[3] = sums
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, ROW_LAYOUT, ROW_LAYOUT))
    def write(_: Any, memory: ir.Value, acc: Any, maximum: Any, sums: Any) -> None:
        words = [
            vector.extract(register, [], [i])
            for array, width in ((acc, 2), (maximum, 1), (sums, 1))
            for register in array.registers.flat
            for i in range(width)
        ]
        thread = thread_number()
        for number in range(len(words) // VECTOR):
            mgpu.utils.inline_ptx(
                "st.shared.v4.f32 [$0], {$1, $2, $3, $4};",
                _address(memory, thread, number),
                *words[number * VECTOR : (number + 1) * VECTOR],
                has_side_effects=True,
            )

    write(shared.exchange, acc, maximum, sums)


def take(ctx: Any, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Reads (acc [64, width], maximum [64], sums [64]), f32, that the other consumer wrote."""
    shared = ctx.shared
    if ctx.interpret:
        return shared.exchange_staging[...], shared.row_staging[2], shared.row_staging[3]

    memory_vectors = shared.exchange.shape[0]
    row = plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=ROW_LAYOUT)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=(
            plgpu.ShapeDtypeStruct((WGMMA_M, width), jnp.float32, layout=plgpu.Layout.WGMMA),
            row,
            row,
        ),
    )
    def read(_: Any, memory: ir.Value) -> Any:
        f32, thread = ir.F32Type.get(), thread_number()
        words: list[ir.Value] = []
        for number in range(memory_vectors):
            words += mgpu.utils.inline_ptx(
                "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
                _address(memory, thread, number),
                result_types=[f32] * VECTOR,
                has_side_effects=True,
            )
        halves = len(words) - VECTOR
        pair, single = ir.VectorType.get((2,), f32), ir.VectorType.get((1,), f32)
        registers = [vector.from_elements(pair, words[i : i + 2]) for i in range(0, halves, 2)]
        acc = mgpu.FragmentedArray(
            _registers=np.array(registers, dtype=object).reshape(
                mgpu.WGMMA_LAYOUT.registers_shape((WGMMA_M, width))
            ),
            _layout=mgpu.WGMMA_LAYOUT,
            _is_signed=None,
        )
        layout = ROW_LAYOUT.to_mgpu()
        rows = [
            mgpu.FragmentedArray(
                _registers=np.array(
                    [vector.from_elements(single, [word]) for word in words[i : i + 2]],
                    dtype=object,
                ).reshape(layout.registers_shape((WGMMA_M,))),
                _layout=layout,
                _is_signed=None,
            )
            for i in (halves, halves + 2)
        ]
        return acc, *rows

    return read(shared.exchange)
