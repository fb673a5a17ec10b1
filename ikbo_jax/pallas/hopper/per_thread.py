"""Values of which each of a warpgroup's 128 threads has one.

Arrays [128] in `LAYOUT`: arithmetic on them is each thread's own.  Pallas has no loads and stores
at addresses that differ by thread, so these are inline PTX, with an equal formulation under
interpretation.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.problems.hopper import WARPGROUP_SIZE

LAYOUT = plgpu.Layout.WG_STRIDED((WARPGROUP_SIZE,), vec_size=1)


def number() -> jax.Array:
    """Each thread's number in its warpgroup."""
    return plgpu.broadcasted_iota(jnp.int32, (WARPGROUP_SIZE,), 0, layout=LAYOUT)


def same(value: int) -> jax.Array:
    """The same number for each thread."""
    return plgpu.layout_cast(jnp.full((WARPGROUP_SIZE,), value, jnp.int32), LAYOUT)


def scalar(array: mgpu.FragmentedArray) -> ir.Value:
    """A thread's value, in inline code."""
    return vector.extract(array.registers.item(), [], [0])


def gather(ref: Any, index: jax.Array, space: str, *, interpret: bool) -> jax.Array:
    """ref[index], one element for each thread; `space` is "shared" or "global"."""
    if interpret:
        return jnp.take(ref[...], index, mode="clip")

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), LAYOUT),
        return_type=plgpu.ShapeDtypeStruct((WARPGROUP_SIZE,), jnp.int32, layout=LAYOUT),
    )
    def load(_: Any, ref: ir.Value, index: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        address = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [scalar(index)], i32)
        value = mgpu.utils.inline_ptx(
            f"ld.{space}.b32 $0, [$1];", address, result_types=i32, has_side_effects=True
        )
        register = vector.from_elements(ir.VectorType.get((1,), i32), [value])
        registers = np.array([register], dtype=object).reshape(index.registers.shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=index.layout, _is_signed=True)

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

        @pl.loop(0, WARPGROUP_SIZE)
        def _(i: Any) -> None:
            @pl.when(is_wanted[i])
            def _() -> None:
                ref[index[i]] = values[i]

        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT, LAYOUT, LAYOUT))
    def store(_: Any, ref: ir.Value, *arrays: mgpu.FragmentedArray) -> None:
        i32 = ir.IntegerType.get_signless(32)
        index, value, wanted = map(scalar, arrays)
        mgpu.utils.inline_ptx(
            f"st.{space}.b32 [$0], $1;",
            mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [index], i32),
            value,
            predicate=arith.cmpi(arith.CmpIPredicate.ne, wanted, mgpu.c(0, i32)),
            has_side_effects=True,
        )

    store(ref, index, values, is_wanted.astype(jnp.int32))
