"""The work of the backward kernels: stationary tiles, and the ranges of streamed rows for each.

XLA computes it here, for what `work_kernel` does not take. A tile is at most `TILE_ROWS` rows of
one sequence. Tiles of sequences with most blocks come first, so that CTAs that take every n-th tile
finish together. Rows of no sequence get tiles without blocks, at the end, so that a kernel writes
all rows of a result.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ikbo_jax.pallas.worklist import counted_order, tile_list, work_order
from ikbo_jax.problems.hopper import TILE_ROWS
from ikbo_jax.reference import jagged

#: Words of a tile: first row that is read, first row that is written, number of rows, begin and end
#: of its ranges, blocks of all its ranges, first row of its statistics; and one that fills a sector
#: of memory.
TILE_WORDS = 8
#: Number of the word with the first row of a tile's statistics.
STATISTICS_ROW = 6
#: Words of a range: first row of the first streamed operand, first row of the second, number of
#: rows, and first row of its statistics.
RANGE_WORDS = 4


class Sequences(NamedTuple):
    """Sequences of queries or of keys, [batch] int32 each.

    Attributes:
      source: first row in the array of queries or keys.
      target: first row in the array of results; differs from `source` if queries are broadcast.
      length: number of rows.
      statistics: first row in the statistics; 0 for keys, and without a softmax.
    """

    source: jax.Array
    target: jax.Array
    length: jax.Array
    statistics: jax.Array


class Work(NamedTuple):
    """The work of one kernel.

    Attributes:
      tiles: [most tiles, TILE_WORDS] int32; entries from `counts[1]` on are not tiles.
      counts: [2] int32: number of tiles with blocks; number of all tiles.
      ranges: [streamed sequences, RANGE_WORDS] int32.
    """

    tiles: jax.Array
    counts: jax.Array
    ranges: jax.Array


def query_work(
    q: Sequences, kv: Sequences, kv_of: jax.Array, total: int, *, block: int, is_bounded: bool
) -> Work:
    """The work of the kernel for queries: a tile takes the keys of one sequence.

    Args:
      q: query sequences.
      kv: key-value sequences.
      kv_of: [batch] int32, the key-value sequence of each query sequence; must be in range.
      total: rows of the result.
      block: rows of a block of keys.
      is_bounded: whether rows between sequences may belong to no sequence (`max_seqlen_q`).
    """
    blocks = -(-kv.length // block)[kv_of]
    return _work(q, kv, kv_of, kv_of + 1, blocks, total, is_bounded)


def key_work(
    kv: Sequences,
    q: Sequences,
    kv_of: jax.Array,
    total: int,
    *,
    block: int,
    group: int,
    is_sorted: bool,
    is_bounded: bool,
    interpret: bool,
) -> Work:
    """The work of the kernel for keys: a tile takes the queries of all sequences that share it.

    Args:
      kv: key-value sequences.
      q: query sequences.
      kv_of: as for `query_work`.
      total: rows of the result.
      block: rows of a block of queries.
      group: query heads of one key head.
      is_sorted: whether query sequence b has key-value sequence b.
      is_bounded: as for `query_work`.
      interpret: whether XLA orders the sequences, since no launch can. Otherwise a launch orders
        them, unless they are too many: XLA's sort of 6,033 takes 45 us on an H100.
    """
    number = jnp.arange(kv.length.size, dtype=jnp.int32)
    blocks = -(-q.length // block) * group
    if is_sorted:
        return _work(kv, q, number, number + 1, blocks, total, is_bounded)
    if interpret:
        order = work_order.by_user(kv_of)
    else:
        order = counted_order.by_user(kv_of, kv.length.size)
    end = jagged.search_right(kv_of[order], number)
    begin = jnp.concatenate([jnp.zeros_like(end, shape=1), end[:-1]])
    q = Sequences(*(x[order] for x in q))
    before = jnp.concatenate([jnp.zeros_like(blocks, shape=1), jnp.cumsum(blocks[order])])
    return _work(kv, q, begin, end, before[end] - before[begin], total, is_bounded)


def _work(
    stationary: Sequences,
    streamed: Sequences,
    begin: jax.Array,
    end: jax.Array,
    blocks: jax.Array,
    total: int,
    is_bounded: bool,
) -> Work:
    gaps = _gaps(stationary, total, is_bounded)
    none = jnp.zeros_like(gaps.length)
    source, target, length, statistics, begin, end, blocks = (
        jnp.concatenate([x, gap])
        for x, gap in zip((*stationary, begin, end, blocks), (*gaps, none, none, none), strict=True)
    )
    most = most_tiles(length.size, total)
    at, first, counts = tile_list.order_tiles(blocks, -(-length // TILE_ROWS), most)
    source, target, length, statistics, *rest = (
        x[at] for x in (source, target, length, statistics, begin, end, blocks)
    )
    start = (jnp.arange(most, dtype=jnp.int32) - first) * TILE_ROWS
    rows = jnp.clip(length - start, 0, TILE_ROWS)
    columns = (source + start, target + start, rows, *rest, statistics + start)
    ranges = jnp.stack(streamed, axis=1)
    padding = [jnp.zeros_like(rows)] * (TILE_WORDS - len(columns))
    return Work(jnp.stack([*columns, *padding], axis=1), counts, ranges)


def most_tiles(sequences: int, total: int) -> int:
    """The largest number of tiles of any `sequences` sequences with `total` rows together."""
    return most_blocks(sequences, total, TILE_ROWS)


def _gaps(stationary: Sequences, total: int, is_bounded: bool) -> Sequences:
    """The rows of no sequence; the sequences' `target` must increase."""
    first, past = stationary.target, stationary.target + stationary.length
    zero, end = jnp.zeros_like(first, shape=1), jnp.full_like(first, total, shape=1)
    if not is_bounded:  # each sequence begins where the previous one ends
        first, past = first[:1], past[-1:]
    begin = jnp.concatenate([zero, past])
    length = jnp.concatenate([first, end]) - begin
    return Sequences(begin, begin, length, jnp.zeros_like(begin))


def most_blocks(sequences: int, total: int, block: int) -> int:
    """The largest number of blocks of any `sequences` sequences with `total` rows together."""
    return jagged.most_tiles(sequences, total, block, None)
