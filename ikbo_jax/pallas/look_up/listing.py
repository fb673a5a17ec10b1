"""Lists of candidates of a few users, which each CTA makes for itself from the index.

A CTA lists the candidates of some consecutive users in one part of the index. Each thread loads the
users of some candidates of the part. Then a warp

  1. lists those of its candidates that belong to the CTA's users, and counts them by user,
  2. sorts its list by user. A user's candidates are in the order of the warps.

If the CTA has one user, step 2 is left out: the list is the lists of the warps, one after another.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.hopper import inline, mosaic, per_thread, warps
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.pallas.hopper.per_thread import LANES, Threads, array, divided, same, scalar
from ikbo_jax.pallas.worklist import scan
from ikbo_jax.problems.hopper import WARPGROUP_SIZE

#: Bits of a candidate in a listed word, and their mask.
_BITS, _LOW = 16, 2**16 - 1


class Listed(NamedTuple):
    """Holds a list in the order of users: words of a user and a candidate, from the CTA's first."""

    threads: Threads
    words: Any
    has_users: bool  # whether words hold users
    users: tuple[Any, Any]  # the CTA's first user, and the end
    first: Any  # candidate of the CTA's part
    count: Any  # candidates

    def candidate(self, place: jax.Array) -> jax.Array:
        """Loads the candidate at a place; past the end, the last one, whose row is in L1."""
        return (self._word(place) & _LOW) + self.first

    def user(self, place: jax.Array) -> jax.Array:
        """Loads the user of the candidate at a place."""
        if not self.has_users:
            return same(0) + self.users[0]
        return lax.shift_right_logical(self._word(place), same(_BITS)) + self.users[0]

    def _word(self, place: jax.Array) -> jax.Array:
        return self.threads.read(self.words, jnp.clip(place, 0, jnp.maximum(self.count, 1) - 1))


#: Candidates of a thread: number in the part, user's number in the run, and whether it is there.
_Found = list[tuple[jax.Array, jax.Array, jax.Array]]


def list_users(ctx: WarpgroupContext, threads: Threads, piece: Any, part: Any) -> Listed:
    """Lists the candidates that part `part` has of the users of run `piece`."""
    shape, shared = ctx.shape, ctx.shared
    has_users = shape.listed_users > 1
    first, begin = piece * shape.listed_users, part * shape.most_listed
    end = jnp.minimum(first + shape.listed_users, shape.users)
    after = jnp.minimum(begin + shape.most_listed, shape.batch)
    numbers = [
        threads.number() + i * threads.count
        for i in range(pl.cdiv(shape.most_listed, threads.count))
    ]
    last = same(shape.batch - 1)
    loaded = [
        threads.read(ctx.operands.user, jnp.minimum(x + begin, last), "global") for x in numbers
    ]
    found = []
    for number, user in zip(numbers, loaded, strict=True):
        user = jnp.clip(user, 0, shape.users - 1) - first
        is_own = (user >= 0) & (user < end - first) & (number < after - begin)
        found.append((number, user, is_own))
    count = (_list_several if has_users else _list_one)(ctx, threads, found)
    words = shared.by_user if has_users else shared.listed
    return Listed(threads, words, has_users, (first, end), begin, count)


def _list_one(ctx: WarpgroupContext, threads: Threads, found: _Found) -> Any:
    """Lists the candidates of the only user; returns their number."""
    shared = ctx.shared
    count = functools.reduce(jnp.add, [is_own.astype(jnp.int32) for *_, is_own in found])
    (place,) = threads.sums_before([count], shared.totals)
    for number, _, is_own in found:
        threads.keep(shared.listed, place, number, is_own)
        place = place + is_own.astype(jnp.int32)
    is_last = threads.number() == threads.count - 1
    threads.keep(shared.totals, same(threads.warps), place, is_last)
    threads.commit()
    return shared.totals[threads.warps]


def _list_several(ctx: WarpgroupContext, threads: Threads, found: _Found) -> Any:
    """Lists each warp's candidates (step 1), and sorts them (step 2); returns their number."""
    shared = ctx.shared
    scan.clear(threads, shared.counts)  # while the index is on its way
    threads.commit()
    warp = lax.div(threads.number(), same(LANES))
    begin, count = warp * (len(found) * LANES), same(0)
    for number, user, is_own in found:
        before, total = _rank_in_warp(same(0), is_own, 1)
        word = number + user * (1 << _BITS)
        threads.keep(shared.listed, begin + count + before, word, is_own)
        threads.add(shared.counts, user * threads.warps + warp, same(1), is_own)
        count = count + total
    threads.commit()
    return _sort(ctx, threads, begin, count)


def _sort(ctx: WarpgroupContext, threads: Threads, begins: jax.Array, count: jax.Array) -> Any:
    """Sorts each warp's list, of `count` from `begins` on, by user; returns the number of all."""
    shape, shared, counts = ctx.shape, ctx.shared, ctx.shared.counts
    most = shape.listed_users * threads.warps
    warp, lane = divided(threads.number(), LANES)

    def read(places: list[jax.Array]) -> list[tuple[jax.Array]]:
        return [(threads.read(counts, x),) for x in places]

    def store(place: jax.Array, before: Any, number: Any) -> None:
        threads.keep(counts, place, before[0], place >= 0)
        threads.keep(shared.totals, same(threads.warps), before[0] + number[0], place == most - 1)

    scan.running_sums(threads, most, read, store, shared.totals)
    threads.commit()

    def one_turn(turn: Any) -> Any:
        place = lane + turn * LANES
        is_listed = place < count
        word = threads.read(shared.listed, jnp.minimum(begins + place, shared.listed.shape[0] - 1))
        number = lax.shift_right_logical(jnp.where(is_listed, word, same(0)), same(_BITS))
        begin = threads.read(counts, number * threads.warps + warp)
        mosaic.synchronise_warp()
        before, total = _rank_in_warp(number, is_listed, shape.listed_users)
        threads.keep(shared.by_user, begin + before, word, is_listed)
        is_last = is_listed & (before == total - 1)
        threads.keep(counts, number * threads.warps + warp, begin + total, is_last)
        mosaic.synchronise_warp()
        return turn + 1

    def has_more(turn: Any) -> Any:
        return per_thread.any_of_warp(lane + turn * LANES < count)

    lax.while_loop(has_more, one_turn, jnp.int32(0))
    threads.commit()
    return shared.totals[threads.warps]


def _rank_in_warp(
    values: jax.Array, is_wanted: jax.Array, limit: int
) -> tuple[jax.Array, jax.Array]:
    """Counts lower, and all, wanted lanes of the warp with the same value in [0, limit)."""
    if mosaic.is_interpreted():
        lane = jnp.arange(WARPGROUP_SIZE, dtype=jnp.int32)
        is_same = (values[None] == values[:, None]) & is_wanted[None]
        is_same &= lane[None] // LANES == lane[:, None] // LANES
        before = jnp.sum(is_same & (lane[None] < lane[:, None]), axis=1, dtype=jnp.int32)
        return before, jnp.sum(is_same, axis=1, dtype=jnp.int32)

    @inline.code(values, is_wanted.astype(jnp.int32), returns=(per_thread.INT32,) * 2)
    def ranks(values: mgpu.FragmentedArray, wanted: mgpu.FragmentedArray) -> Any:
        def lanes_with(bits: Integer) -> tuple[Integer, Integer]:
            is_set = bits.differs(0)
            return is_set, warps.ballot(is_set)

        _, lanes = lanes_with(scalar(wanted))
        for bit in range((limit - 1).bit_length()):
            is_set, found = lanes_with(scalar(values) & (1 << bit))
            lanes = lanes & is_set.select(found, found ^ -1)
        lower = Integer(arith.shli(inline.i32(1), warps.lane())) - 1
        return array(warps.ones(lanes & lower), values), array(warps.ones(lanes), values)

    return ranks
