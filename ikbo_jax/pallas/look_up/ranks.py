"""Ranks of the threads of a warp among those with the same value."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.hopper import inline, warps
from ikbo_jax.pallas.hopper.per_thread import INT32, LANES, LAYOUT, array, scalar
from ikbo_jax.problems.hopper import WARPGROUP_SIZE


def rank_in_warp(
    values: jax.Array, is_wanted: jax.Array, limit: int, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Counts lower, and all, wanted lanes of the warp with the same value in [0, limit)."""
    if interpret:
        lane = jnp.arange(WARPGROUP_SIZE, dtype=jnp.int32)
        is_same = (values[None] == values[:, None]) & is_wanted[None]
        is_same &= lane[None] // LANES == lane[:, None] // LANES
        before = jnp.sum(is_same & (lane[None] < lane[:, None]), axis=1, dtype=jnp.int32)
        return before, jnp.sum(is_same, axis=1, dtype=jnp.int32)

    @plgpu.inline_mgpu(arg_types=(LAYOUT, LAYOUT), return_type=(INT32, INT32))
    def rank(_: Any, values: mgpu.FragmentedArray, wanted: mgpu.FragmentedArray) -> Any:
        def lanes_with(bits: ir.Value) -> tuple[ir.Value, ir.Value]:
            is_set = arith.cmpi(arith.CmpIPredicate.ne, bits, inline.i32(0))
            return is_set, warps.ballot(is_set)

        _, lanes = lanes_with(scalar(wanted))
        for bit in range((limit - 1).bit_length()):
            is_set, found = lanes_with(arith.andi(scalar(values), inline.i32(1 << bit)))
            others = arith.xori(found, inline.i32(-1))
            lanes = arith.andi(lanes, arith.select(is_set, found, others))
        lower = arith.subi(arith.shli(inline.i32(1), warps.lane()), inline.i32(1))
        return array(warps.ones(arith.andi(lanes, lower)), values), array(warps.ones(lanes), values)

    return rank(values, is_wanted.astype(jnp.int32))


def synchronise_warp(*, interpret: bool) -> None:
    """Makes what a lane stored in shared memory visible to the lanes of its warp."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def issue(_: Any) -> None:
        inline.issue("bar.warp.sync 0xffffffff;", convergent=True)

    issue()
