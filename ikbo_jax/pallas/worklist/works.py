"""Lists tiles and ranges of both backward kernels by one Mosaic GPU kernel.

XLA would take 15 to 25 kernels of about 2 us each. The first CTAs list tiles of queries, and the
others tiles of keys, as `tiles` lists tiles for the forward kernel. In addition:

  - *Ranges.* A CTA describes the sequences among its segments. The kernel for queries streams keys,
  so the CTAs for keys write its ranges, and the reverse.
  - *Sequences that share keys* (`q_to_kv`). Ranges of queries are sorted by their keys: a range
  comes after those of lower numbers of keys, of earlier CTAs, and of earlier sequences of its CTA.
  - *Statistics* of a softmax. Running sums of the sequences' blocks say where a sequence's
  statistics begin. Another list says which queries each block of statistics has.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper.launch import launch_threads
from ikbo_jax.pallas.hopper.per_thread import Threads, cdiv, same, select
from ikbo_jax.pallas.worklist import by_xla, lists, tiles
from ikbo_jax.pallas.worklist.lists import Arrays, Offsets, TileList, Work, Works, WorkSettings
from ikbo_jax.pallas.worklist.scan import clear, padded, sum_up
from ikbo_jax.pallas.worklist.search import count_at_most
from ikbo_jax.pallas.worklist.segments import (
    Segment,
    SegmentContext,
    Shape,
    load,
    rows,
    running_maxima,
)
from ikbo_jax.pallas.worklist.tiles import list_tiles, rows_of_tile, store_words
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import TILE_ROWS
from ikbo_jax.reference import jagged

#: Most words of shared memory: 211 KB, and at most 1 KB for the alignment of each array.
MOST_WORDS = 54000
#: Words of a block of statistics: `lists.Works` describes them.
BLOCK_WORDS = 4
#: Sequences of a thread in one turn of a loop, whose loads are in flight together.
UNROLL = 4


@dataclasses.dataclass(frozen=True)
class KeyShape(Shape):
    """The shape of the list of keys: what `Shape` calls queries are keys here, and the reverse.

    Attributes:
      streamed_rows: queries of each sequence if they are broadcast, or None.
      most_shared: blocks of queries of any key-value sequence if sequences share keys, or None.
      parts: copies of the keys, where every n-th sequence of queries belongs to part n. `sequences`
        counts one copy's sequences, and `q_rows` the rows of all copies.
    """

    group: int = 1
    streamed_rows: int | None = None
    most_shared: int | None = None
    parts: int = 1

    @property
    def segments(self) -> int:
        return self.parts * (self.sequences + 2)

    @property
    def most_blocks(self) -> int:
        if self.most_shared is not None:
            return self.most_shared
        if self.streamed_rows is not None:
            return pl.cdiv(self.streamed_rows, self.unit)
        return super().most_blocks


class Launch(NamedTuple):
    """Static description of the launch."""

    queries: Shape
    keys: KeyShape
    has_statistics: bool
    query_workers: int  # CTAs that list queries

    @property
    def first(self) -> int:
        """The number of the first sequence's segment; segment 0 may be the rows before it."""
        return 0 if self.queries.is_broadcast else 1

    @property
    def end(self) -> int:
        return self.first + self.queries.sequences


class KeyContext(SegmentContext):
    """The context of a warpgroup that lists tiles of keys."""

    def segment(self, index: jax.Array) -> Segment:
        """Describes segments of keys; `kv_length` counts queries, in whole blocks if shared."""
        shape, shared, read = self.shape, self.shared, self.threads.read
        part, local = same(0), index
        if shape.parts > 1:
            each = same(shape.sequences + 2)
            part, local = lax.div(index, each), lax.rem(index, each)
        found = rows(self, shared.kv_offsets, local)
        exists = index < shape.segments
        is_sequence = exists & found.is_sequence
        before = part * (shape.q_rows // shape.parts)
        number = jnp.clip(local - 1, 0, shape.sequences - 1)
        if shape.most_shared is not None:
            number = number + jnp.minimum(part, shape.parts - 1) * shape.sequences
            streamed = read(shared.key_blocks, number) * shape.unit
        elif shape.streamed_rows is not None:
            streamed = same(shape.streamed_rows)
        else:
            streamed = read(shared.q_offsets, number + 2) - read(shared.q_offsets, number + 1)
            if shape.max_seqlen_kv is not None:
                streamed = jnp.minimum(streamed, shape.max_seqlen_kv)
        return Segment(
            found.start + before,
            jnp.where(exists, found.length, 0),
            jnp.where(exists, found.rest, 0),
            found.rest_start + before,
            same(0),
            jnp.where(is_sequence, streamed, 0),
            jnp.where(is_sequence, number, -1),
        )


def queries_of(ctx: SegmentContext, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (first rows in the result, numbers of rows) of the sequences of these segments."""
    shape, read = ctx.config.queries, ctx.threads.read
    if shape.is_broadcast:
        return index * shape.q_rows, same(shape.q_rows)
    index = jnp.clip(index, 1, shape.sequences)
    start = read(ctx.shared.q_offsets, index)
    length = read(ctx.shared.q_offsets, index + 1) - start
    if shape.max_seqlen_q is not None:
        length = jnp.minimum(length, shape.max_seqlen_q)
    return start, length


def blocks_before(ctx: SegmentContext, index: jax.Array) -> jax.Array:
    """Counts the blocks of statistics before the sequences of these segments."""
    shape, unit = ctx.config.queries, ctx.config.keys.unit
    if shape.is_broadcast:
        return index * pl.cdiv(shape.q_rows, unit)
    return ctx.threads.read(ctx.shared.statistics, jnp.minimum(index, shape.segments - 1))


def _kv_numbers(ctx: SegmentContext, index: jax.Array) -> jax.Array:
    """Finds the sequences of keys, counted over all copies, of these segments of queries."""
    static = ctx.config
    index = jnp.clip(index, static.first, static.end - 1)
    number = ctx.threads.read(ctx.shared.kv_numbers, index)
    if static.keys.parts == 1:
        return number
    return number + lax.rem(index - static.first, same(static.keys.parts)) * static.keys.sequences


def count_shared(ctx: SegmentContext, begin: Any, end: Any, *, with_blocks: bool) -> None:
    """Counts sequences begin to end, and with `with_blocks` their blocks, at their keys."""
    threads, shared, static = ctx.threads, ctx.shared, ctx.config
    _, numbers = threads.rounds(static.end, unroll=UNROLL)
    batch = len(numbers(0)) * threads.count

    def turn(i: Any, _: Any) -> Any:
        places = numbers(i)
        kv = [_kv_numbers(ctx, x) for x in places]
        lengths = [queries_of(ctx, x)[1] for x in places] if with_blocks else []
        for j, (x, number) in enumerate(zip(places, kv, strict=True)):
            is_wanted = (x >= begin) & (x < end)
            threads.add(shared.begins, number, same(1), is_wanted)
            if with_blocks:
                threads.add(
                    shared.key_blocks, number, cdiv(lengths[j], static.keys.unit), is_wanted
                )
        return _

    lax.fori_loop(lax.div(begin, batch), lax.div(end + (batch - 1), batch), turn, jnp.int32(0))


def _sum_up_begins(ctx: SegmentContext) -> None:
    """Sets begins[i] to the number of lower keys' ranges; synchronises before and after."""
    threads, shared = ctx.threads, ctx.shared
    count, at = shared.key_blocks.shape[0] + 1, 9 * threads.warps
    sum_up(threads, shared.begins, count, None, shared.parts, at)
    threads.commit()


def _place_ranges(ctx: SegmentContext, index: jax.Array) -> jax.Array:
    """Finds positions of the ranges of the CTA's segments, sorted by keys, then by number."""
    threads, shared, static = ctx.threads, ctx.shared, ctx.config
    own = shared.own_bins.shape[0]
    begin = jnp.maximum(ctx.worker * own, static.first)

    count_shared(ctx, jnp.int32(static.first), begin, with_blocks=False)
    threads.commit()
    kv = _kv_numbers(ctx, index)
    before = threads.read(shared.begins, kv)
    threads.commit()
    count_shared(ctx, begin, jnp.int32(static.end), with_blocks=False)

    def turn(i: Any, rank: jax.Array) -> jax.Array:
        places = [ctx.worker * own + (i * 8 + x) for x in range(8)]
        for x, other in [(x, _kv_numbers(ctx, same(0) + x)) for x in places]:
            rank = rank + select((other == kv) & (x >= static.first) & (index > x), 1, 0)
        return rank

    rank = lax.fori_loop(0, own // 8, turn, same(0))
    threads.commit()
    _sum_up_begins(ctx)
    return threads.read(shared.begins, kv) + before + rank


def store_query_ranges(ctx: SegmentContext) -> None:
    """Stores the ranges of the sequences among the CTA's segments; synchronises the threads."""
    threads, static = ctx.threads, ctx.config
    own = ctx.shared.own_bins.shape[0]
    index = ctx.worker * own + threads.number()
    is_wanted = (threads.number() < own) & (index >= static.first) & (index < static.end)
    place = index - static.first
    if ctx.operands.q_to_kv is not None:
        place = _place_ranges(ctx, index)
    start, length = queries_of(ctx, index)
    words = [same(0) if static.queries.is_broadcast else start, start, length]
    if static.has_statistics:
        words.append(blocks_before(ctx, index) * static.keys.unit)
    store_words(ctx, ctx.outputs.keys.ranges, place, tuple(words), is_wanted)


def store_blocks(ctx: SegmentContext) -> None:
    """Stores the CTA's part of the list of blocks of statistics."""
    threads, static, shared = ctx.threads, ctx.config, ctx.shared
    unit, all_threads = static.keys.unit, static.query_workers * threads.count
    count, sequences = ctx.outputs.blocks.shape[0], static.queries.sequences

    @pl.loop(0, pl.cdiv(count, all_threads))
    def _(turn: Any) -> None:
        block = turn * all_threads + ctx.worker * threads.count + threads.number()
        if static.queries.is_broadcast:
            each = pl.cdiv(static.queries.q_rows, unit)
            index = lax.div(block, same(max(each, 1)))
        else:
            # The last segment whose blocks begin at this one or before.
            index = count_at_most(
                lambda x: threads.read(shared.statistics, x + 1), sequences, block, same(0)
            )
        start, length = queries_of(ctx, index)
        done = (block - blocks_before(ctx, index)) * unit
        rows = jnp.clip(length - done, 0, unit)
        rows = jnp.where((index >= static.first) & (index < static.end), rows, 0)
        words = start + done, rows, done, index - static.first
        store_words(ctx, ctx.outputs.blocks, block, words, block < count)


def _list_queries(ctx: SegmentContext, longest: jax.Array) -> None:
    static, shared = ctx.config, ctx.shared
    if shared.statistics is not None:

        def blocks(index: jax.Array) -> jax.Array:
            is_sequence = (index >= static.first) & (index < static.end)
            return jnp.where(is_sequence, cdiv(queries_of(ctx, index)[1], static.keys.unit), 0)

        count, at = static.queries.segments, 10 * ctx.threads.warps
        sum_up(ctx.threads, shared.statistics, count, blocks, shared.parts, at)
        ctx.threads.commit()
    store_query_ranges(ctx)
    if static.has_statistics:
        store_blocks(ctx)

    def words(index: jax.Array, found: Segment, done: jax.Array) -> tuple[jax.Array, ...]:
        number = found.kv_number
        kept = [*rows_of_tile(ctx, found, done), jnp.maximum(number, 0), number + 1]
        kept.append(cdiv(found.kv_length, ctx.shape.unit))
        if static.has_statistics:
            first = blocks_before(ctx, index) * static.keys.unit + done
            kept.append(jnp.where(number >= 0, first, 0))
        return tuple(kept)

    outputs = ctx.outputs.queries
    list_tiles(ctx, TileList(outputs.tiles, outputs.counts), longest, words)


def _list_keys(ctx: SegmentContext, longest: jax.Array) -> None:
    static, shared, threads = ctx.config, ctx.shared, ctx.threads
    is_shared = static.keys.most_shared is not None
    if is_shared:
        count_shared(ctx, jnp.int32(static.first), jnp.int32(static.end), with_blocks=True)
        threads.commit()
        _sum_up_begins(ctx)
        most, (turns, numbers) = same(0), threads.rounds(shared.key_blocks.shape[0])

        def turn(i: Any, most: jax.Array) -> jax.Array:
            for x in numbers(i):
                place = jnp.minimum(x, shared.key_blocks.shape[0] - 1)
                most = jnp.maximum(most, threads.read(shared.key_blocks, place))
            return most

        most = lax.fori_loop(0, turns, turn, most)
        longest = threads.largest(most, shared.parts, 11 * threads.warps)
    elif static.keys.streamed_rows is not None:
        longest = jnp.int32(static.keys.most_blocks)
    own = shared.own_bins.shape[0]
    index = ctx.worker * own + threads.number()
    # Queries stream the keys, not their copies.
    found = rows(ctx, shared.kv_offsets, jnp.minimum(index, static.keys.sequences + 1))
    is_wanted = (threads.number() < own) & found.is_sequence
    range_ = (found.start, found.start, found.length)
    store_words(ctx, ctx.outputs.queries.ranges, index - 1, range_, is_wanted)

    def words(_: jax.Array, found: Segment, done: jax.Array) -> tuple[jax.Array, ...]:
        number = jnp.maximum(found.kv_number, 0)
        begin, end = number, found.kv_number + 1
        if is_shared:
            begin, end = (threads.read(shared.begins, number + x) for x in (0, 1))
        blocks = cdiv(found.kv_length, static.keys.unit) * static.keys.group
        return *rows_of_tile(ctx, found, done), begin, end, blocks

    list_tiles(ctx, TileList(*ctx.outputs.keys[:2]), longest, words)


def _list(ctx: SegmentContext) -> None:
    threads, shared, static = ctx.threads, ctx.shared, ctx.config
    for ref in (shared.begins, shared.key_blocks):
        if ref is not None:
            clear(threads, ref)
    load(ctx)
    longest = running_maxima(ctx, static.queries, static.keys)

    @pl.when(ctx.worker < static.query_workers)
    def _() -> None:
        _list_queries(ctx, longest[0])

    @pl.when(ctx.worker >= static.query_workers)
    def _() -> None:
        keys = KeyContext(**{x.name: getattr(ctx, x.name) for x in dataclasses.fields(ctx)})
        worker = ctx.worker - static.query_workers
        _list_keys(keys.replace(shape=static.keys, worker=worker), longest[-1])


# Host side


def works(offsets: Offsets, settings: WorkSettings) -> Works:
    """Lists the work of both kernels, by one launch if it fits shared memory; some words are
    arbitrary.
    """
    operands = offsets.arrays
    static = _static(offsets, settings)
    shapes = (static.queries, static.keys)
    own = tiles.own_segments(shapes)
    workers = [pl.cdiv(x.segments, own) for x in shapes]
    static = static._replace(query_workers=workers[0])
    shared = _shared(static, operands, own)
    elements = sum(math.prod(x.shape) for x in shared if x is not None)
    if min(x.sequences for x in shapes) < 1 or elements > MOST_WORDS:
        return by_xla.works(offsets, settings)

    def words(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    # Ranges are of the streamed rows, which the other list has.
    ranges = [words(x.sequences, lists.RANGE_WORDS) for x in reversed(shapes)]
    listed = (words(x.most, lists.WORK_WORDS) for x in shapes)
    queries, keys = (Work(x, words(2), y) for x, y in zip(listed, ranges, strict=True))
    count = jagged.most_tiles(offsets.sequences, offsets.result_rows, settings.key_block)
    blocks = words(count, BLOCK_WORDS) if settings.has_statistics else None
    return launch_threads(
        _list,
        static.queries,
        operands,
        Works(queries, keys, blocks),
        shared,
        name="ikbo_gdpa_backward_lists",
        workers=sum(workers),
        warpgroups=static.queries.warpgroups,
        config=static,
        context=SegmentContext,
    )


def _static(offsets: Offsets, settings: WorkSettings) -> Launch:
    q_rows, kv_rows, max_q, max_kv = offsets.sizes
    parts, key_block = settings.parts, settings.key_block
    queries = Shape.of(offsets, TILE_ROWS, settings.query_block, is_merged=False, kv_first=1)
    most = jagged.most_tiles(offsets.sequences, offsets.result_rows, key_block)
    keys = KeyShape(
        *(offsets.kv_sequences, kv_rows * parts, q_rows, max_kv, max_q, TILE_ROWS, key_block),
        is_broadcast=False,
        is_merged=False,
        warpgroups=queries.warpgroups,
        kv_first=1,
        group=settings.group,
        streamed_rows=q_rows if offsets.is_broadcast else None,
        most_shared=None if offsets.q_to_kv is None else most,
        parts=parts,
    )
    return Launch(queries, keys, settings.has_statistics, 0)


def _shared(static: Launch, operands: Arrays, own: int) -> Any:
    queries, keys = static.queries, static.keys
    found = tiles.shared_words((queries, keys), operands, own, 12)
    threads = Threads(queries.warpgroups, 0)
    if static.has_statistics and not queries.is_broadcast:
        found = found._replace(statistics=memory.Words((queries.segments,)))
    if operands.q_to_kv is None:
        return found
    count = keys.sequences * keys.parts
    begins = memory.Words((padded(threads, count + 1),))
    return found._replace(begins=begins, key_blocks=memory.Words((count,)))
