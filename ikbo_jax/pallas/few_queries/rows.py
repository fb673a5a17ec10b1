"""Which rows an item has: searches of the index that the producer warp makes.

A *row slot* stands for up to `item_rows` rows of one user. Row slot u < U has the first rows of
user u. Every row number that is a multiple of `item_rows` gives one more row slot, to the user of
the row before it. So a user with n rows has at least n / item_rows row slots, rounded up; those
that it does not need are empty. No list of items is needed, and those with many rows come first.

The index is searched in the same way for every user, so the ranges that `candidates` finds hold
every candidate exactly once even if the index is not sorted. Only its users then differ within a
range, which `end_of_run` finds.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

LANES = 32
#: Lanes that search for one bound.
HALF = 16


def slots(batch: int, users: int, q_len: int, item_rows: int) -> int:
    """Number of row slots; see the module's docstring."""
    return users + batch * q_len // item_rows


def lane() -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx("mov.u32 $0, %laneid;", result_types=i32)


def load(ref: ir.Value, index: ir.Value) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    address = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(ref), [index], i32)
    return mgpu.utils.inline_ptx("ld.global.b32 $0, [$1];", address, result_types=i32)


def ballot(predicate: ir.Value) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(
        "{ .reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
        arith.extui(i32, predicate),
        result_types=i32,
        has_side_effects=True,
        convergent=True,
    )


def _lowest_bit(x: ir.Value) -> ir.Value:
    """Number of the lowest bit that is set."""
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(
        "{ .reg .b32 x; brev.b32 x, $1; clz.b32 $0, x; }", x, result_types=i32
    )


def _from_lane(x: ir.Value, lane: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(
        f"shfl.sync.idx.b32 $0, $1, {lane}, 31, 0xffffffff;",
        x,
        result_types=i32,
        has_side_effects=True,
        convergent=True,
    )


def user_at(index: ir.Value, position: ir.Value, batch: int, users: int) -> ir.Value:
    """The user, clamped, of the candidate at `position`, or of the last candidate."""
    i32 = ir.IntegerType.get_signless(32)
    user = load(index, arith.minsi(position, mgpu.c(batch - 1, i32)))
    return arith.minsi(arith.maxsi(user, mgpu.c(0, i32)), mgpu.c(users - 1, i32))


def _splat(value: ir.Value) -> mgpu.FragmentedArray:
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


_SCALAR = plgpu.Layout.WG_SPLAT(())
_INTEGER = plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SCALAR)


def candidates(cand_to_user: Any, user: Any, users: int, *, interpret: bool) -> tuple[Any, Any]:
    """(first candidate, end) of a user.

    Half a warp searches for each of the two: it compares 16 candidates at once. The bound is in the
    first part whose last candidate is not below it.

    Args:
      cand_to_user: device memory [B] int32; clamped to [0, U).
      user: int32.
      users: U.
    """
    batch = cand_to_user.shape[0]
    if interpret:

        def count_below(user: Any) -> Any:
            def halve(_: Any, bounds: tuple[Any, Any]) -> tuple[Any, Any]:
                low, high = bounds
                middle = (low + high) // 2
                other = jnp.clip(cand_to_user[jnp.minimum(middle, batch - 1)], 0, users - 1)
                is_below = (other < user) & (low < high)
                return jnp.where(is_below, middle + 1, low), jnp.where(is_below, high, middle)

            bounds = (jnp.int32(0), jnp.int32(batch))
            return lax.fori_loop(0, batch.bit_length(), halve, bounds)[0]

        return count_below(user), count_below(user + 1)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=(_INTEGER, _INTEGER))
    def search(_: Any, index: ir.Value, user: mgpu.FragmentedArray) -> Any:
        i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
        thread_lane, low, step = lane(), mgpu.c(0, i32), 1
        half = arith.divui(thread_lane, mgpu.c(HALF, i32))
        part = arith.addi(arith.remui(thread_lane, mgpu.c(HALF, i32)), mgpu.c(1, i32))
        bound = arith.addi(user.registers.item(), half)
        while step * HALF < batch:
            step *= HALF
        while step:
            last = arith.addi(low, arith.muli(part, mgpu.c(step, i32)))
            last = arith.subi(last, mgpu.c(1, i32))
            is_below = arith.andi(
                arith.cmpi(predicates.slt, last, mgpu.c(batch, i32)),
                arith.cmpi(predicates.slt, user_at(index, last, batch, users), bound),
            )
            not_below = arith.xori(ballot(is_below), mgpu.c(-1, i32))
            of_half = arith.shrui(not_below, arith.muli(half, mgpu.c(HALF, i32)))
            passed = _lowest_bit(arith.ori(of_half, mgpu.c(1 << HALF, i32)))
            low = arith.addi(low, arith.muli(passed, mgpu.c(step, i32)))
            step //= HALF
        low = arith.minsi(low, mgpu.c(batch, i32))
        return _splat(_from_lane(low, 0)), _splat(_from_lane(low, HALF))

    return search(cand_to_user, user)


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

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR, _SCALAR), return_type=_INTEGER)
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
            found = arith.addi(arith.addi(begin, offset), _lowest_bit(differ))
            is_found = arith.cmpi(predicates.ne, differ, mgpu.c(0, i32))
            result = arith.select(is_found, arith.minsi(result, found), result)
        return _splat(result)

    return search(cand_to_user, first, stop)
