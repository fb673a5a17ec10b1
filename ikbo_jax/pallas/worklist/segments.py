"""Segments of jagged queries, in the kernel that lists tiles: offsets, and one segment's rows.

A *segment* is the rows between two neighbouring offsets; rows before the first offset and after the
last have no keys. Rows past a bound of the lengths are a segment's second part.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.pallas.hopper.per_thread import Threads, cdiv, same, select
from ikbo_jax.pallas.worklist.lists import Offsets
from ikbo_jax.pallas.worklist.scan import clear, fold
from ikbo_jax.reference import jagged

#: Warpgroups of a CTA that lists tiles.
WARPGROUPS = 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static description of a launch; `Offsets` describes the other attributes.

    Attributes:
      size: largest number of rows of a tile.
      unit: keys of a block: segments with equally many blocks stay in order.
      is_merged: whether neighbours that share keys are one segment.
      kv_first: position of the first offset of keys in shared memory: 1 if 0 and `kv_rows` surround
        the offsets of keys, as 0 and `q_rows` surround the offsets of queries.
      keys_per_group: tiles whose keys begin in lower groups of keys come first; None: one group.
      early_keys: tiles with more keys come before all groups; None: no tile does.
    """

    sequences: int
    q_rows: int
    kv_rows: int
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    size: int
    unit: int
    is_broadcast: bool
    is_merged: bool
    warpgroups: int
    kv_first: int = 0
    keys_per_group: int | None = None
    early_keys: int | None = None

    @classmethod
    def of(cls, offsets: Offsets, size: int, unit: int, **further: Any) -> Self:
        """Describes a list of tiles of queries; `further` attributes replace those of `tiles`."""
        kinds: dict[str, Any] = {
            "is_broadcast": offsets.is_broadcast,
            "is_merged": offsets.q_to_kv is not None and not offsets.is_broadcast,
            "warpgroups": 1 if mosaic.is_interpreted() else WARPGROUPS,
        }
        return cls(offsets.sequences, *offsets.sizes, size, unit, **(kinds | further))

    @property
    def segments(self) -> int:
        return self.sequences if self.is_broadcast else self.sequences + 2

    @property
    def has_rest(self) -> bool:
        """Whether segments have second parts."""
        return self.max_seqlen_q is not None and not self.is_broadcast

    @property
    def most(self) -> int:
        """Largest number of tiles of any offsets."""
        if self.is_broadcast:
            return max(self.sequences * pl.cdiv(self.q_rows, self.size), 1)
        parts = self.segments * (1 if self.max_seqlen_q is None else 2)
        return max(jagged.most_tiles(parts, self.q_rows, self.size), 1)

    @property
    def most_blocks(self) -> int:
        """Largest number of blocks of keys of any segment."""
        longest = self.kv_rows if self.max_seqlen_kv is None else self.max_seqlen_kv
        return pl.cdiv(min(longest, self.kv_rows), self.unit)

    @property
    def groups(self) -> int:
        """Number of groups of keys."""
        return max(pl.cdiv(self.kv_rows, self.keys_per_group or self.kv_rows or 1), 1)


class SegmentContext(WarpgroupContext):
    """The context of a warpgroup of the launch."""

    @property
    def threads(self) -> Threads:
        return Threads(self.shape.warpgroups, self.consumer)

    def segment(self, index: jax.Array) -> Segment:
        """Describes the segments with these numbers; segments past the last one are empty."""
        shape, shared, read, zero = self.shape, self.shared, self.threads.read, same(0)
        exists, last = index < shape.segments, shape.segments - 1
        if shape.is_broadcast:
            number = index = jnp.minimum(index, last)
            found = Rows(exists, index * shape.q_rows, same(shape.q_rows), zero, zero)
            if self.operands.q_to_kv is not None:
                number = read(shared.kv_numbers, index)
        else:
            found, index = rows(self, shared.q_offsets, index), jnp.minimum(index, last)
            number = jnp.clip(index - 1, 0, max(shape.sequences - 1, 0))
            if shape.is_merged:
                number, merged = _merged(self, index, found.start, found.length)
                merged = jnp.where(found.is_sequence, merged, found.length)
                found = found._replace(length=merged)
            elif self.operands.q_to_kv is not None:
                number = read(shared.kv_numbers, jnp.clip(index, 1, max(shape.sequences, 1)))
        place = number + shape.kv_first
        kv_start = read(shared.kv_offsets, place)
        kv_length = read(shared.kv_offsets, place + 1) - kv_start
        if shape.max_seqlen_kv is not None:
            kv_length = jnp.minimum(kv_length, shape.max_seqlen_kv)
        has_keys = found.is_sequence
        return Segment(
            found.start,
            jnp.where(exists, found.length, 0),
            found.rest,
            found.rest_start,
            jnp.where(has_keys, kv_start, 0),
            jnp.where(has_keys, kv_length, 0),
            jnp.where(has_keys, number, -1),
        )


class Segment(NamedTuple):
    """Segments, one for each thread."""

    start: jax.Array
    length: jax.Array
    rest: jax.Array  # rows past the bound
    rest_start: jax.Array
    kv_start: jax.Array
    kv_length: jax.Array
    kv_number: jax.Array  # sequence of keys; -1 if the segment's rows belong to no sequence


def load(ctx: SegmentContext, further: Sequence[tuple[Any, ...]] = ()) -> None:
    """Copies offsets and index to shared memory, limited to their ranges; zeroes bins, if any.

    `further` copies are (array, shared memory, first place there, largest value).
    """
    shape, shared, operands, threads = ctx.shape, ctx.shared, ctx.operands, ctx.threads
    copies = [(operands.cu_seqlens_kv, shared.kv_offsets, shape.kv_first, shape.kv_rows)]
    first = 0 if shape.is_broadcast else 1
    surrounded = [(shared.kv_offsets, shape.kv_rows)] * shape.kv_first
    if not shape.is_broadcast:
        copies.append((operands.cu_seqlens_q, shared.q_offsets, first, shape.q_rows))
        surrounded.append((shared.q_offsets, shape.q_rows))
    for ref, rows in surrounded:
        thread = threads.number()
        ends = select(thread == 0, 0, rows)
        where = select(thread == 0, 0, ref.shape[0] - 1)
        threads.keep(ref, where, ends, thread < 2)
    if operands.q_to_kv is not None:
        last = max(operands.cu_seqlens_kv.shape[0] - 2, 0)
        copies.append((operands.q_to_kv, shared.kv_numbers, first, last))
    copies += further
    rounds, numbers = threads.rounds(max(source.shape[0] for source, *_ in copies))

    @pl.loop(0, rounds)
    def _(turn: Any) -> None:
        places = numbers(turn)
        found = [
            threads.read(source, jnp.minimum(x, source.shape[0] - 1), "global")
            for source, *_ in copies
            for x in places
        ]
        if shared.bins is not None:

            @pl.when(turn == 0)
            def _() -> None:  # while the loads are in flight
                for ref in (shared.bins, shared.bins_before, shared.own_firsts):
                    clear(threads, ref)

        for i, (source, target, at, largest) in enumerate(copies):
            for x, value in zip(places, found[i * len(places) :], strict=False):
                value = jnp.clip(value, 0, largest)
                threads.keep(target, x + at, value, x < source.shape[0])

    threads.commit()


def running_maxima(ctx: SegmentContext, *shapes: Shape) -> list[jax.Array]:
    """Makes offsets in shared memory rise; returns the most blocks of any sequence, scalars.

    Tiles of the first of the `shapes` take keys, those of a second one queries.
    """
    threads, found = ctx.threads, []
    for i, (shape, longest) in enumerate(zip(shapes, rise(ctx), strict=False)):
        if shape.max_seqlen_kv is not None:
            longest = jnp.minimum(longest, shape.max_seqlen_kv)
        at = (2 + i) * threads.warps
        found.append(threads.largest(cdiv(longest, shape.unit), ctx.shared.parts, at))
    return found


def rise(ctx: SegmentContext) -> list[jax.Array]:
    """Makes offsets in shared memory rise; returns each thread's longest sequence of keys, and of
    queries unless they are broadcast.
    """
    shape, shared, threads = ctx.shape, ctx.shared, ctx.threads
    arrays = [(shared.kv_offsets, shape.kv_first, ctx.operands.cu_seqlens_kv.shape[0])]
    if not shape.is_broadcast:
        arrays.append((shared.q_offsets, 1, ctx.operands.cu_seqlens_q.shape[0]))
    largest = [_largest(threads, *array) for array in arrays]
    before = threads.maxima_before(largest, shared.parts)
    return [
        _keep_maxima(threads, *array, jnp.maximum(most, 0))
        for array, most in zip(arrays, before, strict=True)
    ]


def _largest(threads: Threads, ref: Any, at: int, count: int) -> jax.Array:
    """Finds the largest of each thread's numbers; a place past the end has the last number."""

    def read(places: list[jax.Array]) -> list[jax.Array]:
        places = [jnp.minimum(x, count - 1) for x in places]
        return [threads.read(ref, x + at) for x in places]

    return fold(threads, count, read, lambda _, value, most: jnp.maximum(most, value), same(0))


def _keep_maxima(threads: Threads, ref: Any, at: int, count: int, before: jax.Array) -> jax.Array:
    """Replaces a thread's numbers by running maxima; returns their largest step.

    The first number is its own maximum, so no thread writes it, and places past the end read it.
    """

    def read(places: list[jax.Array]) -> list[jax.Array]:
        return [threads.read(ref, jnp.where(x < count, x, 0) + at) for x in places]

    def keep(place: jax.Array, value: jax.Array, carry: tuple[jax.Array, jax.Array]) -> Any:
        most, longest = carry
        after = jnp.maximum(most, value)
        is_length = (place > 0) & (place < count)
        threads.keep(ref, place + at, after, is_length)
        return after, jnp.where(is_length, jnp.maximum(longest, after - most), longest)

    return fold(threads, count, read, keep, (before, same(0)))[1]


class Rows(NamedTuple):
    """Rows of segments of jagged sequences, one segment for each thread."""

    is_sequence: jax.Array
    start: jax.Array
    length: jax.Array
    rest: jax.Array
    rest_start: jax.Array


def rows(ctx: SegmentContext, offsets: Any, index: jax.Array) -> Rows:
    """Finds the rows of segments; 0 and the number of rows surround the offsets."""
    shape, read = ctx.shape, ctx.threads.read
    exists, index = index < shape.segments, jnp.minimum(index, shape.segments - 1)
    start, end = read(offsets, index), read(offsets, index + 1)
    length, rest = end - start, same(0)
    is_sequence = exists & (index > 0) & (index <= shape.sequences)
    if shape.max_seqlen_q is not None:
        whole = length
        limit = select(is_sequence, shape.max_seqlen_q, shape.q_rows)
        length = jnp.minimum(whole, limit)
        rest = jnp.where(exists, whole - length, 0)
    return Rows(is_sequence, start, length, rest, end - rest)


def _merged(
    ctx: SegmentContext, index: jax.Array, start: jax.Array, length: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Reads the sequences of keys and the numbers of rows of segments that `merge` marked."""
    shape, numbers, read = ctx.shape, ctx.shared.kv_numbers, ctx.threads.read
    last = max(shape.sequences, 1)
    own = read(numbers, jnp.clip(index, 1, last))
    following = read(numbers, jnp.clip(index + 1, 1, last))
    is_group = (following < 0) & (index < shape.sequences)
    rows = jnp.where(is_group, -1 - following - start, length)
    return jnp.maximum(own, 0), select(own < 0, 0, rows)


def merge(ctx: SegmentContext) -> None:
    """Marks in `shared.kv_numbers` the segments that are merged into the segment before.

    A segment is merged if it has the same keys as the segment before, and no row lies between the
    two. Its number becomes -1 - e, where e is the row at which its group ends.

    A thread has consecutive segments, from the last one down. A later thread tells the end of a
    group that reaches its segments. Ends rise, so the next end is the least.
    """
    shape, shared, threads = ctx.shape, ctx.shared, ctx.threads
    turns, step, each = threads.parts(shape.segments)
    first = (threads.count - 1 - threads.number()) * each
    last = max(shape.sequences, 1)

    def number(index: jax.Array) -> jax.Array:
        return threads.read(shared.kv_numbers, jnp.clip(index, 1, last))

    def starts(index: jax.Array) -> jax.Array:
        return threads.read(shared.q_offsets, jnp.clip(index, 0, shape.segments))

    def end(start: jax.Array, following: jax.Array) -> jax.Array:
        """Returns the end of a segment's rows that have keys."""
        if shape.max_seqlen_q is None:
            return following
        return jnp.minimum(following, start + shape.max_seqlen_q)

    def is_merged(index: jax.Array, numbers: tuple[Any, Any], rows: tuple[Any, Any]) -> jax.Array:
        """Compares the segment before with this one: their numbers, and their first rows."""
        found = (index > 1) & (index <= shape.sequences) & (numbers[0] == numbers[1])
        return found & (end(*rows) == rows[1]) if shape.max_seqlen_q is not None else found

    def visit(read_number: Any, mark: Any, turn: Any, carry: tuple[Any, ...]) -> Any:
        """Visits segments; the carry is (group's end, whether the group ends here, number)."""
        group, is_end, own = carry
        top = first + (each - 1 - turn * step)
        numbers = [read_number(top - i - 1) for i in range(step)]  # of the segments before
        rows = [starts(top - i + 1) for i in range(step + 2)]
        for i, index in enumerate([top - i for i in range(step)]):
            before, (following, start, previous) = numbers[i], rows[i : i + 3]
            group = jnp.where(is_end > 0, end(start, following), group)
            merged = is_merged(index, (before, own), (previous, start))
            mark(index, merged, group)
            is_end, own = select(merged, 0, 1), before
        return group, is_end, own

    # Read the neighbours of a thread's segments before threads change numbers.
    above = first + each
    is_open = is_merged(
        above, (number(above - 1), number(above)), (starts(above - 1), starts(above))
    )
    carry = (same(-1), select(is_open, 0, 1), number(above - 1))
    below = number(first - 1)

    ends = functools.partial(visit, number, lambda *_: None)
    open_end, _, _ = lax.fori_loop(0, turns, ends, carry)
    found = select(open_end < 0, -(2**31 - 1), -open_end)
    (later,) = threads.maxima_before([found], shared.parts, 3 * threads.warps)

    def mark(index: jax.Array, merged: jax.Array, group: jax.Array) -> None:
        threads.keep(shared.kv_numbers, index, -1 - group, merged)

    def own_number(index: jax.Array) -> jax.Array:
        return jnp.where(index < first, below, number(index))

    keep = functools.partial(visit, own_number, mark)
    # -later would overflow where no group ends later; no group is open there.
    lax.fori_loop(0, turns, keep, (-jnp.maximum(later, -(2**31 - 1)), *carry[1:]))
    threads.commit()
