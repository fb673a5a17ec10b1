"""A consumer's part of an item, handed over to the other consumer through shared memory.

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


def _load(address: ir.Value) -> list[ir.Value]:
    words = mgpu.utils.inline_ptx(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
        address,
        result_types=[ir.F32Type.get()] * VECTOR,
        has_side_effects=True,
    )
    return list(words)


def give(ctx: Any, acc: jax.Array, maximum: jax.Array, sums: jax.Array) -> None:
    """Writes acc [64, H] f32, and maximum and sums [64] f32, to the exchange memory."""
    shared = ctx.shared
    if ctx.interpret:
        shared.exchange_staging[...] = acc
        shared.row_staging[2] = maximum
        shared.row_staging[3] = sums
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, ROW_LAYOUT, ROW_LAYOUT))
    def store(_: Any, memory: ir.Value, acc: Any, maximum: Any, sums: Any) -> None:
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

    store(shared.exchange, acc, maximum, sums)


def take_statistics(ctx: Any) -> tuple[jax.Array, jax.Array]:
    """Reads maximum [64] and sums [64], f32, that the other consumer wrote."""
    shared = ctx.shared
    if ctx.interpret:
        return shared.row_staging[2], shared.row_staging[3]
    last_vector = shared.exchange.shape[0] - 1
    row = plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=ROW_LAYOUT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(row, row))
    def read(_: Any, memory: ir.Value) -> Any:
        words = _load(_address(memory, thread_number(), last_vector))
        single, layout = ir.VectorType.get((1,), ir.F32Type.get()), ROW_LAYOUT.to_mgpu()
        registers = [vector.from_elements(single, [word]) for word in words]
        return tuple(
            mgpu.FragmentedArray(
                _registers=np.array(pair, dtype=object).reshape(layout.registers_shape((WGMMA_M,))),
                _layout=layout,
                _is_signed=None,
            )
            for pair in (registers[:2], registers[2:])
        )

    statistics: tuple[jax.Array, jax.Array] = read(shared.exchange)
    return statistics


def take_sum(ctx: Any, acc: jax.Array, factor: jax.Array, factor2: jax.Array) -> jax.Array:
    """factor * acc + factor2 * the acc that the other consumer wrote; factors are of rows, [64].

    Vector by vector: a thread has no registers to hold both at H = 192.
    """
    if ctx.interpret:
        own = acc * factor[:, None]
        return own + ctx.shared.exchange_staging[...] * factor2[:, None]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA, ROW_LAYOUT, ROW_LAYOUT),
        return_type=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def add(_: Any, memory: ir.Value, acc: Any, *factors: Any) -> Any:
        thread = thread_number()
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        # A thread's pairs of columns alternate between its two rows.
        of_rows = [[vector.extract(r, [], [0]) for r in f.registers.flat] for f in factors]
        registers = acc.registers.copy()
        for number in range(registers.size // 2):
            words = _load(_address(memory, thread, number))
            for row in (0, 1):
                own = registers.flat[2 * number + row]
                sums = [
                    arith.addf(
                        arith.mulf(vector.extract(own, [], [i]), of_rows[0][row]),
                        arith.mulf(words[2 * row + i], of_rows[1][row]),
                    )
                    for i in (0, 1)
                ]
                registers.flat[2 * number + row] = vector.from_elements(pair, sums)
        return mgpu.FragmentedArray(
            _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
        )

    return add(ctx.shared.exchange, acc, factor, factor2)
