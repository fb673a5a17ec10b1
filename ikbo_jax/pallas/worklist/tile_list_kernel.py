"""The list of tiles of jagged queries, computed by one small Mosaic GPU kernel.

`tile_list.query_tiles` describes the list.  XLA computes it in 6 to 24 kernels of about 2 us each,
as long as a launch on short sequences takes.  Here CTAs of 512 threads list the tiles of 128
segments each (`jagged_segments`).  Every CTA does the steps 1 to 4 for all segments, since that
takes less time than a second launch:

  1. It copies offsets and index to shared memory.
  2. It makes offsets rise: a thread takes the maximum of consecutive offsets, the threads exchange
     these, and a thread writes its running maxima.  That tells the longest sequence of keys.
  3. If sequences share keys by an index, it merges neighbours with the same keys into the first.
  4. It finds the positions of the CTA's segments' tiles by a counting sort (`tile_positions`).
  5. A thread describes some of the CTA's tiles.  Their segments are found by bisection.

The time, for n segments and 512 threads at 1.7 GHz, where a warp scheduler has 4 warps:

  - a launch, 2 us; a load of device memory 0.5 us for each 4,096 offsets, whose loads overlap;
  - 2 reads, a write and 10 other instructions for an offset in shared memory, and 60 instructions
    for a segment that is counted: 0.3 us for each 1,000 segments;
  - sums of bins, positions and tiles, with about 12 synchronisations, 1.2 us.

So 1,152 segments should take 4 us, 4,096 5 us and 20,000 12 us.

Synchronisations: `Threads.commit` between the parts, within the CTA.  CTAs do not wait for each
other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper.launch import Roles, launch
from ikbo_jax.pallas.hopper.per_thread import same
from ikbo_jax.pallas.worklist import tile_list, tile_positions
from ikbo_jax.pallas.worklist.jagged_segments import (
    Segment,
    SegmentContext,
    Shape,
    load,
    running_maxima,
)
from ikbo_jax.pallas.worklist.merged_segments import merge
from ikbo_jax.pallas.worklist.tile_list import TILE_WORDS, TileList
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import WARPGROUP_SIZE

#: Warpgroups of a CTA.
WARPGROUPS = 4
#: Most offsets and numbers of sequences together: 180 KB of shared memory.
MOST_WORDS = 46080
#: Most segments whose lists surely fit, and of sequences that are merged.
MOST_SEGMENTS, MOST_MERGED = MOST_WORDS // 2, MOST_WORDS // 3
#: Most CTAs of 128 segments; if there were more, a CTA has 256, so that an H100 holds all at once.
MOST_WORKERS = 132


class Operands(NamedTuple):
    """Device memory."""

    cu_seqlens_q: Any  # [batch + 1] int32, or None
    cu_seqlens_kv: Any  # [batch_kv + 1] int32
    q_to_kv: Any  # [batch] int32, or None


class Outputs(NamedTuple):
    """Device memory that a launch fills: the fields of a `TileList`."""

    words: Any
    counts: Any


class Shared(NamedTuple):
    """Shared memory, int32."""

    parts: Any  # [9 * warps]: exchanged between warps
    q_offsets: Any  # [segments + 1]: running maxima
    kv_offsets: Any  # [batch_kv + 1]: likewise
    kv_numbers: Any  # [segments]: sequences of keys; None without an index
    bins: Any  # see `tile_positions`
    own_bins: Any  # of the CTA's segments; the order of bins is the list's
    own_tiles: Any  # of the CTA's segments
    own_before: Any  # [threads]: parts of the tiles before a segment's in its bin
    own_firsts: Any  # positions of the first tiles of the CTA's segments
    own_ends: Any  # tiles of the CTA's segments up to and with each
    rest_ends: Any  # likewise of second parts


def store_words(
    ctx: SegmentContext,
    array: Any,
    place: jax.Array,
    words: tuple[jax.Array, ...],
    is_wanted: jax.Array,
) -> None:
    """Stores the first words of array[place] in device memory, for each thread that wants it."""
    if not ctx.interpret:
        for i, word in enumerate(words):
            ctx.threads.write(array, place * array.shape[1] + i, word, is_wanted)
        return

    @pl.loop(0, WARPGROUP_SIZE)
    def _(i: Any) -> None:
        @pl.when(is_wanted[i])
        def _() -> None:
            for w, word in enumerate(words):
                array[place[i], w] = word[i]


def _list_parts(ctx: SegmentContext, ends: Any, describe: Any) -> None:
    """Stores the tiles of all first parts or second parts of the CTA's segments.

    `describe` takes a number in the CTA, its segment, and the tile's number in it; it returns
    (position, the tile's words).
    """
    threads, own = ctx.threads, ends.shape[0]
    count, thread = ends[own - 1], threads.number()

    @pl.loop(0, (count + (threads.count - 1)) // threads.count)
    def _(turn: Any) -> None:
        tile = turn * threads.count + thread
        number, step = same(0), own // 2
        while step:  # `number` counts segments whose tiles all come before this one
            end = threads.read(ends, number + (step - 1))
            number = jnp.where(end <= tile, number + step, number)
            step //= 2
        begin = threads.read(ends, jnp.maximum(number - 1, 0))
        place = tile - jnp.where(number > 0, begin, 0)
        found = ctx.segment(ctx.worker * own + number)
        position, words = describe(number, found, place)
        store_words(ctx, ctx.outputs.words, position, words, tile < count)


def list_tiles(
    ctx: SegmentContext,
    longest: jax.Array,
    words_of: Callable[[jax.Array, Segment, jax.Array], tuple[jax.Array, ...]],
    zeros: int,
) -> None:
    """Stores the tiles of the CTA's segments and, by the first CTA, the counts.

    Args:
      longest: blocks of keys of the longest segment.
      words_of: takes segments' numbers, segments, and tiles' first rows in them; returns the words
        of tiles: first row read, first row written, rows, and others.
      zeros: how many others a tile of a second part has; they are 0.
    """
    shape, shared, threads, zero = ctx.shape, ctx.shared, ctx.threads, same(0)
    totals = tile_positions.position_tiles(ctx, longest)
    own = shared.own_bins.shape[0]

    def first_part(number: jax.Array, found: Segment, place: jax.Array) -> Any:
        position = threads.read(shared.own_firsts, number) + place
        return position, words_of(ctx.worker * own + number, found, place * shape.size)

    def second_part(number: jax.Array, found: Segment, place: jax.Array) -> Any:
        done = place * shape.size
        begin = threads.read(shared.rest_ends, jnp.maximum(number - 1, 0))
        before = place + jnp.where(number > 0, begin, 0)
        position = totals.first_parts + totals.rest_before + before
        row = found.rest_start + done
        rows = jnp.minimum(found.rest - done, shape.size)
        return position, (row, row, rows, *(zero,) * zeros)

    _list_parts(ctx, shared.own_ends, first_part)
    if shape.has_rest:
        _list_parts(ctx, shared.rest_ends, second_part)
    is_writer = threads.number() + ctx.worker == 0
    for i, total in enumerate((totals.keyed, totals.first_parts + totals.rest)):
        threads.write(ctx.outputs.counts, same(i), zero + total, is_writer)


def rows_of_tile(
    ctx: SegmentContext, found: Segment, done: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(first row read, first row written, rows) of a tile from a segment's row `done` on."""
    source = done if ctx.shape.is_broadcast else found.start + done
    return source, found.start + done, jnp.minimum(found.length - done, ctx.shape.size)


def _list_query_tiles(ctx: SegmentContext) -> None:
    """A warpgroup of the CTA."""
    load(ctx)
    longest = running_maxima(ctx)
    if ctx.shape.is_merged:
        merge(ctx)

    def words(_: jax.Array, found: Segment, done: jax.Array) -> tuple[jax.Array, ...]:
        return *rows_of_tile(ctx, found, done), found.kv_start, found.kv_length

    list_tiles(ctx, longest, words, 2)


def _shared(shape: Shape, operands: Operands) -> Shared:
    """The declaration of `Shared`."""
    threads = shape.warpgroups * WARPGROUP_SIZE
    own = WARPGROUP_SIZE
    if pl.cdiv(shape.segments, own) > MOST_WORKERS and shape.warpgroups > 1:
        own *= 2
    each = memory.Words((own,))
    return Shared(
        parts=memory.Words((9 * (threads // 32),)),
        q_offsets=None if shape.is_broadcast else memory.Words((shape.segments + 1,)),
        kv_offsets=memory.Words(operands.cu_seqlens_kv.shape),
        kv_numbers=None if operands.q_to_kv is None else memory.Words((shape.segments,)),
        bins=memory.Words((tile_positions.bin_words(shape),)),
        own_bins=each,
        own_tiles=each,
        own_before=memory.Words((threads,)),
        own_firsts=each,
        own_ends=each,
        rest_ends=each if shape.has_rest else None,
    )


# Host side


def query_tiles(
    cu_seqlens_q: jax.Array | None,
    cu_seqlens_kv: jax.Array,
    q_to_kv: jax.Array | None,
    *,
    q_rows: int,
    kv_rows: int,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    size: int,
    unit: int = 1,
    interpret: Any = False,
) -> TileList:
    """The list of `tile_list.query_tiles`, whose entries past the last tile are arbitrary.

    XLA computes the list if offsets and index have more than `MOST_WORDS` elements.

    Args:
      cu_seqlens_q: as for `tile_list.query_tiles`, like the arguments that follow.
      interpret: False, or `plgpu.InterpretGPUParams` to run on a CPU.
    """
    index = cu_seqlens_kv if q_to_kv is None else q_to_kv
    sequences = index.shape[0] - (q_to_kv is None)
    is_broadcast = cu_seqlens_q is None
    bounds = (q_rows, kv_rows, max_seqlen_q, max_seqlen_kv)
    is_merged = q_to_kv is not None and not is_broadcast
    shape = Shape(
        sequences, *bounds, size, unit, is_broadcast, is_merged, 1 if interpret else WARPGROUPS
    )
    operands = Operands(cu_seqlens_q, cu_seqlens_kv, q_to_kv)
    elements = sum(x.shape[0] for x in operands if x is not None)
    if elements > MOST_WORDS:
        return tile_list.query_tiles(
            cu_seqlens_q,
            cu_seqlens_kv,
            q_to_kv,
            q_rows=q_rows,
            kv_rows=kv_rows,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            size=size,
            unit=unit,
        )
    shared = _shared(shape, operands)
    outputs = Outputs(
        jax.ShapeDtypeStruct((shape.most, TILE_WORDS), jnp.int32),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    results = launch(
        Roles(
            lambda *arguments: SegmentContext(shape, None, *arguments),
            None,
            _list_query_tiles,
            warpgroups=shape.warpgroups,
        ),
        operands,
        outputs,
        shared,
        dtype=jnp.int32,
        name="ikbo_tile_list",
        workers=pl.cdiv(shape.segments, shared.own_ends.shape[0]),
        interpret=interpret,
    )
    return TileList(*results)
