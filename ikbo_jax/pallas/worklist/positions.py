"""Finds the positions of segments' tiles in the list by a counting sort.

Segments are ordered by groups of keys (`Shape.keys_per_group`, `early_keys`), in a group by falling
numbers of blocks of keys, and by their own number; segments without keys are the last. A *bin*
holds the tiles of a group's segments with equally many blocks. A segment's first tile comes after
the tiles of bins before, of its bin's segments of CTAs before, and of those of its own CTA that
precede it.

Every CTA describes all segments once: it adds their tiles to the bins, whose running sums give the
first of the three, and the tiles of segments before its own to other bins, which hold the second.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper.per_thread import Threads, cdiv, divided, same
from ikbo_jax.pallas.worklist.scan import padded, sum_up
from ikbo_jax.pallas.worklist.segments import Segment, SegmentContext, Shape

#: Most bins: 7 words of a thread. If there are more ranks, neighbouring ranks share a bin; the
#: order of tiles only affects speed.
MOST_BINS = 7 * 512 - 1
#: Up to this number of words, bins have copies, for different lanes: additions to one word by lanes
#: of a warp take place one after another, and short sequences all have one block.
COPIED = 2048
MOST_COPIES = 16
#: Segments of a thread in one turn of a loop, whose loads are in flight together.
UNROLL = 4


def most_bins(shape: Shape) -> int:
    """Returns the number of bins: one for each rank (`_bin_of`), at most `MOST_BINS`."""
    return min(shape.groups * shape.most_blocks + 1, MOST_BINS)


def most_copies(shape: Shape) -> int:
    """Returns the number of copies of a bin; 1 under interpretation."""
    return MOST_COPIES if shape.warpgroups > 1 else 1


def words(shape: Shape) -> int:
    """Returns how many words the bins and their copies have."""
    return max(most_bins(shape), COPIED) if most_copies(shape) > 1 else most_bins(shape)


class Bins(NamedTuple):
    """Parameters that map ranks to bins, and bins to words; scalars."""

    shift: Any  # 2^shift ranks share a bin; None: every rank has a bin
    last: Any  # bin of rank 0
    copies: Any
    longest: Any  # blocks of the longest segment


def _bins(shape: Shape, longest: jax.Array) -> Bins:
    """Chooses bins for segments of at most `longest` blocks."""
    bins, shift, highest = most_bins(shape), None, longest
    if shape.groups > 1:
        highest = longest * shape.groups
    last, most = highest, shape.groups * shape.most_blocks
    if most >= bins:
        shift, steps = jnp.int32(0), 0
        while most > (bins - 1) << steps:
            shift += (highest > (bins - 1) << steps).astype(jnp.int32)
            steps += 1
        last = (highest + ((1 << shift) - 1)) >> shift
    copies = jnp.int32(1)
    for _ in range(most_copies(shape).bit_length() - 1):
        copies = jnp.where((last + 1) * copies * 2 <= COPIED, copies * 2, copies)
    return Bins(shift, last, copies, longest)


def _bin_of(shape: Shape, bins: Bins, found: Segment) -> jax.Array:
    """Returns the bins of segments, in the order of the list; the last has rank 0 alone.

    A rank is the number of blocks, plus `bins.longest` for each later group; 0 without keys.
    """
    rank = cdiv(found.kv_length, shape.unit)
    if shape.groups > 1:
        after = (shape.groups - 1) - lax.div(found.kv_start, same(shape.keys_per_group or 1))
        if shape.early_keys is not None:
            is_early = found.kv_length > shape.early_keys
            after = jnp.where(is_early, same(shape.groups - 1), after)
        rank = jnp.where(rank > 0, rank + after * bins.longest, 0)
    if bins.shift is not None:
        rank = (rank + ((1 << bins.shift) - 1)) >> bins.shift
    return bins.last - rank


def _add(ctx: SegmentContext, bins: Bins) -> tuple[jax.Array, jax.Array]:
    """Adds each segment's tiles to its bin; stores bin and tiles of the CTA's own segments.

    Returns the numbers of tiles of second parts: of the CTAs before, and of all CTAs.
    """
    shape, shared, threads = ctx.shape, ctx.shared, ctx.threads
    own = shared.own_bins.shape[0]
    begin = ctx.worker * own
    turns, numbers = threads.rounds(shape.segments, unroll=UNROLL)
    lane = threads.number() & (bins.copies - 1)

    def turn(i: Any, rest: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        for x, found in [(x, ctx.segment(x)) for x in numbers(i)]:
            tiles, bin_ = cdiv(found.length, shape.size), _bin_of(shape, bins, found)
            place, is_before, number = bin_ * bins.copies + lane, x < begin, x - begin
            threads.add(shared.bins, place, tiles, tiles > 0)
            threads.add(shared.bins_before, place, tiles, is_before & (tiles > 0))
            stored = [(shared.own_bins, bin_), (shared.own_tiles, tiles)]
            if shape.has_rest:
                rests = cdiv(found.rest, shape.size)
                stored.append((shared.rest_ends, rests))
                rest = rest[0] + jnp.where(is_before, rests, 0), rest[1] + rests
            for ref, value in stored:
                threads.keep(ref, number, value, (number >= 0) & (number < own))
        return rest

    return lax.fori_loop(0, turns, turn, (same(0), same(0)))


def _bin_before(ctx: SegmentContext, bins: Bins, bin_: jax.Array, part: Any, parts: int) -> Any:
    """Adds up some copies of a bin of the tiles of CTAs before."""
    value = same(0)
    places = [part + i * parts for i in range(pl.cdiv(most_copies(ctx.shape), parts))]
    copies = [jnp.minimum(x, bins.copies - 1) for x in places]
    found = [ctx.threads.read(ctx.shared.bins_before, bin_ * bins.copies + x) for x in copies]
    for x, tiles in zip(places, found, strict=True):
        value = value + jnp.where(x < bins.copies, tiles, 0)
    return value


def _own_before(
    ctx: SegmentContext, number: jax.Array, bin_: jax.Array, part: Any, parts: int
) -> jax.Array:
    """Counts the tiles of the same bin in some preceding segments of the CTA."""
    shared, read = ctx.shared, ctx.threads.read
    each = shared.own_bins.shape[0] // parts
    unroll = min(each, 8)

    def turn(i: Any, sums: jax.Array) -> jax.Array:
        places = [part * each + (i * unroll + x) for x in range(unroll)]
        found = [
            (read(shared.own_bins, same(0) + x), read(shared.own_tiles, same(0) + x), x)
            for x in places
        ]
        for other, tiles, x in found:
            sums = sums + jnp.where((other == bin_) & (number > x), tiles, 0)
        return sums

    return lax.fori_loop(0, each // unroll, turn, same(0))


def position_tiles(ctx: SegmentContext, longest: jax.Array) -> tuple[Any, Any, Any, Any]:
    """Fills `own_firsts`, `own_ends` and `rest_ends` of shared memory; synchronises the threads.

    Returns how many tiles have keys, and are of first parts, of second parts of CTAs before, and of
    all second parts: scalars.
    """
    shape, shared, threads = ctx.shape, ctx.shared, ctx.threads
    own = shared.own_bins.shape[0]
    # Several threads share the work on a segment.
    (part, number), parts = divided(threads.number(), own), threads.count // own
    is_first = threads.number() < own
    bins = _bins(shape, longest)
    rest = _add(ctx, bins)
    threads.commit()
    bin_, tiles = (threads.read(x, number) for x in (shared.own_bins, shared.own_tiles))
    before = _bin_before(ctx, bins, bin_, part, parts) + _own_before(ctx, number, bin_, part, parts)
    threads.add(shared.own_firsts, number, before, before > 0)
    values = [jnp.where(is_first, tiles, 0)]
    if shape.has_rest:
        values.append(jnp.where(is_first, threads.read(shared.rest_ends, number), 0))
    count, at = words(shape) + 1, 4 * threads.warps
    sums = sum_up(threads, shared.bins, count, None, shared.parts, at, others=values)
    ends = [shared.own_ends, shared.rest_ends]
    for ref, x, value in zip(ends, sums, values, strict=False):
        threads.keep(ref, number, x + value, is_first)
    threads.commit()
    first = threads.read(shared.bins, bin_ * bins.copies)
    threads.add(shared.own_firsts, number, first, is_first)
    keyed, every = shared.bins[bins.last * bins.copies], shared.bins[words(shape)]
    if not shape.has_rest:
        threads.commit()
        return keyed, every, jnp.int32(0), jnp.int32(0)
    before, rests = (
        threads.total(x, shared.parts, (7 + i) * threads.warps) for i, x in enumerate(rest)
    )
    return keyed, every, before, rests


def bin_words(shape: Shape) -> int:
    """Returns the words of shared memory of the bins and their sum, rounded up to all threads."""
    threads = Threads(shape.warpgroups, 0)
    return padded(threads, words(shape) + 1)
