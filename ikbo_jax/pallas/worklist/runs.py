"""Runs of candidates of one user in an index, which a producer warp finds."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.hopper.warps import LANES, ballot, lane, load, lowest_bit

SCALAR = plgpu.Layout.WG_SPLAT(())
INTEGER = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)


def splat(value: ir.Value) -> mgpu.FragmentedArray:
    """A value that all lanes have, as Pallas takes it."""
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


def user_at(index: ir.Value, position: ir.Value, batch: int, users: int) -> ir.Value:
    """The user, clamped, of the candidate at `position`, or of the last candidate."""
    i32 = ir.IntegerType.get_signless(32)
    return clamped(load(index, arith.minsi(position, mgpu.c(batch - 1, i32))), users)


def clamped(user: ir.Value, users: int) -> ir.Value:
    """A user that an index names, within [0, U)."""
    i32 = ir.IntegerType.get_signless(32)
    return arith.minsi(arith.maxsi(user, mgpu.c(0, i32)), mgpu.c(users - 1, i32))


def end_of_run(
    cand_to_user: Any, first: Any, stop: Any, most: int, users: int, *, interpret: bool
) -> Any:
    """The first candidate from `first` on, up to `stop`, that has another user than `first`.

    Args:
      cand_to_user: device memory [B] int32; clamped to [0, U).
      first: a candidate.
      stop: past `first`, at most B.
      most: the largest `stop` - `first`.
      users: U.
    """
    if interpret:
        user = jnp.clip(cand_to_user[first], 0, users - 1)

        def is_same(position: Any) -> Any:
            other = cand_to_user[jnp.minimum(position, cand_to_user.shape[0] - 1)]
            return (position < stop) & (jnp.clip(other, 0, users - 1) == user)

        return lax.while_loop(is_same, lambda position: position + 1, first)

    batch = cand_to_user.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=INTEGER)
    def search(
        _: Any, index: ir.Value, first: mgpu.FragmentedArray, stop: mgpu.FragmentedArray
    ) -> mgpu.FragmentedArray:
        i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
        begin, end = first.registers.item(), stop.registers.item()

        user, result = user_at(index, begin, batch, users), end
        first_lane = arith.addi(begin, lane())
        offsets = [mgpu.c(offset, i32) for offset in range(0, most, LANES)]
        # All loads are issued before the first one is waited for.
        others = [user_at(index, arith.addi(first_lane, x), batch, users) for x in offsets]
        for offset, other in zip(offsets, others, strict=True):
            differ = ballot(arith.cmpi(predicates.ne, other, user))
            found = arith.addi(arith.addi(begin, offset), lowest_bit(differ))
            is_found = arith.cmpi(predicates.ne, differ, mgpu.c(0, i32))
            result = arith.select(is_found, arith.minsi(result, found), result)
        return splat(result)

    return search(cand_to_user, first, stop)
