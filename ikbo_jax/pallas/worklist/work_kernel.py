"""Both lists of tiles of the backward kernels, and their ranges, by one Mosaic GPU kernel.

`tiles` describes the lists; XLA makes them in 15 to 25 kernels of about 2 us each. Here the first
CTAs list tiles of queries, and the others tiles of keys, as `tile_list_kernel` lists tiles
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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper.launch import Roles, launch
from ikbo_jax.pallas.hopper.per_thread import cdiv, same
from ikbo_jax.pallas.worklist import tile_list_kernel, tile_positions
from ikbo_jax.pallas.worklist.jagged_segments import Segment, Shape, load, rise, rows
from ikbo_jax.pallas.worklist.tile_list_kernel import list_tiles, rows_of_tile, store_words
from ikbo_jax.pallas.worklist.work import RANGE_WORDS, TILE_WORDS, Work, most_blocks
from ikbo_jax.pallas.worklist.work_context import (
    KeyContext,
    KeyShape,
    Launch,
    Operands,
    Outputs,
    Shared,
    WorkContext,
)
from ikbo_jax.pallas.worklist.work_ranges import (
    blocks_before,
    count_shared,
    queries_of,
    store_blocks,
    store_query_ranges,
    sum_up,
)
from ikbo_jax.problems import memory
from ikbo_jax.problems.hopper import TILE_ROWS, WARPGROUP_SIZE

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

    outputs = tile_list_kernel.Outputs(ctx.outputs.query_tiles, ctx.outputs.query_counts)
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
    parts: int = 1,
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
      parts: copies of the keys that the kernel for keys takes; every n-th sequence of queries
        belongs to part n. 1 without `q_to_kv`.
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
        parts, has_statistics, 1 if interpret else tile_list_kernel.WARPGROUPS,
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
    blocks_of_statistics = rest[0] if rest else None
    queries, keys = Work(q_tiles, q_counts, k_ranges), Work(k_tiles, k_counts, q_ranges)
    return queries, keys, blocks_of_statistics


def _static(
    operands: Operands,
    sizes: tuple[int, int, int | None, int | None],
    units: tuple[int, int],
    group: int,
    parts: int,
    has_statistics: bool,
    warpgroups: int,
) -> Launch:
    q_rows, kv_rows, max_q, max_kv = sizes
    is_broadcast, index = operands.cu_seqlens_q is None, operands.q_to_kv
    batch_kv = operands.cu_seqlens_kv.shape[0] - 1
    batch = batch_kv if index is None else index.shape[0]
    shared: dict[str, Any] = {
        "is_merged": False,
        "warpgroups": warpgroups,
        "kv_first": 1,
        "size": TILE_ROWS,
    }
    queries = Shape(batch, *sizes, unit=units[0], is_broadcast=is_broadcast, **shared)
    total = q_rows * batch if is_broadcast else q_rows
    keys = KeyShape(
        batch_kv, kv_rows * parts, q_rows, max_kv, max_q, **shared,
        unit=units[1],
        is_broadcast=False,
        group=group,
        streamed_rows=q_rows if is_broadcast else None,
        most_shared=None if index is None else most_blocks(batch, total, units[1]),
        parts=parts,
    )  # fmt: skip
    return Launch(queries, keys, has_statistics, 0)


def _shared(static: Launch, operands: Operands, own: int) -> Shared:
    """The declaration of `Shared`."""
    shapes = (static.queries, static.keys)
    threads = static.queries.warpgroups * WARPGROUP_SIZE
    is_broadcast, is_shared = static.queries.is_broadcast, operands.q_to_kv is not None
    each, batch_kv = memory.Words((own,)), static.keys.sequences * static.keys.parts
    has_sums = static.has_statistics and not is_broadcast
    return Shared(
        parts=memory.Words((12 * (threads // 32),)),
        q_offsets=None if is_broadcast else memory.Words((static.queries.segments + 1,)),
        kv_offsets=memory.Words((operands.cu_seqlens_kv.shape[0] + 2,)),
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
