"""Searches inside of kernels: a bisection, and the end of a run of candidates of one user."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir

from ikbo_jax.pallas.hopper import inline, mosaic
from ikbo_jax.pallas.hopper.inline import INTEGER, Integer
from ikbo_jax.pallas.hopper.warps import LANES, ballot, lane, load, lowest_bit


def count_at_most(
    read: Callable[[Any], Any], count: int, limit: Any, zero: Any, is_wanted: Any = None
) -> Any:
    """Counts which of `count` rising numbers are at most `limit`, by bisection.

    `limit` is a scalar, or a number for each thread, and `zero` a 0 of its kind. With `is_wanted`,
    the steps are a loop, of no turn if it is false.
    """
    steps = count.bit_length()

    def narrow(found: Any, step: Any) -> Any:
        if count + 1 == 1 << steps:  # no place lies past the end
            return jnp.where(read(found + (step - 1)) <= limit, found + step, found)
        after = found + step
        number = read(jnp.minimum(after, count) - 1)
        return jnp.where((after <= count) & (number <= limit), after, found)

    if is_wanted is not None:

        def turn(i: Any, found: Any) -> Any:
            return narrow(found, lax.shift_left(jnp.int32(1), steps - 1 - i))

        turns = jnp.where(is_wanted, jnp.int32(steps), jnp.int32(0))
        return lax.fori_loop(jnp.int32(0), turns, turn, zero)
    for i in reversed(range(steps)):
        zero = narrow(zero, 1 << i)
    return zero


def user_at(index: ir.Value, position: Integer, batch: int, users: int) -> Integer:
    """Loads the clamped user of the candidate at `position`; past the end, the last candidate's."""
    return clamped(load(index, position.at_most(batch - 1)), users)


def clamped(user: Integer, users: int) -> Integer:
    """Clamps a user to [0, U)."""
    return user.at_least(0).at_most(users - 1)


def end_of_run(cand_to_user: Any, first: Any, stop: Any, most: int, users: int) -> Any:
    """Finds the first candidate after `first`, or `stop`, that has another user than `first`.

    `cand_to_user` [B] int32 in device memory is clamped; `most` is the largest `stop` - `first`.
    """
    if mosaic.is_interpreted():
        user = jnp.clip(cand_to_user[first], 0, users - 1)

        def is_same(position: Any) -> Any:
            other = cand_to_user[jnp.minimum(position, cand_to_user.shape[0] - 1)]
            return (position < stop) & (jnp.clip(other, 0, users - 1) == user)

        return lax.while_loop(is_same, lambda position: position + 1, first)

    batch = cand_to_user.shape[0]

    @inline.code(cand_to_user, first, stop, returns=INTEGER)
    def found(index: ir.Value, begin: Integer, end: Integer) -> Integer:
        user, result = user_at(index, begin, batch, users), end
        first_lane = begin + lane()
        offsets = [inline.i32(offset) for offset in range(0, most, LANES)]
        # All loads are issued before the first one is waited for.
        others = [user_at(index, first_lane + x, batch, users) for x in offsets]
        for offset, other in zip(offsets, others, strict=True):
            differ = ballot(other.differs(user))
            found = begin + offset + lowest_bit(differ)
            is_found = differ.differs(0)
            result = is_found.select(result.at_most(found), result)
        return result

    return found
