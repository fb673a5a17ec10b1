"""Tiles of jagged queries that each CTA finds by itself, without a launch that lists tiles.

Each CTA copies all offsets to shared memory, makes them rise (`segments`), and, unless every
sequence has equally many tiles, adds up tiles. Tiles are in the order of memory; rows of no
sequence come last.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.hopper.per_thread import cdiv
from ikbo_jax.pallas.worklist.scan import running_sums
from ikbo_jax.pallas.worklist.search import count_at_most
from ikbo_jax.pallas.worklist.segments import SegmentContext, load, rise, rows

#: First words of `parts` for the exchange of a maximum and of sums, four words each.
_LONGEST, _SUMS = 8, 12


class Found(NamedTuple):
    """Results of `find`, scalars."""

    tiles: Any  # number of the sequences' tiles
    has_gaps: Any  # whether there are rows of no sequence
    has_rest: Any  # whether a sequence is longer than its bound


def _tiles_of_each(ctx: SegmentContext) -> int | None:
    """Returns how many tiles every sequence has, or None if the numbers differ."""
    if ctx.shared.ends is not None:
        return None
    return pl.cdiv(ctx.shape.q_rows, ctx.shape.size) if ctx.shape.is_broadcast else 1


def find(ctx: SegmentContext) -> Found:
    """Fills shared memory with rising offsets and numbers of tiles; synchronises the threads."""
    shape, shared, threads = ctx.shape, ctx.shared, ctx.threads
    load(ctx)
    longest = rise(ctx)
    threads.commit()
    has_gaps = has_rest = jnp.bool_(False)
    if not shape.is_broadcast:
        if shape.max_seqlen_q is not None:
            most = threads.largest(longest[1], shared.parts, _LONGEST)
            has_rest = most > shape.max_seqlen_q
        last = shared.q_offsets[shape.sequences + 1]
        has_gaps = (shared.q_offsets[1] > 0) | (last < shape.q_rows) | has_rest
    each = _tiles_of_each(ctx)
    tiles = _add_up(ctx) if each is None else jnp.int32(shape.sequences * each)
    return Found(tiles, has_gaps, has_rest)


def _add_up(ctx: SegmentContext) -> Any:
    """Sets ends[s] to the tiles of the sequences up to and with s; returns the number of tiles."""
    shape, shared, threads = ctx.shape, ctx.shared, ctx.threads

    def tiles(numbers: list[jax.Array]) -> list[tuple[jax.Array]]:
        found = [rows(ctx, shared.q_offsets, x + 1) for x in numbers]
        return [(jnp.where(x.is_sequence, cdiv(x.length, shape.size), 0),) for x in found]

    def store(number: jax.Array, before: Any, count: Any) -> None:
        threads.keep(shared.ends, number, before[0] + count[0], number < shape.sequences)

    running_sums(threads, shape.sequences, tiles, store, shared.parts, _SUMS)
    threads.commit()
    return shared.ends[shape.sequences - 1]


def tile(ctx: SegmentContext, number: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Describes tile `number` by the words of a `TileList`; a tile without rows has no keys."""
    shape, shared = ctx.shape, ctx.shared
    each, ends = _tiles_of_each(ctx), shared.ends
    if each is not None:
        sequence, place = lax.div(number, each), lax.rem(number, each)
    else:
        # Sequences whose tiles all come before this one.
        sequence = count_at_most(lambda x: ends[x], shape.sequences, number, jnp.int32(0))
        sequence = jnp.minimum(sequence, shape.sequences - 1)
        place = number - jnp.where(sequence > 0, ends[jnp.maximum(sequence - 1, 0)], 0)
    done = place * shape.size
    kv_start = shared.kv_offsets[sequence]
    kv_length = shared.kv_offsets[sequence + 1] - kv_start
    if shape.max_seqlen_kv is not None:
        kv_length = jnp.minimum(kv_length, shape.max_seqlen_kv)
    if shape.is_broadcast:
        target = sequence * shape.q_rows + done
        return done, target, jnp.minimum(shape.q_rows - done, shape.size), kv_start, kv_length
    start = shared.q_offsets[sequence + 1]
    length = shared.q_offsets[sequence + 2] - start
    if shape.max_seqlen_q is not None:
        length = jnp.minimum(length, shape.max_seqlen_q)
    count = jnp.clip(length - done, 0, shape.size)
    return start + done, start + done, count, kv_start, jnp.where(count > 0, kv_length, 0)


def for_each_gap(
    ctx: SegmentContext, found: Found, workers: int, heads: int, store: Callable[..., None]
) -> None:
    """Calls `store` with (first row, rows, head) of this CTA's tiles of rows of no sequence.

    Gap 0 lies before the first sequence, 1 after the last sequence. Further gaps are rows past a
    sequence's bound, and belong to one CTA each.
    """
    shape, offsets = ctx.shape, ctx.shared.q_offsets
    if shape.is_broadcast:
        return
    rests = lax.div(shape.sequences - ctx.worker + (workers - 1), workers)
    count = jnp.where(found.has_gaps, 2 + jnp.where(found.has_rest, rests, 0), 0)

    @pl.loop(0, count)
    def _(gap: Any) -> None:
        is_shared, last = gap < 2, offsets[shape.sequences + 1]
        start = jnp.where(gap == 0, 0, last)
        end = jnp.where(gap == 0, offsets[1], shape.q_rows)
        if shape.max_seqlen_q is not None:
            sequence = jnp.clip(ctx.worker + (gap - 2) * workers, 0, shape.sequences - 1)
            rest_end = offsets[sequence + 2]
            rest = jnp.minimum(offsets[sequence + 1] + shape.max_seqlen_q, rest_end)
            start, end = jnp.where(is_shared, start, rest), jnp.where(is_shared, end, rest_end)
        first, step = jnp.where(is_shared, ctx.worker, 0), jnp.where(is_shared, workers, 1)
        rows = end - start
        tiles = lax.div(rows + (shape.size - 1), shape.size) * heads

        @pl.loop(0, lax.div(jnp.maximum(tiles - first, 0) + (step - 1), step))
        def _(i: Any) -> None:
            number = first + i * step
            done = lax.div(number, heads) * shape.size
            count = jnp.minimum(rows - done, shape.size)
            store(start + done, count, lax.rem(number, heads))
