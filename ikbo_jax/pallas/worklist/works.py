"""Both lists of tiles of the backward kernels, and their ranges, by one Mosaic GPU kernel.

XLA would make them in 15 to 25 kernels of about 2 us each. Here the first CTAs list tiles of
queries, and the others tiles of keys, as `tiles` lists tiles for the forward kernel: offsets in
shared memory, running maxima, and a counting sort of segments by their blocks. In addition:

  - *Ranges.* A CTA describes the sequences among its segments. The kernel for queries streams
    keys, so the CTAs for keys write its ranges, and the reverse.
  - *Sequences that share keys* (`q_to_kv`). Ranges of queries are sorted by their keys. Every CTA
    counts the sequences, and the CTAs for keys also the blocks, of each sequence of keys. A range's
    position comes after the ranges of lower numbers of keys, of earlier CTAs, and of earlier
    sequences of its CTA.
  - *Statistics* of a softmax. Running sums of the sequences' blocks tell where the statistics of
    each begin. Another list says which queries each block of statistics has.

Tiles with blocks are in XLA's order while no more than `positions.MOST_BINS` numbers of blocks
occur.

Synchronisations: `Threads.commit` between the parts, within the CTA. CTAs do not wait for each
other.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper.launch import launch_threads
from ikbo_jax.pallas.hopper.per_thread import cdiv, same
from ikbo_jax.pallas.worklist import by_xla, tiles
from ikbo_jax.pallas.worklist.lists import (
    RANGE_WORDS,
    WORK_WORDS,
    Arrays,
    Offsets,
    Work,
    Works,
    most_blocks,
)
from ikbo_jax.pallas.worklist.ranges import (
    KeyContext,
    KeyShape,
    Launch,
    Outputs,
    WorkContext,
    blocks_before,
    count_shared,
    queries_of,
    store_blocks,
    store_query_ranges,
    sum_up,
)
from ikbo_jax.pallas.worklist.scan import clear
from ikbo_jax.pallas.worklist.segments import Segment, Shape, load, rise, rows
from ikbo_jax.pallas.worklist.tiles import list_tiles, rows_of_tile, store_words
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import TILE_ROWS

#: Most words of shared memory: 211 KB, and at most 1 KB for the alignment of each array.
MOST_WORDS = 54000
#: Words of a block of statistics: its first query, and its number of queries.
BLOCK_WORDS = 2


# The two lists


def _list_queries(ctx: WorkContext, longest: jax.Array) -> None:
    static, shared = ctx.config, ctx.shared
    if shared.statistics is not None:

        def blocks(index: jax.Array) -> jax.Array:
            is_sequence = (index >= static.first) & (index < static.end)
            return jnp.where(is_sequence, cdiv(queries_of(ctx, index)[1], static.keys.unit), 0)

        sum_up(ctx, shared.statistics, blocks, 10)
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

    outputs = tiles.Outputs(ctx.outputs.query_tiles, ctx.outputs.query_counts)
    list_tiles(ctx.replace(outputs=outputs), longest, words, 3 + static.has_statistics)


def _list_keys(ctx: WorkContext, longest: jax.Array) -> None:
    static, shared, threads = ctx.config, ctx.shared, ctx.threads
    is_shared = static.keys.most_shared is not None
    if is_shared:
        count_shared(ctx, jnp.int32(static.first), jnp.int32(static.end), with_blocks=True)
        threads.commit()
        sum_up(ctx, shared.begins, lambda x: threads.read(shared.begins, x), 9)
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
    store_words(ctx, ctx.outputs.key_ranges, index - 1, range_, is_wanted)

    def words(_: jax.Array, found: Segment, done: jax.Array) -> tuple[jax.Array, ...]:
        number = jnp.maximum(found.kv_number, 0)
        begin, end = number, found.kv_number + 1
        if is_shared:
            begin, end = (threads.read(shared.begins, number + x) for x in (0, 1))
        blocks = cdiv(found.kv_length, static.keys.unit) * static.keys.group
        return *rows_of_tile(ctx, found, done), begin, end, blocks

    outputs = tiles.Outputs(ctx.outputs.key_tiles, ctx.outputs.key_counts)
    list_tiles(ctx.replace(outputs=outputs), longest, words, 3)


def _list(ctx: WorkContext) -> None:
    """A warpgroup of the CTA."""
    threads, shared, static = ctx.threads, ctx.shared, ctx.config
    for ref in (shared.begins, shared.key_blocks):
        if ref is not None:
            clear(threads, ref)
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
    offsets: Offsets,
    *,
    query_block: int,
    key_block: int,
    group: int,
    has_statistics: bool,
    parts: int = 1,
    interpret: Any = False,
) -> Works:
    """Lists the work of both kernels by one launch, unless it does not fit shared memory.

    Words and entries that the kernels do not read are arbitrary.

    Args:
      offsets: of the sequences; keys beyond `max_seqlen_kv` belong to no sequence.
      query_block: rows of a block of keys, in the kernel for queries.
      key_block: rows of a block of queries, in the kernel for keys.
      group: query heads of one key head.
      has_statistics: whether there is a softmax.
      parts: copies of the keys that the kernel for keys takes; every n-th sequence of queries
        belongs to part n. 1 without `q_to_kv`.
      interpret: False, or `plgpu.InterpretGPUParams` to run on a CPU.
    """
    operands, blocks = offsets.arrays, (query_block, key_block)
    warpgroups = 1 if interpret else tiles.WARPGROUPS
    static = _static(offsets, blocks, group, parts, has_statistics, warpgroups)
    shapes = (static.queries, static.keys)
    own = tiles.own_segments(shapes)
    workers = [pl.cdiv(x.segments, own) for x in shapes]
    static = static._replace(query_workers=workers[0])
    shared = _shared(static, operands, own)
    elements = sum(math.prod(x.shape) for x in shared if x is not None)
    if min(x.sequences for x in shapes) < 1 or elements > MOST_WORDS:
        return by_xla.works(
            offsets,
            query_block=query_block,
            key_block=key_block,
            group=group,
            has_statistics=has_statistics,
            parts=parts,
            interpret=bool(interpret),
        )

    def words(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    lists = [(words(x.most, WORK_WORDS), words(2), words(x.sequences, RANGE_WORDS)) for x in shapes]
    count = most_blocks(offsets.sequences, offsets.result_rows, key_block)
    outputs = Outputs(*lists[0], *lists[1], words(count, BLOCK_WORDS) if has_statistics else None)
    found: Outputs = launch_threads(
        _list,
        static.queries,
        operands,
        outputs,
        shared,
        name="ikbo_gdpa_backward_lists",
        workers=sum(workers),
        warpgroups=warpgroups,
        config=static,
        context=WorkContext,
        interpret=interpret,
    )
    queries = Work(found.query_tiles, found.query_counts, found.key_ranges)
    keys = Work(found.key_tiles, found.key_counts, found.query_ranges)
    return Works(queries, keys, found.blocks)


def _static(
    offsets: Offsets,
    units: tuple[int, int],
    group: int,
    parts: int,
    has_statistics: bool,
    warpgroups: int,
) -> Launch:
    q_rows, kv_rows, max_q, max_kv = offsets.sizes
    queries = dataclasses.replace(
        Shape.of(offsets, TILE_ROWS, units[0], warpgroups=warpgroups), is_merged=False, kv_first=1
    )
    most = most_blocks(offsets.sequences, offsets.result_rows, units[1])
    keys = KeyShape(
        *(offsets.kv_sequences, kv_rows * parts, q_rows, max_kv, max_q, TILE_ROWS, units[1]),
        is_broadcast=False,
        is_merged=False,
        warpgroups=warpgroups,
        kv_first=1,
        group=group,
        streamed_rows=q_rows if offsets.is_broadcast else None,
        most_shared=None if offsets.q_to_kv is None else most,
        parts=parts,
    )
    return Launch(queries, keys, has_statistics, 0)


def _shared(static: Launch, operands: Arrays, own: int) -> tiles.Shared:
    queries, keys = static.queries, static.keys
    found = tiles.shared_words((queries, keys), operands, own, 12)
    if static.has_statistics and not queries.is_broadcast:
        found = found._replace(statistics=memory.Words((queries.segments,)))
    if operands.q_to_kv is None:
        return found
    sequences = keys.sequences * keys.parts
    begins, blocks = memory.Words((sequences + 1,)), memory.Words((sequences,))
    return found._replace(begins=begins, key_blocks=blocks)
