"""Values of which each of a warpgroup's 128 threads has one.

Arrays [128] in `LAYOUT`: arithmetic on them is each thread's own.  Pallas has no loads and stores
at addresses that differ by thread, so these are inline PTX, with an equal formulation under
interpretation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.problems.hopper import WARPGROUP_SIZE

LAYOUT = plgpu.Layout.WG_STRIDED((WARPGROUP_SIZE,), vec_size=1)
INT32 = plgpu.ShapeDtypeStruct((WARPGROUP_SIZE,), jnp.int32, layout=LAYOUT)
#: Warps of a warpgroup.
WARPS = 4


def number() -> jax.Array:
    """Each thread's number in its warpgroup."""
    return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_SIZE,), 0, layout=LAYOUT)


def same(value: int) -> jax.Array:
    """The same number for each thread."""
    return plgpu.layout_cast(jnp.full((WARPGROUP_SIZE,), value, jnp.int32), LAYOUT)


def scalar(array: mgpu.FragmentedArray) -> ir.Value:
    """A thread's value, in inline code."""
    return vector.extract(array.registers.item(), [], [0])


def array(value: ir.Value, like: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    """The array of which `value` is a thread's element, in the layout of `like`."""
    i32 = ir.IntegerType.get_signless(32)
    register = vector.from_elements(ir.VectorType.get((1,), i32), [value])
    registers = np.array([register], dtype=object).reshape(like.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=True)


def load_words(address: ir.Value, count: int, *, is_early: bool = False) -> list[ir.Value]:
    """`count` words of 32 bits of device memory that the launch does not change, in inline code.

    With `is_early`, LLVM keeps the loads where they are issued.
    """
    i32 = ir.IntegerType.get_signless(32)
    names = ", ".join(f"${i}" for i in range(count))
    kind, names = ("b32", names) if count == 1 else (f"v{count}.b32", f"{{{names}}}")
    found = mgpu.utils.inline_ptx(
        f"ld.global.nc.{kind} {names}, [${count}];",
        address,
        result_types=[i32] * count,
        has_side_effects=is_early,
    )
    return list(found)


def store_words(
    address: ir.Value, words: Sequence[ir.Value], predicate: ir.Value, offset: int = 0
) -> None:
    """Stores four words of 32 bits to device memory, in inline code.

    Args:
      address: of device memory.
      words: four.
      predicate: bool, whether to store.
      offset: bytes from `address`, which is a multiple of 16 bytes with it.
    """
    mgpu.utils.inline_ptx(
        f"st.global.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};",
        address,
        *words,
        predicate=predicate,
        has_side_effects=True,
    )


def gather(ref: Any, index: jax.Array, space: str, *, interpret: bool) -> jax.Array:
    """ref[index], one element for each thread; `space` is "shared" or "global"."""
    if interpret:
        return jnp.take(ref[...], index, mode="clip")

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), LAYOUT),
        return_type=INT32,
    )
    def load(_: Any, ref: ir.Value, index: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        address = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [scalar(index)], i32)
        value = mgpu.utils.inline_ptx(
            f"ld.{space}.b32 $0, [$1];", address, result_types=i32, has_side_effects=True
        )
        return array(value, index)

    return load(ref, index)


def scatter(
    ref: Any,
    index: jax.Array,
    values: jax.Array,
    is_wanted: jax.Array,
    *,
    space: str = "shared",
    interpret: bool,
) -> None:
    """ref[index] = values, for each thread that wants it; `space` is "shared" or "global"."""
    if interpret:
        _one_by_one(ref, index, values, is_wanted, lambda old, new: new)
    else:
        _each(f"st.{space}.b32 [$0], $1;", ref, index, values, is_wanted)


def add(
    ref: Any, index: jax.Array, values: jax.Array, is_wanted: jax.Array, *, interpret: bool
) -> None:
    """ref[index] += values in shared memory, for each thread that wants it; threads may collide."""
    if interpret:
        _one_by_one(ref, index, values, is_wanted, lambda old, new: old + new)
    else:
        _each("red.shared.add.u32 [$0], $1;", ref, index, values, is_wanted)


def _one_by_one(
    ref: Any, index: jax.Array, values: jax.Array, is_wanted: jax.Array, change: Any
) -> None:
    """ref[index] = change(ref[index], values), one thread after another, under interpretation."""

    @pl.loop(0, WARPGROUP_SIZE)
    def _(i: Any) -> None:
        @pl.when(is_wanted[i])
        def _() -> None:
            ref[index[i]] = change(ref[index[i]], values[i])


def _each(
    instruction: str, ref: Any, index: jax.Array, values: jax.Array, is_wanted: jax.Array
) -> None:
    """An instruction with the address ($0) of ref[index] and the value ($1), where wanted."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT, LAYOUT, LAYOUT))
    def issue(_: Any, ref: ir.Value, *arrays: mgpu.FragmentedArray) -> None:
        i32 = ir.IntegerType.get_signless(32)
        index, value, wanted = map(scalar, arrays)
        mgpu.utils.inline_ptx(
            instruction,
            mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [index], i32),
            value,
            predicate=arith.cmpi(arith.CmpIPredicate.ne, wanted, mgpu.c(0, i32)),
            has_side_effects=True,
        )

    issue(ref, index, values, is_wanted.astype(jnp.int32))


def sums_before(values: Sequence[jax.Array], scratch: Any, *, interpret: bool) -> list[jax.Array]:
    """For each thread and each of the arrays, the sum of the values of the threads before it.

    `scratch` is shared memory of `WARPS` words for each array.
    """
    if interpret:
        return [jnp.cumsum(x, dtype=jnp.int32) - x for x in values]
    thread, lanes = number(), WARPGROUP_SIZE // WARPS
    found = [_sums_of_warp(x, thread, lanes) for x in values]
    _keep_totals([total for _, total in found], scratch)
    plgpu.commit_smem()
    warp, sums = lax.div(thread, same(lanes)), []
    for i, (before, _) in enumerate(found):
        for other in range(WARPS - 1):
            part = gather(scratch, same(i * WARPS + other), "shared", interpret=False)
            before = before + jnp.where(warp > other, part, 0)
        sums.append(before)
    return sums


def sums_by_warp(values: Sequence[jax.Array], scratch: Any) -> None:
    """scratch[WARPS * i + w] = the sum of the values of warp w in array i; not for interpretation.

    `scratch` is shared memory. The warpgroup's threads see the sums after `commit_smem`.
    """
    thread, lanes = number(), WARPGROUP_SIZE // WARPS
    _keep_totals([_sums_of_warp(x, thread, lanes)[1] for x in values], scratch)


def _keep_totals(totals: Sequence[jax.Array], scratch: Any) -> None:
    """Stores numbers that are the same in all threads of a warp."""
    thread, lanes = number(), WARPGROUP_SIZE // WARPS
    warp, is_first = lax.div(thread, same(lanes)), lax.rem(thread, same(lanes)) == 0
    for i, total in enumerate(totals):
        scatter(scratch, warp + i * WARPS, total, is_first, interpret=False)


def _sums_of_warp(values: jax.Array, thread: jax.Array, lanes: int) -> tuple[jax.Array, jax.Array]:
    """The sum of the values of lower lanes, and of all lanes of the warp."""

    @plgpu.inline_mgpu(arg_types=(LAYOUT, LAYOUT), return_type=(INT32, INT32))
    def add_up(
        _: Any, values: mgpu.FragmentedArray, thread: mgpu.FragmentedArray
    ) -> tuple[mgpu.FragmentedArray, mgpu.FragmentedArray]:
        i32 = ir.IntegerType.get_signless(32)
        zero = mgpu.c(0, i32)
        before, total = zero, scalar(values)
        for step in range(lanes.bit_length() - 1):
            # `total` is the sum of 2^step lanes; the other half of their group has the rest.
            other = mgpu.utils.shfl_bfly(total, 1 << step)
            bit = arith.andi(scalar(thread), mgpu.c(1 << step, i32))
            is_upper = arith.cmpi(arith.CmpIPredicate.ne, bit, zero)
            before = arith.addi(before, arith.select(is_upper, other, zero))
            total = arith.addi(total, other)
        return array(before, values), array(total, values)

    result: tuple[jax.Array, jax.Array] = add_up(values, thread)
    return result
