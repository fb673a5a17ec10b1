"""What a CTA of the kernel for segment sums owns: users, and their candidates.

Either a CTA lists the candidates of a few users, see `listing`, or it searches for its part of the
candidates in the order of users; see `sums`. A *place* is a candidate's number in that order.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.pallas.hopper.per_thread import Threads
from ikbo_jax.pallas.look_up import gather
from ikbo_jax.pallas.look_up.listing import Listed

#: Candidates that a thread reads at once in a search.
_SAMPLES = 4
#: Most rounds of a search among 2^31 candidates.
LEVELS = 4


@dataclasses.dataclass(frozen=True)
class Shape(gather.Shape):
    """Adds to a lookup's shape how sums divide over CTAs.

    Attributes:
      numbers: numbers of a vector.
      slices: CTAs of a chunk of columns and a part of the candidates.
      listed_users: users whose candidates a CTA lists; 0: it does not list.
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
        """Largest number of candidates of a part."""
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
    # Of the launch that adds up shares, whose candidates are CTAs:
    helpers: Any = None  # [B] int32, the number of CTAs of the long user that begins; or 0
    sums: Any = None  # [U, width], a reference


class Part(NamedTuple):
    """Holds a thread's part of the CTA's work."""

    ctx: WarpgroupContext
    threads: Threads
    lane: Any
    vector: Any  # of a row
    is_used: Any  # whether the thread has a lane and a vector
    is_first: Any  # whether the vector is the chunk's first one
    first_row: Any  # of the CTA's part of the result
    listed: Listed | None  # None: the CTA does not list

    @property
    def lanes(self) -> int:
        return self.threads.count // self.ctx.shape.columns

    def candidate(self, place: jax.Array) -> jax.Array:
        """Loads the candidate at a place in the order of users."""
        order = self.ctx.operands.order
        last = self.ctx.shape.batch - 1
        if self.listed is not None:
            return jnp.clip(self.listed.candidate(place), 0, last)
        place = jnp.clip(place, 0, last)
        return place if order is None else self.threads.read(order, place, "global")

    def user(self, place: jax.Array) -> jax.Array:
        """Loads the user of the candidate at a place in the order of users."""
        if self.listed is not None:
            return self.listed.user(place)
        place = jnp.clip(place, 0, self.ctx.shape.batch - 1)
        user = self.threads.read(self.ctx.operands.user, place, "global")
        return jnp.clip(user, 0, self.ctx.shape.users - 1)


class Own(NamedTuple):
    """Holds the range of users that a CTA owns, and the range of their candidates' places.

    `is_filled`: it owns none, and its part is filled by candidates of the user before `first`.
    """

    first: Any
    end: Any
    begin: Any
    after: Any
    is_filled: Any = False


def find_own(part: Part, piece: Any) -> Own:
    """Finds what the CTA owns."""
    shape = part.ctx.shape
    if part.listed is not None:
        return Own(*part.listed.users, jnp.int32(0), part.listed.count)
    limits = [jnp.minimum((piece + i) * shape.each, shape.batch + shape.users) for i in range(2)]
    thread = part.threads.number()
    is_before = [lambda place, x=x: part.user(place) + place < x for x in limits]
    places = _search(part, is_before, 0, thread)
    users = [limit - place for limit, place in zip(limits, places, strict=True)]
    # A user may have candidates before the CTA's part: an earlier CTA owns that user. The last one
    # is in the CTA's part, or the user fills it.
    is_before = [lambda place, x=x: part.user(place) <= x for x in users]
    ends = _search(part, is_before, 1, thread, places, shape.each)
    last = shape.batch - 1

    def has(place: Any, user: Any) -> Any:
        """Whether the candidate at a place is the user's."""
        found = part.ctx.operands.user[jnp.clip(place, 0, last)]
        return (place >= 0) & (place <= last) & (jnp.clip(found, 0, shape.users - 1) == user)

    found, fills = [], []
    for user, place, end in zip(users, places, ends, strict=True):
        is_earlier = has(place - 1, user)
        # All entries from the limit to the next one are candidates of a user who began before.
        fills.append(is_earlier & has(place + (shape.each - 1), user))
        found.append(
            (
                jnp.clip(user + is_earlier.astype(jnp.int32), 0, shape.users),
                jnp.where(is_earlier, end, place),
            )
        )
    (first, begin), (end, after) = found
    # The last user is left to the CTAs whose parts it fills.
    is_left = fills[1] & ~fills[0]
    end = jnp.where(is_left, users[1], end)
    after = lax.cond(is_left, lambda: places_of(part, users[1], 2)[0], lambda: jnp.int32(after))
    # Where an index is not sorted as promised, a search may find anything.
    return Own(first, jnp.minimum(end, first + shape.most_users), begin, after, fills[0])


def places_of(part: Part, user: Any, search: int = 0) -> list[Any]:
    """Finds the first place of a user's candidates, and the one after the last."""
    is_before = [lambda place: part.user(place) < user, lambda place: part.user(place) <= user]
    # Otherwise, addresses that the search before computes as well stay in 16 registers.
    zero = mosaic.opaque(jnp.int32(0))
    return _search(part, is_before, search, part.threads.number() + zero)


def _search(
    part: Part,
    conditions: list[Any],
    search: int,
    thread: Any,
    bases: Sequence[Any] = (0, 0),
    unknown: int = 0,
) -> list[Any]:
    """Finds the ends of the places from two bases on that satisfy a condition each.

    All threads search together. Only the first `unknown` places after a base may satisfy its
    condition; 0: all. `search` numbers the CTA's searches; `thread` is the thread's number.
    """
    found, level = [jnp.int32(x) for x in bases], search * LEVELS
    threads, batch = part.threads, part.ctx.shape.batch
    unknown = unknown or batch
    while unknown:
        # Counts the places that satisfy a condition: every `stride`-th from a base.
        stride = pl.cdiv(unknown, _SAMPLES * threads.count)
        counts = []
        for holds, base in zip(conditions, found, strict=True):
            numbers = [thread + i * threads.count for i in range(_SAMPLES)]
            places = [(x + 1) * stride + (base - 1) for x in numbers]
            count = [((x <= batch - 1) & holds(x)).astype(jnp.int32) for x in places]
            counts.append(functools.reduce(jnp.add, count))
        packed = counts[0] + counts[1] * (1 << 16)
        both = threads.total(packed, part.ctx.shared.totals, level * threads.warps)
        upper = lax.shift_right_logical(both, jnp.int32(16))
        lower = both - upper * (1 << 16)
        found = [x + y * stride for x, y in zip(found, (lower, upper), strict=True)]
        unknown, level = stride - 1, level + 1
    return found
