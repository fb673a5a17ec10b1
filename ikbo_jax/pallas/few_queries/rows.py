"""Finds the rows of an item, by the table of users or by searches of the index.

A *row slot* stands for up to `item_rows` rows of one user. Row slot u < U has the first rows of
user u. Every row number that is a multiple of `item_rows` gives a further row slot to the user of
the row before. So no list of items is needed; row slots that a user does not need are empty. With a
table of users, further slots without rows come last (`packed_slot`). If all keys and values exceed
L2, CTAs go through both kinds of slots evenly instead (`firsts_before`).

The ranges that `candidates` finds hold every candidate exactly once even if the index is not
sorted. `search.end_of_run` finds where users differ within a range.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir

from ikbo_jax.pallas.few_queries import user_table
from ikbo_jax.pallas.few_queries.context import Context
from ikbo_jax.pallas.hopper import inline, mosaic
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.hopper.warps import LANES, ballot, from_lane, lane, lowest_bit, total
from ikbo_jax.pallas.worklist.search import count_at_most, end_of_run, user_at

#: Lanes that search for one bound, and candidates that each of them compares at once: 16,384
#: candidates take two rounds of loads, each of which takes 0.5 us or more.
HALF, EACH = 16, 8
#: Most candidates that a warp counts instead of searching: one round of loads, 16 of each lane.
MOST_COUNTED = 512


def candidates(cand_to_user: Any, user: Any, users: int) -> tuple[Any, Any]:
    """Searches `cand_to_user`, [B] int32 in device memory, for (first candidate, end) of a user.

    Up to `MOST_COUNTED` candidates, a warp loads all of them at once and counts those of lower
    users. Otherwise half a warp searches for each bound, 128 candidates at once.
    """
    batch = cand_to_user.shape[0]
    if mosaic.is_interpreted():

        def user_of(candidate: Any) -> Any:
            return jnp.clip(cand_to_user[candidate], 0, users - 1)

        below, of_user = (
            count_at_most(user_of, batch, last, jnp.int32(0)) for last in (user - 1, user)
        )
        return below, of_user

    if batch <= MOST_COUNTED:
        return _counts(cand_to_user, user, users)

    @inline.code(cand_to_user, user, returns=(inline.INTEGER,) * 2)
    def found(index: ir.Value, user: Integer) -> Any:
        thread_lane, low, step = lane(), inline.i32(0), 1
        half, part = thread_lane // HALF, thread_lane % HALF + 1
        bound = user + half
        while step * HALF * EACH < batch:
            step *= HALF * EACH
        while step:
            places = []
            for i in range(min(EACH, -(-batch // (HALF * step)))):
                places.append(low + (part + i * HALF) * step - 1)
            # All loads are issued before the first one is waited for.
            others = [user_at(index, place, batch, users) for place in places]
            passed = inline.i32(len(places) * HALF)
            for i, (place, other) in reversed(list(enumerate(zip(places, others, strict=True)))):
                not_below = ballot((place < batch) & (other < bound)) ^ -1
                of_half = (not_below >> half * HALF) & ((1 << HALF) - 1)
                first = lowest_bit(of_half) + i * HALF
                passed = of_half.differs(0).select(first, passed)
            low = low + passed * step
            step //= HALF * EACH
        low = low.at_most(batch)
        return from_lane(low, 0), from_lane(low, HALF)

    return found


def _counts(cand_to_user: Any, user: Any, users: int) -> tuple[Any, Any]:
    """Counts the candidates with users below `user`, and with users up to `user`."""
    batch = cand_to_user.shape[0]

    @inline.code(cand_to_user, user, returns=(inline.INTEGER,) * 2)
    def counted(index: ir.Value, user: Integer) -> Any:
        places = [lane() + i for i in range(0, batch, LANES)]
        # All loads are issued before the first one is waited for.
        others = [user_at(index, place, batch, users) for place in places]
        following = user + 1
        # Both counts in one word, so that the lanes add them at once.
        both = inline.i32(0)
        for i, (place, other) in enumerate(zip(places, others, strict=True)):
            for bound, shift in ((user, 0), (following, 16)):
                is_below = other < bound
                if (i + 1) * LANES > batch:
                    is_below = is_below & (place < batch)
                both = both + is_below.select(1 << shift, 0)
        both = total(both)
        return both & 0xFFFF, both >> 16

    return counted


class Extent(NamedTuple):
    """Rows [first, end) of a slot, empty if first ≥ end, and the user that most likely has them."""

    first: Any
    end: Any
    user: Any
    length: Any  # of that user: its load does not wait until the rows are found


def _user_at(ctx: Context, candidate: Any) -> Any:
    shape, index = ctx.shape, ctx.operands.cand_to_user
    if index is None:
        return jnp.int32(0)
    return jnp.clip(index[jnp.minimum(candidate, shape.batch - 1)], 0, shape.users - 1)


def _candidates(ctx: Context, user: Any) -> tuple[Any, Any]:
    shape, index = ctx.shape, ctx.operands.cand_to_user
    if index is None:
        return jnp.int32(0), jnp.int32(shape.batch)
    return candidates(index, user, shape.users)


def _owner(ctx: Context, candidate: Any) -> Any:
    """Finds the user whose range has a candidate, by bisection, in an index that is not sorted."""

    def halve(bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = bounds
        middle = lax.div(low + high, 2)
        is_low = _candidates(ctx, middle)[0] <= candidate
        return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

    bounds = (jnp.int32(0), jnp.int32(ctx.shape.users))
    return lax.while_loop(lambda bounds: bounds[1] - bounds[0] > 1, halve, bounds)[0]


def user_of_slot(ctx: Context, slot: Any) -> tuple[Any, Any]:
    """Returns (the candidate of an extra slot, the slot's user), if the index is sorted."""
    shape = ctx.shape
    if shape.listed:
        return None, ctx.listed_place(slot)[0]
    extra = slot - shape.users
    candidate = jnp.maximum(lax.div((extra + 1) * shape.item_rows - 1, shape.q_len), 0)
    return candidate, jnp.where(extra >= 0, _user_at(ctx, candidate), slot)


def length_of(ctx: Context, user: Any) -> Any:
    """Loads the number of keys of a user."""
    shape, lengths = ctx.shape, ctx.operands.lengths
    if lengths is None:
        return jnp.int32(shape.kv_len)
    return jnp.clip(lengths[user], 0, shape.kv_len)


def extent_of(ctx: Context, slot: Any) -> Extent:
    """Finds the rows of a slot, and the user that most likely has them."""
    if ctx.shape.table is None:
        return _searched_extent(ctx, slot)
    return lax.cond(
        user_table.is_sorted(ctx),
        functools.partial(_tabled_extent, ctx, slot),
        functools.partial(_searched_extent, ctx, slot),
    )


def _tabled_extent(ctx: Context, slot: Any) -> Extent:
    shape, has_rows = ctx.shape, None
    if shape.packs_slots:
        slot, has_rows = lax.cond(
            slot < shape.users,
            lambda: (slot, True),
            functools.partial(user_table.packed_slot, ctx, slot - shape.users),
        )
    user = user_table.user_of_slot(ctx, slot)
    length = jnp.int32(shape.kv_len)
    if ctx.operands.lengths is not None:
        length = user_table.length(ctx, user)
    extent = _of_user(ctx, slot, user_table.candidates(ctx, user), user, length)
    if has_rows is None:
        return extent
    return extent._replace(end=jnp.where(has_rows, extent.end, extent.first))


def _of_user(
    ctx: Context, slot: Any, candidates: tuple[Any, Any], user: Any, length: Any
) -> Extent:
    """Computes the rows of a slot of a user with these candidates, (first, end)."""
    shape = ctx.shape
    begin, end = (x * shape.q_len for x in candidates)
    further = 1 + slot - shape.users - lax.div(begin, shape.item_rows)
    tile = jnp.where(slot >= shape.users, further, 0)
    first = begin + tile * shape.item_rows
    return Extent(first, jnp.minimum(first + shape.item_rows, end), user, length)


def _searched_extent(ctx: Context, slot: Any) -> Extent:
    is_extra = slot >= ctx.shape.users
    candidate, user = user_of_slot(ctx, slot)
    length = length_of(ctx, user)
    begin, stop = _candidates(ctx, user)
    if ctx.operands.cand_to_user is not None:
        is_found = ~is_extra | ((begin <= candidate) & (candidate < stop))
        begin, stop = lax.cond(
            is_found, lambda: (begin, stop), lambda: _candidates(ctx, _owner(ctx, candidate))
        )
    return _of_user(ctx, slot, (begin, stop), user, length)


def run_of(ctx: Context, extent: Extent) -> tuple[Any, Any]:
    """Finds (user, end row) of the extent's first rows that have one user."""
    if ctx.operands.cand_to_user is None:
        return jnp.int32(0), extent.end
    if ctx.shape.table is None:
        return _searched_run(ctx, extent)
    return lax.cond(
        user_table.is_sorted(ctx),
        lambda: (extent.user, extent.end),
        functools.partial(_searched_run, ctx, extent),
    )


def _searched_run(ctx: Context, extent: Extent) -> tuple[Any, Any]:
    shape, most = ctx.shape, ctx.shape.item_rows // ctx.shape.q_len + 2
    candidate = jnp.minimum(lax.div(extent.first, shape.q_len), shape.batch - 1)
    last = lax.div(extent.end - 1, shape.q_len)
    stop = end_of_run(ctx.operands.cand_to_user, candidate, last + 1, most, shape.users)
    return _user_at(ctx, candidate), jnp.minimum(stop * shape.q_len, extent.end)
