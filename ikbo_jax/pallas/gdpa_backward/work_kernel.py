"""Both lists of tiles of the backward kernels, and their ranges, by one Mosaic GPU kernel.

`tiles` describes the lists; XLA makes them in 15 to 25 kernels of about 2 us each. Here the first
CTAs list tiles of queries, and the others tiles of keys, as `flash.tile_list_kernel` lists tiles
for the forward kernel: offsets in shared memory, running maxima, and a counting sort of segments by
their blocks. In addition:

  - *Ranges.* A CTA describes the sequences among its segments. The kernel for queries streams
    keys, so the CTAs for keys write its ranges, and the reverse.
  - *Sequences that share keys* (`q_to_kv`). Ranges of queries are sorted by their keys. Every CTA
    counts the sequences, and the CTAs for keys also the blocks, of each sequence of keys. A range's
    position comes after the ranges of lower numbers of keys, of earlier CTAs, and of earlier
    sequences of its CTA.
  - *Statistics* of a softmax. Running sums of the sequences' blocks tell where the statistics of
    each begin. Another list says which queries each block of statistics has.

Tiles with blocks are XLA's, in the same order, while no more than `tile_positions.MOST_BINS`
numbers of blocks occur. Tiles of rows of no sequence may be cut elsewhere.

Synchronisations: `Threads.commit` between the parts, within the CTA. CTAs do not wait for each
other.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.flash import tile_list_kernel, tile_positions
from ikbo_jax.pallas.flash.jagged_segments import (
    Segment,
    SegmentContext,
    Shape,
    load,
    rise,
    rows,
)
from ikbo_jax.pallas.flash.tile_list_kernel import list_tiles, rows_of_tile, store_words
from ikbo_jax.pallas.gdpa_backward.tiles import RANGE_WORDS, TILE_WORDS, Work, most_blocks
from ikbo_jax.pallas.hopper.launch import Roles, launch
from ikbo_jax.pallas.hopper.per_thread import cdiv, same
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import TILE_ROWS, WARPGROUP_SIZE

#: Most words of shared memory: 211 KB, and at most 1 KB for the alignment of each array.
MOST_WORDS = 54000
#: Words of a block of statistics: its first query, and its number of queries.
BLOCK_WORDS = 2
#: Sequences of each thread in one turn of a loop.
UNROLL = 4


@dataclasses.dataclass(frozen=True)
class KeyShape(Shape):
    """The shape of the list of keys: what `Shape` calls queries are keys here, and the reverse.

    Attributes:
      group: query heads of one key head.
      streamed_rows: queries of each sequence if they are broadcast, or None.
      most_shared: blocks of queries of any key-value sequence if sequences share keys, or None.
    """

    group: int = 1
    streamed_rows: int | None = None
    most_shared: int | None = None

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


class Operands(NamedTuple):
    """Device memory."""

    cu_seqlens_q: Any  # [batch + 1] int32, or None
    cu_seqlens_kv: Any  # [batch_kv + 1] int32
    q_to_kv: Any  # [batch] int32, or None


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


class Shared(NamedTuple):
    """Shared memory, int32; see `tile_list_kernel.Shared` for the fields of the same names."""

    parts: Any
    q_offsets: Any
    kv_offsets: Any
    kv_numbers: Any
    bins: Any
    own_bins: Any
    own_tiles: Any
    own_before: Any
    own_firsts: Any
    own_ends: Any
    rest_ends: Any
    begins: Any  # [batch_kv + 1]: ranges of lower numbers of keys; None without an index
    key_blocks: Any  # [batch_kv]: blocks of queries; likewise
    statistics: (
        Any  # [segments of queries]: blocks of statistics before; None without, or broadcast
    )


class WorkContext(SegmentContext):
    """The context of a warpgroup; `config` is the `Launch`, `shape` that of the CTA's list."""


class KeyContext(WorkContext):
    """The context of a warpgroup that lists tiles of keys."""

    def segment(self, index: jax.Array) -> Segment:
        """Segments of keys; `kv_length` counts queries, rounded to whole blocks if shared."""
        shape, shared, read = self.shape, self.shared, self.threads.read
        found = rows(self, shared.kv_offsets, index)
        number = jnp.clip(index - 1, 0, shape.sequences - 1)
        if shape.most_shared is not None:
            streamed = read(shared.key_blocks, number) * shape.unit
        elif shape.streamed_rows is not None:
            streamed = same(shape.streamed_rows)
        else:
            streamed = read(shared.q_offsets, number + 2) - read(shared.q_offsets, number + 1)
            if shape.max_seqlen_kv is not None:
                streamed = jnp.minimum(streamed, shape.max_seqlen_kv)
        return Segment(
            found.start,
            jnp.where(found.exists, found.length, 0),
            found.rest,
            found.rest_start,
            same(0),
            jnp.where(found.is_sequence, streamed, 0),
            jnp.where(found.is_sequence, number, -1),
        )


# Sequences of queries


def _queries(ctx: WorkContext, index: jax.Array) -> tuple[jax.Array, jax.Array]:
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


def _blocks_before(ctx: WorkContext, index: jax.Array) -> jax.Array:
    """Blocks of statistics before those of the sequences with these segments."""
    shape, unit = ctx.config.queries, ctx.config.keys.unit
    if shape.is_broadcast:
        return index * pl.cdiv(shape.q_rows, unit)
    return ctx.threads.read(ctx.shared.statistics, jnp.minimum(index, shape.segments - 1))


def _count(ctx: WorkContext, begin: Any, end: Any, *, with_blocks: bool) -> None:
    """Adds sequences begin to end, counted as segments, to what shares their keys."""
    threads, shared, static = ctx.threads, ctx.shared, ctx.config
    _, numbers = threads.rounds(static.end, unroll=UNROLL)
    batch = len(numbers(0)) * threads.count

    def turn(i: Any, _: Any) -> Any:
        places = numbers(i)
        kv = [
            threads.read(shared.kv_numbers, jnp.clip(x, static.first, static.end - 1))
            for x in places
        ]
        lengths = [_queries(ctx, x)[1] for x in places] if with_blocks else []
        for j, (x, number) in enumerate(zip(places, kv, strict=True)):
            is_wanted = (x >= begin) & (x < end)
            threads.add(shared.begins, number, same(1), is_wanted)
            if with_blocks:
                threads.add(
                    shared.key_blocks, number, cdiv(lengths[j], static.keys.unit), is_wanted
                )
        return _

    lax.fori_loop(lax.div(begin, batch), lax.div(end + (batch - 1), batch), turn, jnp.int32(0))


def _sum_up(ctx: WorkContext, ref: Any, value: Any, at: int) -> None:
    """ref[i] = the sum of value(0) to value(i - 1); synchronises before it stores and after."""
    threads, count = ctx.threads, ref.shape[0]
    turns, step, each = threads.parts(count)
    first = threads.number() * each

    def places(i: Any) -> list[jax.Array]:
        return [first + (i * step + x) for x in range(step)]

    def values(i: Any) -> list[jax.Array]:
        found = [value(jnp.minimum(x, count - 1)) for x in places(i)]
        return [jnp.where(x < count, v, 0) for x, v in zip(places(i), found, strict=True)]

    def add(i: Any, total: jax.Array) -> jax.Array:
        for v in values(i):
            total = total + v
        return total

    total = lax.fori_loop(0, turns, add, same(0))
    (before,) = threads.sums_before([total], ctx.shared.parts, at * threads.warps)

    def keep(i: Any, total: jax.Array) -> jax.Array:
        for x, v in zip(places(i), values(i), strict=True):
            threads.keep(ref, x, total, x < count)
            total = total + v
        return total

    lax.fori_loop(0, turns, keep, before)
    threads.commit()


def _place_ranges(ctx: WorkContext, index: jax.Array) -> jax.Array:
    """Positions of the ranges of the CTA's segments: sorted by keys, and by their own number."""
    threads, shared, static = ctx.threads, ctx.shared, ctx.config
    own = shared.own_bins.shape[0]
    begin = jnp.maximum(ctx.worker * own, static.first)

    def number_of(index: jax.Array) -> jax.Array:
        return threads.read(shared.kv_numbers, jnp.clip(index, static.first, static.end - 1))

    _count(ctx, jnp.int32(static.first), begin, with_blocks=False)
    threads.commit()
    kv = number_of(index)
    before = threads.read(shared.begins, kv)
    threads.commit()
    _count(ctx, begin, jnp.int32(static.end), with_blocks=False)

    def turn(i: Any, rank: jax.Array) -> jax.Array:
        places = [ctx.worker * own + (i * 8 + x) for x in range(8)]
        for x, other in [(x, number_of(same(0) + x)) for x in places]:
            rank = rank + jnp.where((other == kv) & (x >= static.first) & (index > x), 1, 0)
        return rank

    rank = lax.fori_loop(0, own // 8, turn, same(0))
    threads.commit()
    _sum_up(ctx, shared.begins, lambda x: threads.read(shared.begins, x), 9)
    return threads.read(shared.begins, kv) + before + rank


def _store_query_ranges(ctx: WorkContext) -> None:
    threads, static = ctx.threads, ctx.config
    own = ctx.shared.own_bins.shape[0]
    index = ctx.worker * own + threads.number()
    is_wanted = (threads.number() < own) & (index >= static.first) & (index < static.end)
    place = index - static.first
    if ctx.operands.q_to_kv is not None:
        place = _place_ranges(ctx, index)
    start, length = _queries(ctx, index)
    words = [same(0) if static.queries.is_broadcast else start, start, length]
    if static.has_statistics:
        words.append(_blocks_before(ctx, index) * static.keys.unit)
    store_words(ctx, ctx.outputs.query_ranges, place, tuple(words), is_wanted)


def _store_blocks(ctx: WorkContext) -> None:
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
            index = same(0)  # the last segment whose blocks begin at this one or before
            for bit in reversed(range(sequences.bit_length())):
                further = index + (1 << bit)
                begin = threads.read(shared.statistics, jnp.minimum(further, sequences))
                index = jnp.where((further <= sequences) & (begin <= block), further, index)
        start, length = _queries(ctx, index)
        done = (block - _blocks_before(ctx, index)) * unit
        rows = jnp.clip(length - done, 0, unit)
        rows = jnp.where((index >= static.first) & (index < static.end), rows, 0)
        store_words(ctx, ctx.outputs.blocks, block, (start + done, rows), block < count)


# The two lists


def _list_queries(ctx: WorkContext, longest: jax.Array) -> None:
    static, shared = ctx.config, ctx.shared
    if shared.statistics is not None:

        def blocks(index: jax.Array) -> jax.Array:
            is_sequence = (index >= static.first) & (index < static.end)
            return jnp.where(is_sequence, cdiv(_queries(ctx, index)[1], static.keys.unit), 0)

        _sum_up(ctx, shared.statistics, blocks, 10)
    _store_query_ranges(ctx)
    if static.has_statistics:
        _store_blocks(ctx)

    def words(index: jax.Array, found: Segment, done: jax.Array) -> tuple[jax.Array, ...]:
        number = found.kv_number
        kept = [*rows_of_tile(ctx, found, done), jnp.maximum(number, 0), number + 1]
        kept.append(cdiv(found.kv_length, ctx.shape.unit))
        if static.has_statistics:
            first = _blocks_before(ctx, index) * static.keys.unit + done
            kept.append(jnp.where(number >= 0, first, 0))
        return tuple(kept)

    outputs = tile_list_kernel.Outputs(ctx.outputs.query_tiles, ctx.outputs.query_counts)
    list_tiles(ctx.replace(outputs=outputs), longest, words, 3 + static.has_statistics)


def _list_keys(ctx: WorkContext, longest: jax.Array) -> None:
    static, shared, threads = ctx.config, ctx.shared, ctx.threads
    is_shared = static.keys.most_shared is not None
    if is_shared:
        _count(ctx, jnp.int32(static.first), jnp.int32(static.end), with_blocks=True)
        threads.commit()
        _sum_up(ctx, shared.begins, lambda x: threads.read(shared.begins, x), 9)
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
    found = rows(ctx, shared.kv_offsets, index)
    is_wanted = (threads.number() < own) & found.is_sequence
    range_ = (found.start, found.start, found.length)
    store_words(ctx, ctx.outputs.key_ranges, index - 1, range_, is_wanted)

    def words(_: jax.Array, found: Segment, done: jax.Array) -> tuple[jax.Array, ...]:
        number = jnp.maximum(found.kv_number, 0)
        begin, end = number, found.kv_number + 1
        if is_shared:
            begin, end = (threads.read(shared.begins, number + x) for x in (0, 1))
        blocks = cdiv(found.kv_length, static.keys.unit) * static.keys.group
        return *rows_of_tile(ctx, found, done), begin, end, blocks

    outputs = tile_list_kernel.Outputs(ctx.outputs.key_tiles, ctx.outputs.key_counts)
    list_tiles(ctx.replace(outputs=outputs), longest, words, 3)


def _list(ctx: WorkContext) -> None:
    """A warpgroup of the CTA."""
    threads, shared, static = ctx.threads, ctx.shared, ctx.config
    for ref in (shared.begins, shared.key_blocks):
        if ref is not None:
            turns, numbers = threads.rounds(ref.shape[0])

            @pl.loop(0, turns)
            def _(turn: Any, ref: Any = ref, numbers: Any = numbers) -> None:
                for x in numbers(turn):
                    threads.keep(ref, x, same(0), x < ref.shape[0])

    load(ctx)
    longest = []
    shapes = (static.queries, static.keys)  # of keys, then of queries, that tiles take
    for i, (shape, most) in enumerate(zip(shapes, rise(ctx), strict=False)):
        if shape.max_seqlen_kv is not None:
            most = jnp.minimum(most, shape.max_seqlen_kv)
        at = (2 + i) * threads.warps
        longest.append(threads.largest(cdiv(most, shape.unit), shared.parts, at))

    @pl.when(ctx.worker < static.query_workers)
    def _() -> None:
        _list_queries(ctx, longest[0])

    @pl.when(ctx.worker >= static.query_workers)
    def _() -> None:
        keys = KeyContext(**{x.name: getattr(ctx, x.name) for x in dataclasses.fields(ctx)})
        worker = ctx.worker - static.query_workers
        _list_keys(keys.replace(shape=static.keys, worker=worker), longest[-1])


# Host side


def works(
    cu_seqlens_q: jax.Array | None,
    cu_seqlens_kv: jax.Array,
    q_to_kv: jax.Array | None,
    *,
    q_rows: int,
    kv_rows: int,
    max_seqlen_q: int | None,
    max_seqlen_kv: int | None,
    query_block: int,
    key_block: int,
    group: int,
    has_statistics: bool,
    interpret: Any = False,
) -> tuple[Work, Work, jax.Array | None] | None:
    """The work of both kernels, of queries and of keys, by one launch.

    Args:
      cu_seqlens_q: [batch + 1] int32; None: all sequences have the same `q_rows` queries.
      cu_seqlens_kv: [batch_kv + 1] int32.
      q_to_kv: [batch] int32, clamped; None: query sequence b attends to key-value sequence b.
      q_rows: rows of the queries' array.
      kv_rows: rows of the keys' array.
      max_seqlen_q: longest sequence of queries, or None; rows beyond it belong to no sequence.
      max_seqlen_kv: longest sequence of keys, or None; likewise.
      query_block: rows of a block of keys, in the kernel for queries.
      key_block: rows of a block of queries, in the kernel for keys.
      group: query heads of one key head.
      has_statistics: whether there is a softmax.
      interpret: False, or `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
      Work of the queries; work of the keys; and, with a softmax, [blocks, 2] int32, for each block
      of statistics its first query in the result and its number of queries, else None. Words and
      entries that the kernels do not read are arbitrary. None if there are no sequences, or if
      offsets and index do not fit shared memory; then XLA must compute the work.
    """
    operands = Operands(cu_seqlens_q, cu_seqlens_kv, q_to_kv)
    static = _static(
        operands, (q_rows, kv_rows, max_seqlen_q, max_seqlen_kv), (query_block, key_block), group,
        has_statistics, 1 if interpret else tile_list_kernel.WARPGROUPS,
    )  # fmt: skip
    shapes = (static.queries, static.keys)
    if min(x.sequences for x in shapes) < 1:
        return None
    own = WARPGROUP_SIZE
    workers = [pl.cdiv(x.segments, own) for x in shapes]
    if sum(workers) > tile_list_kernel.MOST_WORKERS and not interpret:
        own *= 2
        workers = [pl.cdiv(x.segments, own) for x in shapes]
    static = static._replace(query_workers=workers[0])
    shared = _shared(static, operands, own)
    if sum(math.prod(x.shape) for x in shared if x is not None) > MOST_WORDS:
        return None
    total = q_rows * (static.queries.sequences if cu_seqlens_q is None else 1)

    def words(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    lists = [(words(x.most, TILE_WORDS), words(2), words(x.sequences, RANGE_WORDS)) for x in shapes]
    blocks = most_blocks(static.queries.sequences, total, key_block)
    outputs = Outputs(*lists[0], *lists[1], words(blocks, BLOCK_WORDS) if has_statistics else None)
    results = launch(
        Roles(
            lambda *arguments: WorkContext(static.queries, static, *arguments),
            None,
            _list,
            warpgroups=static.queries.warpgroups,
        ),
        operands,
        outputs,
        shared,
        dtype=jnp.int32,
        name="ikbo_gdpa_backward_lists",
        workers=sum(workers),
        interpret=interpret,
    )
    q_tiles, q_counts, q_ranges, k_tiles, k_counts, k_ranges, *rest = results
    return Work(q_tiles, q_counts, k_ranges), Work(k_tiles, k_counts, q_ranges), *(rest or [None])


def _static(
    operands: Operands,
    sizes: tuple[int, int, int | None, int | None],
    units: tuple[int, int],
    group: int,
    has_statistics: bool,
    warpgroups: int,
) -> Launch:
    q_rows, kv_rows, max_q, max_kv = sizes
    is_broadcast, index = operands.cu_seqlens_q is None, operands.q_to_kv
    batch_kv = operands.cu_seqlens_kv.shape[0] - 1
    batch = batch_kv if index is None else index.shape[0]
    shared = {"is_merged": False, "warpgroups": warpgroups, "kv_first": 1, "size": TILE_ROWS}
    queries = Shape(batch, *sizes, unit=units[0], is_broadcast=is_broadcast, **shared)
    total = q_rows * batch if is_broadcast else q_rows
    keys = KeyShape(
        batch_kv, kv_rows, q_rows, max_kv, max_q, unit=units[1], is_broadcast=False, **shared,
        group=group,
        streamed_rows=q_rows if is_broadcast else None,
        most_shared=None if index is None else most_blocks(batch, total, units[1]),
    )  # fmt: skip
    return Launch(queries, keys, has_statistics, 0)


def _shared(static: Launch, operands: Operands, own: int) -> Shared:
    """The declaration of `Shared`."""
    shapes = (static.queries, static.keys)
    threads = static.queries.warpgroups * WARPGROUP_SIZE
    is_broadcast, is_shared = static.queries.is_broadcast, operands.q_to_kv is not None
    each, batch_kv = memory.Words((own,)), static.keys.sequences
    has_sums = static.has_statistics and not is_broadcast
    return Shared(
        parts=memory.Words((12 * (threads // 32),)),
        q_offsets=None if is_broadcast else memory.Words((static.queries.segments + 1,)),
        kv_offsets=memory.Words((static.keys.segments + 1,)),
        kv_numbers=memory.Words((static.queries.segments,)) if is_shared else None,
        bins=memory.Words((max(map(tile_positions.bin_words, shapes)),)),
        own_bins=each,
        own_tiles=each,
        own_before=memory.Words((threads,)),
        own_firsts=each,
        own_ends=each,
        rest_ends=each if any(x.has_rest for x in shapes) else None,
        begins=memory.Words((batch_kv + 1,)) if is_shared else None,
        key_blocks=memory.Words((batch_kv,)) if is_shared else None,
        statistics=memory.Words((static.queries.segments,)) if has_sums else None,
    )
