"""Ranges of streamed rows and blocks of statistics, in the launch that lists a gradient's tiles."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper.per_thread import cdiv, same
from ikbo_jax.pallas.worklist.scan import running_sums
from ikbo_jax.pallas.worklist.search import count_at_most
from ikbo_jax.pallas.worklist.segments import Segment, SegmentContext, Shape, rows
from ikbo_jax.pallas.worklist.tiles import store_words

#: Sequences of each thread in one turn of a loop.
UNROLL = 4


@dataclasses.dataclass(frozen=True)
class KeyShape(Shape):
    """The shape of the list of keys: what `Shape` calls queries are keys here, and the reverse.

    Attributes:
      group: query heads of one key head.
      streamed_rows: queries of each sequence if they are broadcast, or None.
      most_shared: blocks of queries of any key-value sequence if sequences share keys, or None.
      parts: copies of the keys, where every n-th sequence of queries belongs to part n. `sequences`
        are those of one copy, and `q_rows` the rows of all.
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
        """Number of the first sequence's segment."""
        return 0 if self.queries.is_broadcast else 1

    @property
    def end(self) -> int:
        return self.first + self.queries.sequences


class Outputs(NamedTuple):
    """Device memory that the launch fills: `Work` of both kernels.

    A kernel's work has the ranges of the other's sequences, which it streams.
    """

    query_tiles: Any
    query_counts: Any
    query_ranges: Any  # of sequences of queries
    key_tiles: Any
    key_counts: Any
    key_ranges: Any
    blocks: Any  # [blocks, BLOCK_WORDS] of statistics, or None


class WorkContext(SegmentContext):
    """The context of a warpgroup; `config` is the `Launch`, `shape` that of the CTA's list.

    `shared` is `tiles.Shared`.
    """


class KeyContext(WorkContext):
    """The context of a warpgroup that lists tiles of keys."""

    def segment(self, index: jax.Array) -> Segment:
        """Segments of keys; `kv_length` counts queries, rounded to whole blocks if shared."""
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


def queries_of(ctx: WorkContext, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(first rows in the result, numbers of rows) of the sequences with these segments."""
    shape, read = ctx.config.queries, ctx.threads.read
    if shape.is_broadcast:
        return index * shape.q_rows, same(shape.q_rows)
    index = jnp.clip(index, 1, shape.sequences)
    start = read(ctx.shared.q_offsets, index)
    length = read(ctx.shared.q_offsets, index + 1) - start
    if shape.max_seqlen_q is not None:
        length = jnp.minimum(length, shape.max_seqlen_q)
    return start, length


def blocks_before(ctx: WorkContext, index: jax.Array) -> jax.Array:
    """Blocks of statistics before those of the sequences with these segments."""
    shape, unit = ctx.config.queries, ctx.config.keys.unit
    if shape.is_broadcast:
        return index * pl.cdiv(shape.q_rows, unit)
    return ctx.threads.read(ctx.shared.statistics, jnp.minimum(index, shape.segments - 1))


def _kv_numbers(ctx: WorkContext, index: jax.Array) -> jax.Array:
    """Sequences of keys, of all copies, of the sequences of queries with these segments."""
    static = ctx.config
    index = jnp.clip(index, static.first, static.end - 1)
    number = ctx.threads.read(ctx.shared.kv_numbers, index)
    if static.keys.parts == 1:
        return number
    return number + lax.rem(index - static.first, same(static.keys.parts)) * static.keys.sequences


def count_shared(ctx: WorkContext, begin: Any, end: Any, *, with_blocks: bool) -> None:
    """Adds sequences begin to end, counted as segments, to what shares their keys."""
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


def sum_up(ctx: WorkContext, ref: Any, value: Any, at: int) -> None:
    """ref[i] = the sum of value(0) to value(i - 1); synchronises before it stores and after."""
    threads, count = ctx.threads, ref.shape[0]

    def read(places: list[jax.Array]) -> list[tuple[jax.Array]]:
        found = [value(jnp.minimum(x, count - 1)) for x in places]
        return [(jnp.where(x < count, v, 0),) for x, v in zip(places, found, strict=True)]

    def store(place: jax.Array, before: Any, _: Any) -> None:
        threads.keep(ref, place, before[0], place < count)

    running_sums(threads, count, read, store, ctx.shared.parts, at * threads.warps)
    threads.commit()


def _place_ranges(ctx: WorkContext, index: jax.Array) -> jax.Array:
    """Positions of the ranges of the CTA's segments: sorted by keys, and by their own number."""
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
            rank = rank + jnp.where((other == kv) & (x >= static.first) & (index > x), 1, 0)
        return rank

    rank = lax.fori_loop(0, own // 8, turn, same(0))
    threads.commit()
    sum_up(ctx, shared.begins, lambda x: threads.read(shared.begins, x), 9)
    return threads.read(shared.begins, kv) + before + rank


def store_query_ranges(ctx: WorkContext) -> None:
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
    store_words(ctx, ctx.outputs.query_ranges, place, tuple(words), is_wanted)


def store_blocks(ctx: WorkContext) -> None:
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
        store_words(ctx, ctx.outputs.blocks, block, (start + done, rows), block < count)
