"""Lists tiles of jagged queries by one small Mosaic GPU kernel.

`by_xla` describes the list, for which XLA takes 6 to 24 kernels of 2 us each. Here CTAs of 512
threads list the tiles of 32 to 256 segments each (`segments`). Every CTA does the steps 1 to 4 for
all segments, which takes less time than a second launch:

  1. It copies offsets and index to shared memory.
  2. It makes offsets rise: a thread takes the maximum of consecutive offsets, the threads exchange
  the maxima, and a thread writes its running maxima.
  3. If sequences share keys by an index, it merges neighbours with the same keys into the first.
  4. It finds the positions of the CTA's segments' tiles by a counting sort (`positions`).
  5. A thread describes some of the CTA's tiles. Their segments are found by bisection.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper import inline, per_thread
from ikbo_jax.pallas.hopper.launch import launch_threads
from ikbo_jax.pallas.hopper.per_thread import same
from ikbo_jax.pallas.worklist import by_xla, positions
from ikbo_jax.pallas.worklist.lists import TILE_WORDS, Arrays, Offsets, TileList
from ikbo_jax.pallas.worklist.search import count_at_most
from ikbo_jax.pallas.worklist.segments import (
    Segment,
    SegmentContext,
    Shape,
    load,
    merge,
    running_maxima,
)
from ikbo_jax.problems import memory
from ikbo_jax.problems.attention_tile_cost import MOST_LISTED_WORDS
from ikbo_jax.problems.hopper import WARPGROUP_SIZE

#: Segments of a CTA: as few as `MOST_WORKERS` CTAs allow, which an H100 holds at once.
FEWEST, MOST_OWN, MOST_WORKERS = 32, 256, 132


def store_words(
    ctx: SegmentContext,
    array: Any,
    place: jax.Array,
    words: tuple[jax.Array, ...],
    is_wanted: jax.Array,
) -> None:
    """Stores array[place] in device memory, for each thread that wants it.

    Words past the given ones are arbitrary.
    """
    if not ctx.interpret:
        rows = array.shape[1]
        width = math.gcd(rows, per_thread.VECTOR)
        words = (*words, *words[-1:] * (-len(words) % width))

        @inline.code(array, place, is_wanted.astype(jnp.int32), *words)
        def _(array: Any, place: Any, is_wanted: Any, *words: Any) -> None:
            address = inline.address(array, per_thread.scalar(place) * rows)
            wanted = per_thread.scalar(is_wanted).differs(0)
            stored = list(map(per_thread.scalar, words))
            for i in range(0, len(words), width):
                per_thread.store_words(address, stored[i : i + width], wanted, 4 * i)

        return

    @per_thread.in_turn(is_wanted)
    def _(i: Any) -> None:
        for w, word in enumerate(words):
            array[place[i], w] = word[i]


def _list_parts(ctx: SegmentContext, array: Any, ends: Any, describe: Any) -> None:
    """Stores the tiles of all first parts or second parts of the CTA's segments.

    `describe(number in the CTA, segment, tile's number in it)` returns (position, words).
    """
    threads, own = ctx.threads, ends.shape[0]
    count, thread = ends[own - 1], threads.number()

    @pl.loop(0, (count + (threads.count - 1)) // threads.count)
    def _(turn: Any) -> None:
        tile = turn * threads.count + thread

        @pl.when(per_thread.any_of_warp(tile < count))
        def _() -> None:
            # Segments whose tiles all come before this one.
            number = count_at_most(lambda x: threads.read(ends, x), own - 1, tile, same(0))
            begin = threads.read(ends, jnp.maximum(number - 1, 0))
            place = tile - jnp.where(number > 0, begin, 0)
            found = ctx.segment(ctx.worker * own + number)
            position, words = describe(number, found, place)
            store_words(ctx, array, position, words, tile < count)


def list_tiles(
    ctx: SegmentContext,
    outputs: TileList,
    longest: jax.Array,
    words_of: Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, ...]],
) -> None:
    """Stores the tiles of the CTA's segments and, by the first CTA, the counts.

    `words_of` takes segments' numbers, segments, and tiles' first rows in the segments; it returns
    the words of tiles. Words of tiles of second parts are 0 after the number of rows.
    """
    shape, shared, threads, zero = ctx.shape, ctx.shared, ctx.threads, same(0)
    keyed, first_parts, rest_before, rest = positions.position_tiles(ctx, longest)
    own = shared.own_bins.shape[0]

    def first_part(number: jax.Array, found: Segment, place: jax.Array) -> Any:
        position = threads.read(shared.own_firsts, number) + place
        return position, words_of(ctx.worker * own + number, found, place * shape.size)

    def second_part(number: jax.Array, found: Segment, place: jax.Array) -> Any:
        done = place * shape.size
        begin = threads.read(shared.rest_ends, jnp.maximum(number - 1, 0))
        before = place + jnp.where(number > 0, begin, 0)
        position = first_parts + rest_before + before
        row = found.rest_start + done
        rows = jnp.minimum(found.rest - done, shape.size)
        return position, (row, row, rows, *(zero,) * (outputs.words.shape[1] - 3))

    _list_parts(ctx, outputs.words, shared.own_ends, first_part)
    if shape.has_rest:
        _list_parts(ctx, outputs.words, shared.rest_ends, second_part)
    is_writer = threads.number() + ctx.worker == 0
    for i, total in enumerate((keyed, first_parts + rest)):
        threads.write(outputs.counts, same(i), zero + total, is_writer)


def rows_of_tile(
    ctx: SegmentContext, found: Segment, done: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (first row read, first row written, rows) of the tile from row `done` on."""
    source = done if ctx.shape.is_broadcast else found.start + done
    return source, found.start + done, jnp.minimum(found.length - done, ctx.shape.size)


def _list_query_tiles(ctx: SegmentContext) -> None:
    load(ctx)
    (longest,) = running_maxima(ctx, ctx.shape)
    if ctx.shape.is_merged:
        merge(ctx)

    def words(_: jax.Array, found: Segment, done: jax.Array) -> tuple[jax.Array, ...]:
        return *rows_of_tile(ctx, found, done), found.kv_start, found.kv_length

    list_tiles(ctx, ctx.outputs, longest, words)


def shared_words(shapes: tuple[Shape, ...], arrays: Arrays, own: int, exchanged: int) -> Any:
    """Declares shared memory, int32, for CTAs of `own` segments; warps exchange `exchanged` words.

    What the lists of a gradient's tiles, or of masked tiles, have besides is None here.
    """
    queries, warps = shapes[0], shapes[0].warpgroups * per_thread.WARPS
    each = memory.Words((own,))
    return memory.shared(
        parts=memory.Words((exchanged * warps,)),  # exchanged between warps
        # Running maxima.
        q_offsets=None if queries.is_broadcast else memory.Words((queries.segments + 1,)),
        kv_offsets=memory.Words((arrays.cu_seqlens_kv.shape[0] + 2 * queries.kv_first,)),
        # Sequences of keys.
        kv_numbers=None if arrays.q_to_kv is None else memory.Words((queries.segments,)),
        bins=memory.Words((max(map(positions.bin_words, shapes)),)),  # see `positions`
        bins_before=memory.Words((max(map(positions.words, shapes)),)),  # of CTAs before
        own_bins=each,  # of the CTA's segments; the order of bins is the list's
        own_tiles=each,  # numbers of tiles of the CTA's segments
        own_firsts=each,  # sums: positions of the first tiles of the CTA's segments
        own_ends=each,  # tiles of the CTA's segments up to and with each
        rest_ends=each if any(x.has_rest for x in shapes) else None,  # of second parts
        begins=None,  # [keys + 1]: ranges of lower numbers of keys
        key_blocks=None,  # [keys of all copies]: blocks of queries
        statistics=None,  # [segments of queries]: blocks of statistics before
        tile_ends=None,  # tiles up to and with each segment; all first parts come first
        targets=None,  # [batch]
        contextual=None,  # [batch]
    )


def own_segments(shapes: tuple[Shape, ...]) -> int:
    """Returns how many segments a CTA lists: few, as an H100 holds `MOST_WORKERS` CTAs."""
    own = WARPGROUP_SIZE if shapes[0].warpgroups == 1 else FEWEST
    while own < MOST_OWN and sum(pl.cdiv(x.segments, own) for x in shapes) > MOST_WORKERS:
        own *= 2
    return own


# Host side


def launch_list(
    list_all: Callable[[Any], None],
    shape: Shape,
    operands: Arrays,
    words: int,
    name: str,
    context: type[SegmentContext] = SegmentContext,
    **further: Any,
) -> TileList:
    """Launches `list_all`, which lists tiles of `words` words; `further` is shared memory."""
    own = own_segments((shape,))
    shared = shared_words((shape,), operands, own, 9)._replace(**further)
    declared: Any = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((shape.most, words), (2,)))
    found: TileList = launch_threads(
        list_all,
        shape,
        operands,
        TileList(*declared),
        shared,
        name=name,
        workers=pl.cdiv(shape.segments, own),
        warpgroups=shape.warpgroups,
        context=context,
    )
    return found


def query_tiles(offsets: Offsets, *, size: int, unit: int = 1) -> TileList:
    """Lists tiles of at most `size` rows, by blocks of `unit` keys; entries past the last are
    arbitrary.

    XLA computes the list if offsets and index have more than `MOST_LISTED_WORDS` elements.
    """
    operands = offsets.arrays
    if sum(x.shape[0] for x in operands if x is not None) > MOST_LISTED_WORDS:
        return by_xla.query_tiles(offsets, size=size, unit=unit)
    shape = Shape.of(offsets, size, unit)
    return launch_list(_list_query_tiles, shape, operands, TILE_WORDS, "ikbo_tile_list")
