"""Which rows an item has: searches of the index that the producer warp makes.

A *row slot* stands for up to `item_rows` rows of one user. Row slot u < U has the first rows of
user u. Every row number that is a multiple of `item_rows` gives one more row slot, to the user of
the row before it. So a user with n rows has at least n / item_rows row slots, rounded up; those
that it does not need are empty. No list of items is needed, and those with many rows come first;
unless all keys and values together exceed L2: then CTAs go through both kinds of slots evenly
(`firsts_before`), so that a user's slots read its keys at the same time, and device memory delivers
them once.

The index is searched in the same way for every user, so the ranges that `candidates` finds hold
every candidate exactly once even if the index is not sorted. Only its users then differ within a
range, which `search.end_of_run` finds.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.hopper.warps import LANES, ballot, from_lane, lane, lowest_bit, total
from ikbo_jax.pallas.worklist.search import INTEGER, SCALAR, count_at_most, splat, user_at

#: Most items of a period of `firsts_before`.
PERIOD = 1024
#: Lanes that search for one bound, and candidates that each of them compares at once: 16,384
#: candidates take two rounds of loads, each of which takes 0.5 us or more.
HALF, EACH = 16, 8
#: Most candidates that a warp counts instead of searching: one round of loads, 16 of each lane.
MOST_COUNTED = 512


def slots(batch: int, users: int, q_len: int, item_rows: int) -> int:
    """Number of row slots; see the module's docstring."""
    return users + batch * q_len // item_rows


def firsts_before(position: Any, firsts: int, extra: int) -> Any:
    """How many items of users' first slots are before a position of an order with all items.

    The order goes through both kinds evenly. It has periods of equally many items of either kind,
    so that the arithmetic needs 32 bits; first ones that they do not take come before, other ones
    after them.

    Args:
      position: int32, from 0 to `firsts + extra`.
      firsts: number of items of users' first slots.
      extra: number of the others.
    """
    periods = -(-(firsts + extra) // PERIOD)
    of_period, further = firsts // periods, extra // periods
    early = firsts % periods
    later = jnp.maximum(position - early, 0)
    number, rest = lax.div(later, of_period + further), lax.rem(later, of_period + further)
    found = number * of_period + rest - lax.div(rest * further, of_period + further)
    return jnp.minimum(jnp.minimum(position, early) + found, firsts)


def candidates(cand_to_user: Any, user: Any, users: int, *, interpret: bool) -> tuple[Any, Any]:
    """(first candidate, end) of a user.

    Of few candidates, a warp loads all and counts those of smaller users. Otherwise half a warp
    searches for each of the two: it compares 128 candidates at once. The bound is in the first part
    whose last candidate is not below it.

    Args:
      cand_to_user: device memory [B] int32; clamped to [0, U).
      user: int32.
      users: U.
    """
    batch = cand_to_user.shape[0]
    if interpret:

        def user_of(candidate: Any) -> Any:
            return jnp.clip(cand_to_user[candidate], 0, users - 1)

        below, of_user = (
            count_at_most(user_of, batch, last, jnp.int32(0)) for last in (user - 1, user)
        )
        return below, of_user

    if batch <= MOST_COUNTED:
        return _counts(cand_to_user, user, users)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=(INTEGER, INTEGER))
    def search(_: Any, index: ir.Value, user: mgpu.FragmentedArray) -> Any:
        i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
        thread_lane, low, step = lane(), mgpu.c(0, i32), 1
        half = arith.divui(thread_lane, mgpu.c(HALF, i32))
        part = arith.addi(arith.remui(thread_lane, mgpu.c(HALF, i32)), mgpu.c(1, i32))
        bound = arith.addi(user.registers.item(), half)
        while step * HALF * EACH < batch:
            step *= HALF * EACH
        while step:
            places = []
            for i in range(min(EACH, -(-batch // (HALF * step)))):
                number = arith.addi(part, mgpu.c(i * HALF, i32))
                last = arith.addi(low, arith.muli(number, mgpu.c(step, i32)))
                places.append(arith.subi(last, mgpu.c(1, i32)))
            # All loads are issued before the first one is waited for.
            others = [user_at(index, place, batch, users) for place in places]
            passed = mgpu.c(len(places) * HALF, i32)
            for i, (place, other) in reversed(list(enumerate(zip(places, others, strict=True)))):
                is_below = arith.andi(
                    arith.cmpi(predicates.slt, place, mgpu.c(batch, i32)),
                    arith.cmpi(predicates.slt, other, bound),
                )
                not_below = arith.xori(ballot(is_below), mgpu.c(-1, i32))
                of_half = arith.shrui(not_below, arith.muli(half, mgpu.c(HALF, i32)))
                of_half = arith.andi(of_half, mgpu.c((1 << HALF) - 1, i32))
                first = arith.addi(lowest_bit(of_half), mgpu.c(i * HALF, i32))
                is_found = arith.cmpi(predicates.ne, of_half, mgpu.c(0, i32))
                passed = arith.select(is_found, first, passed)
            low = arith.addi(low, arith.muli(passed, mgpu.c(step, i32)))
            step //= HALF * EACH
        low = arith.minsi(low, mgpu.c(batch, i32))
        return splat(from_lane(low, 0)), splat(from_lane(low, HALF))

    return search(cand_to_user, user)


def _counts(cand_to_user: Any, user: Any, users: int) -> tuple[Any, Any]:
    """How many candidates have smaller users than `user`, and than the next one.

    The loads do not depend on the user, nor on each other.
    """
    batch = cand_to_user.shape[0]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=(INTEGER, INTEGER))
    def count(_: Any, index: ir.Value, user: mgpu.FragmentedArray) -> Any:
        i32, predicates = ir.IntegerType.get_signless(32), arith.CmpIPredicate
        places = [arith.addi(lane(), mgpu.c(i, i32)) for i in range(0, batch, LANES)]
        # All loads are issued before the first one is waited for.
        others = [user_at(index, place, batch, users) for place in places]
        first = user.registers.item()
        second = arith.addi(first, mgpu.c(1, i32))
        # Both counts in one word, so that the lanes add them at once.
        both = mgpu.c(0, i32)
        for i, (place, other) in enumerate(zip(places, others, strict=True)):
            for bound, shift in ((first, 0), (second, 16)):
                is_below = arith.cmpi(predicates.slt, other, bound)
                if (i + 1) * LANES > batch:
                    is_inside = arith.cmpi(predicates.slt, place, mgpu.c(batch, i32))
                    is_below = arith.andi(is_below, is_inside)
                one = arith.select(is_below, mgpu.c(1 << shift, i32), mgpu.c(0, i32))
                both = arith.addi(both, one)
        both = total(both)
        return tuple(
            splat(x)
            for x in (
                arith.andi(both, mgpu.c(0xFFFF, i32)),
                arith.shrui(both, mgpu.c(16, i32)),
            )
        )

    return count(cand_to_user, user)
