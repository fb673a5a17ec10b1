"""What a CTA of the kernel for segment sums owns: users, and their candidates.

Either a CTA lists the candidates of one user, or it searches for its part of the candidates in the
order of users; see `sums`. A *place* is a candidate's number in that order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper import per_thread
from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.pallas.hopper.per_thread import LANES, Threads, same
from ikbo_jax.pallas.look_up import gather
from ikbo_jax.pallas.worklist import scan

#: Candidates that a thread reads at once in a search.
_SAMPLES = 4
#: Bits of a candidate in a listed word, and their mask.
_BITS, _LOW = 16, 2**16 - 1


@dataclasses.dataclass(frozen=True)
class Shape(gather.Shape):
    """Adds to a lookup's shape how sums divide over CTAs.

    Attributes:
      numbers: numbers of a vector.
      chunks: chunks of columns.
      slices: CTAs of a chunk, or groups of `parts` CTAs.
      listed_users: users whose candidates a CTA lists; 0: it does not list.
      parts: parts of the candidates, which have CTAs of their own.
    """

    numbers: int
    chunks: int
    slices: int
    listed_users: int = 0
    parts: int = 1

    @property
    def columns(self) -> int:
        """Number of vectors of a chunk."""
        return pl.cdiv(self.vectors, self.chunks)

    @property
    def each(self) -> int:
        """Number of a CTA's entries, which are candidates and users' ends."""
        return pl.cdiv(self.batch + self.users, self.slices)

    @property
    def most_listed(self) -> int:
        """Largest number of candidates that a CTA lists."""
        return pl.cdiv(self.batch, self.parts)

    @property
    def most_users(self) -> int:
        """Largest number of users of a CTA."""
        return self.listed_users or min(self.users, self.each + 1)


class Operands(NamedTuple):
    """Holds device memory that the launch reads."""

    values: Any  # [B, width]
    user: Any  # [B] int32, of each candidate in the order of users; if CTAs list, as they come
    order: Any  # [B] int32, the number of each candidate in that order; None: sorted, or listed


class Shared(NamedTuple):
    """Holds shared memory."""

    sums: Any  # [numbers, threads] f32
    links: Any  # [threads]
    totals: Any  # of the searches
    has_any: Any  # [most_users]: 1 for a user with candidates
    listed: Any  # [most_listed]: the candidates of the CTA's users; None if CTAs do not list
    by_user: Any  # [most_listed]: the same in the order of users; None if CTAs list one user
    counts: Any  # [listed_users * warps]: places in `by_user`
    partial: Any  # [listed_users * columns * numbers] f32: sums of the CTA's part of candidates


class Listed(NamedTuple):
    """Holds what a CTA lists: words that hold a user and a candidate, both relative."""

    words: Any
    user: Any
    candidate: Any


class Part(NamedTuple):
    """Holds a thread's part of the CTA's work."""

    ctx: WarpgroupContext
    threads: Threads
    lane: Any
    vector: Any  # of a row
    is_used: Any  # whether the thread has a lane and a vector
    is_first: Any  # whether the vector is the chunk's first one
    listed: Listed | None  # None: the CTA does not list
    first_row: Any  # of the result
    number: Any  # of the CTA in the cluster that shares
    ctas: int  # of such a cluster

    @property
    def lanes(self) -> int:
        return self.threads.count // self.ctx.shape.columns

    def candidate(self, place: jax.Array) -> jax.Array:
        """Loads the candidate at a place in the order of users."""
        order = self.ctx.operands.order
        last = self.ctx.shape.batch - 1
        if self.listed is not None:
            # Past the end, the list may hold anything.
            return jnp.clip((self._word(place) & _LOW) + self.listed.candidate, 0, last)
        place = jnp.clip(place, 0, last)
        return place if order is None else self.threads.read(order, place, "global")

    def user(self, place: jax.Array) -> jax.Array:
        """Loads the user of the candidate at a place in the order of users."""
        if self.listed is not None:
            if self.ctx.shape.listed_users == 1:
                return same(0) + self.listed.user
            return lax.shift_right_logical(self._word(place), same(_BITS)) + self.listed.user
        place = jnp.clip(place, 0, self.ctx.shape.batch - 1)
        user = self.threads.read(self.ctx.operands.user, place, "global")
        return jnp.clip(user, 0, self.ctx.shape.users - 1)

    def _word(self, place: jax.Array) -> jax.Array:
        place = jnp.clip(place, 0, self.ctx.shape.most_listed - 1)
        return self.threads.read(self.listed.words, place)


class Own(NamedTuple):
    """Holds the range of users that a CTA owns, and the range of their candidates' places."""

    first: Any
    end: Any
    begin: Any
    after: Any


def list_users(
    ctx: WarpgroupContext, threads: Threads, piece: Any, part: Any, *, counts_lower: bool = False
) -> tuple[Listed, Own]:
    """Lists in shared memory a part of the candidates of a few users, in the order of users.

    With `counts_lower`, `totals[warps + 1]` becomes the number of candidates of lower users.
    """
    shape, shared = ctx.shape, ctx.shared
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
    users = [jnp.clip(x, 0, shape.users - 1) - first for x in loaded]
    is_own = [
        (x >= 0) & (x < end - first) & (number < after - begin)
        for number, x in zip(numbers, users, strict=True)
    ]
    count = functools.reduce(jnp.add, [x.astype(jnp.int32) for x in is_own])
    lower = [
        ((x < 0) & (number < after - begin)).astype(jnp.int32)
        for number, x in zip(numbers, users, strict=True)
    ]
    counted = [count, functools.reduce(jnp.add, lower)] if counts_lower else [count]
    place, *before = threads.sums_before(counted, shared.totals)
    for number, user, wanted in zip(numbers, users, is_own, strict=True):
        word = number + user * (1 << _BITS) if shape.listed_users > 1 else number
        threads.keep(shared.listed, place, word, wanted)
        place = place + wanted.astype(jnp.int32)
    is_last = threads.number() == threads.count - 1
    at = len(counted) * threads.warps
    threads.keep(shared.totals, same(at), place, is_last)
    if counts_lower:
        threads.keep(shared.totals, same(at + 1), before[0] + counted[1], is_last)
    words = shared.listed
    if shape.listed_users > 1:
        scan.clear(threads, shared.counts)
    threads.commit()
    total = shared.totals[at]
    if shape.listed_users > 1:
        words = shared.by_user
        _sort(ctx, threads, total, at + 2)
    return Listed(words, first, begin), Own(first, end, jnp.int32(0), total)


def unpack(listed: Listed, threads: Threads, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Loads the user and the candidate at a place of the list."""
    word = threads.read(listed.words, place)
    user = lax.shift_right_logical(word, same(_BITS)) + listed.user
    return user, (word & _LOW) + listed.candidate


def _sort(ctx: WarpgroupContext, threads: Threads, total: Any, at: int) -> None:
    """Sorts the listed candidates by user; each warp has places of its own for a user.

    `counts` becomes the end of each user's and warp's places. `at` is for the sums in `totals`.
    """
    shape, shared = ctx.shape, ctx.shared
    thread, counts = threads.number(), shared.counts
    warp = lax.div(thread, same(LANES))
    turns = lax.div(total + (threads.count - 1), jnp.int32(threads.count))

    def load(turn: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        place = thread + turn * threads.count
        word = threads.read(shared.listed, jnp.minimum(place, shape.most_listed - 1))
        is_listed = place < total
        user = jnp.where(is_listed, lax.shift_right_logical(word, same(_BITS)), same(0))
        return word, user, is_listed

    @pl.loop(0, turns)
    def _(turn: Any) -> None:
        _, user, is_listed = load(turn)
        threads.add(counts, user * threads.warps + warp, same(1), is_listed)

    def read(places: list[jax.Array]) -> list[tuple[jax.Array]]:
        last = same(counts.shape[0] - 1)
        found = [threads.read(counts, jnp.minimum(x, last)) for x in places]
        return [
            (jnp.where(place <= last, x, same(0)),) for place, x in zip(places, found, strict=True)
        ]

    def store(place: jax.Array, before: Any, _: Any) -> None:
        threads.keep(counts, place, before[0], place < counts.shape[0])

    threads.commit()
    scan.running_sums(threads, counts.shape[0], read, store, shared.totals, at)
    threads.commit()

    @pl.loop(0, turns)
    def _(turn: Any) -> None:
        word, user, is_listed = load(turn)
        begin = threads.read(counts, user * threads.warps + warp)
        before, is_last = per_thread.rank_in_warp(
            user, is_listed, shape.listed_users, interpret=ctx.interpret
        )
        threads.keep(shared.by_user, begin + before, word, is_listed)
        end = begin + before + 1
        threads.keep(counts, user * threads.warps + warp, end, is_listed & is_last)

    threads.commit()


def find_own(part: Part, piece: Any) -> Own:
    """Finds what the CTA owns."""
    shape = part.ctx.shape
    limits = [jnp.minimum((piece + i) * shape.each, shape.batch + shape.users) for i in range(2)]
    places = _search(part, [lambda place, x=x: part.user(place) + place < x for x in limits], 0)
    users = [limit - place for limit, place in zip(limits, places, strict=True)]
    # A user may have candidates before the CTA's part: an earlier CTA owns that user. The user's
    # last one is near, unless there are very many.
    is_before = [lambda place, x=x: part.user(place) <= x for x in users]
    level, window = levels(shape.batch, part.threads.count), _SAMPLES * part.threads.count
    counts = _counts(part, is_before, places, 1, level)
    ends = lax.cond(
        (counts[0] == window) | (counts[1] == window),
        lambda: _search(part, is_before, level + 1),
        lambda: [place + count for place, count in zip(places, counts, strict=True)],
    )
    found = []
    for user, place, end in zip(users, places, ends, strict=True):
        before = part.ctx.operands.user[jnp.maximum(place - 1, 0)]
        is_earlier = (place > 0) & (jnp.clip(before, 0, shape.users - 1) == user)
        found.append(
            (
                jnp.clip(user + is_earlier.astype(jnp.int32), 0, shape.users),
                jnp.where(is_earlier, end, place),
            )
        )
    (first, begin), (end, after) = found
    # Where an index is not sorted as promised, a search may find anything.
    return Own(first, jnp.minimum(end, first + shape.most_users), begin, after)


def _search(part: Part, conditions: list[Any], level: int) -> list[Any]:
    """Counts the places that satisfy each of two conditions, which hold for the first places alone.

    All threads search together. `level` is the number of `_counts` that came before.
    """
    found: list[Any] = [jnp.int32(0), jnp.int32(0)]
    unknown = part.ctx.shape.batch
    while unknown:
        stride = pl.cdiv(unknown, _SAMPLES * part.threads.count)
        counts = _counts(part, conditions, found, stride, level)
        found = [x + y * stride for x, y in zip(found, counts, strict=True)]
        unknown, level = stride - 1, level + 1
    return found


def _counts(
    part: Part, conditions: list[Any], bases: list[Any], stride: int, level: int
) -> list[Any]:
    """Counts, for two conditions, the places that satisfy them: every `stride`-th from a base."""
    threads, last = part.threads, part.ctx.shape.batch - 1
    counts = []
    for holds, base in zip(conditions, bases, strict=True):
        numbers = [threads.number() + i * threads.count for i in range(_SAMPLES)]
        places = [(x + 1) * stride + (base - 1) for x in numbers]
        count = [((x <= last) & holds(x)).astype(jnp.int32) for x in places]
        counts.append(functools.reduce(jnp.add, count))
    both = threads.total(
        counts[0] + counts[1] * (1 << 16), part.ctx.shared.totals, level * threads.warps
    )
    upper = lax.shift_right_logical(both, jnp.int32(16))
    return [both - upper * (1 << 16), upper]


def levels(count: int, threads: int) -> int:
    """Counts the levels of a search among `count` places."""
    levels = 0
    while count:
        count, levels = pl.cdiv(count, _SAMPLES * threads) - 1, levels + 1
    return levels
