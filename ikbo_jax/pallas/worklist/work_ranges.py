"""Ranges and statistics of queries, in the launch that lists the backward kernels' tiles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper.per_thread import cdiv, same
from ikbo_jax.pallas.worklist.tile_list_kernel import store_words
from ikbo_jax.pallas.worklist.work_context import WorkContext

#: Sequences of each thread in one turn of a loop.
UNROLL = 4


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
            index = same(0)  # the last segment whose blocks begin at this one or before
            for bit in reversed(range(sequences.bit_length())):
                further = index + (1 << bit)
                begin = threads.read(shared.statistics, jnp.minimum(further, sequences))
                index = jnp.where((further <= sequences) & (begin <= block), further, index)
        start, length = queries_of(ctx, index)
        done = (block - blocks_before(ctx, index)) * unit
        rows = jnp.clip(length - done, 0, unit)
        rows = jnp.where((index >= static.first) & (index < static.end), rows, 0)
        store_words(ctx, ctx.outputs.blocks, block, (start + done, rows), block < count)
