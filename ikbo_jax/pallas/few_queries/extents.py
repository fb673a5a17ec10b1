"""The rows of a row slot: by the table of users, or by a search of the index (`rows`)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ikbo_jax.pallas.few_queries import rows, user_table
from ikbo_jax.pallas.few_queries.context import Context, Place
from ikbo_jax.pallas.worklist import search


class Extent(NamedTuple):
    """Rows [first, end) of a slot, empty if first ≥ end, and the user that most likely has them."""

    first: Any
    end: Any
    user: Any
    length: Any  # of that user: its load does not wait until the rows are found


def _user_at(ctx: Context, candidate: Any) -> Any:
    """The user, clamped, of a candidate."""
    shape, index = ctx.shape, ctx.operands.cand_to_user
    if index is None:
        return jnp.int32(0)
    return jnp.clip(index[jnp.minimum(candidate, shape.batch - 1)], 0, shape.users - 1)


def _candidates(ctx: Context, user: Any) -> tuple[Any, Any]:
    shape, index = ctx.shape, ctx.operands.cand_to_user
    if index is None:
        return jnp.int32(0), jnp.int32(shape.batch)
    return rows.candidates(index, user, shape.users, interpret=ctx.interpret)


def _owner(ctx: Context, candidate: Any) -> Any:
    """The user whose range has a candidate, in an index that is not sorted: the slow way."""

    def halve(bounds: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = bounds
        middle = lax.div(low + high, 2)
        is_low = _candidates(ctx, middle)[0] <= candidate
        return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

    bounds = (jnp.int32(0), jnp.int32(ctx.shape.users))
    return lax.while_loop(lambda bounds: bounds[1] - bounds[0] > 1, halve, bounds)[0]


def user_of_slot(ctx: Context, slot: Any) -> tuple[Any, Any]:
    """(the candidate that an extra slot belongs to, the slot's user), if the index is sorted."""
    shape = ctx.shape
    if shape.listed:
        return None, ctx.listed_place(Place(slot, None, None, None))[0]
    extra = slot - shape.users
    candidate = jnp.maximum(lax.div((extra + 1) * shape.item_rows - 1, shape.q_len), 0)
    return candidate, jnp.where(extra >= 0, _user_at(ctx, candidate), slot)


def length_of(ctx: Context, user: Any) -> Any:
    """Number of keys of a user."""
    shape, lengths = ctx.shape, ctx.operands.lengths
    if lengths is None:
        return jnp.int32(shape.kv_len)
    return jnp.clip(lengths[user], 0, shape.kv_len)


def extent_of(ctx: Context, slot: Any) -> Extent:
    """The rows of a slot, and the user that most likely has them."""
    if ctx.shape.table is None:
        return _searched_extent(ctx, slot)
    extent: Extent = lax.cond(
        user_table.is_sorted(ctx),
        functools.partial(_tabled_extent, ctx, slot),
        functools.partial(_searched_extent, ctx, slot),
    )
    return extent


def _tabled_extent(ctx: Context, slot: Any) -> Extent:
    """`extent_of` by the table."""
    shape = ctx.shape
    user = user_table.user_of_slot(ctx, slot)
    length = jnp.int32(shape.kv_len)
    if ctx.operands.lengths is not None:
        length = user_table.length(ctx, user)
    return _of_user(ctx, slot, user_table.candidates(ctx, user), user, length)


def _of_user(
    ctx: Context, slot: Any, candidates: tuple[Any, Any], user: Any, length: Any
) -> Extent:
    """The rows of a slot of a user with these candidates, (first, end)."""
    shape = ctx.shape
    begin, end = (x * shape.q_len for x in candidates)
    further = 1 + slot - shape.users - lax.div(begin, shape.item_rows)
    tile = jnp.where(slot >= shape.users, further, 0)
    first = begin + tile * shape.item_rows
    return Extent(first, jnp.minimum(first + shape.item_rows, end), user, length)


def _searched_extent(ctx: Context, slot: Any) -> Extent:
    """`extent_of` by a search of the index."""
    is_extra = slot >= ctx.shape.users
    candidate, user = user_of_slot(ctx, slot)
    length = length_of(ctx, user)
    begin, stop = _candidates(ctx, user)
    if ctx.operands.cand_to_user is not None:
        is_found = ~is_extra | ((begin <= candidate) & (candidate < stop))
        begin, stop = lax.cond(
            is_found,
            lambda: (begin, stop),
            lambda: _candidates(ctx, _owner(ctx, candidate)),
        )
    return _of_user(ctx, slot, (begin, stop), user, length)


def run_of(ctx: Context, extent: Extent) -> tuple[Any, Any]:
    """(user, end row) of the rows from the extent's first on that have the same user."""
    if ctx.operands.cand_to_user is None:
        return jnp.int32(0), extent.end
    if ctx.shape.table is None:
        return _searched_run(ctx, extent.first, extent.end)
    run: tuple[Any, Any] = lax.cond(
        user_table.is_sorted(ctx),
        lambda: (extent.user, extent.end),
        functools.partial(_searched_run, ctx, extent.first, extent.end),
    )
    return run


def _searched_run(ctx: Context, first: Any, end: Any) -> tuple[Any, Any]:
    shape, index = ctx.shape, ctx.operands.cand_to_user
    candidate = jnp.minimum(lax.div(first, shape.q_len), shape.batch - 1)
    stop = search.end_of_run(
        index,
        candidate,
        lax.div(end - 1, shape.q_len) + 1,
        shape.item_rows // shape.q_len + 2,
        shape.users,
        interpret=ctx.interpret,
    )
    return _user_at(ctx, candidate), jnp.minimum(stop * shape.q_len, end)
