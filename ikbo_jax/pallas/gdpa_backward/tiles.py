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

from ikbo_jax.pallas.flash import counted_order, tile_list, work_order
from ikbo_jax.problems.hopper import TILE_ROWS
from ikbo_jax.reference import jagged
from ikbo_jax.reference.attention import weight_exponents

#: Words of a tile: first row that is read, first row that is written, number of rows, begin and end
#: of its ranges, blocks of all its ranges, first row of its statistics; and one that fills a sector
#: of memory.
TILE_WORDS = 8
#: Number of the word with the first row of a tile's statistics.
STATISTICS_ROW = 6
#: Words of a range: first row of the first streamed operand, first row of the second, number of
#: rows, and first row of its statistics.
RANGE_WORDS = 4
#: Rows of no query at the end of the statistics: a tile that begins with any query ends inside.
ABSENT_ROWS = TILE_ROWS


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


def with_statistics(
    q: Sequences,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    output_scale: float,
    block: int,
) -> tuple[Sequences, jax.Array]:
    """What a softmax's gradient needs of every query: lse in powers of 2, and delta.

    With P = exp(scores - lse), the gradient of a score is P * (d_out @ value.T - delta), where
    delta = sum(d_out * out) / output_scale.

    Args:
      q: query sequences.
      out: [rows, N, H], the result.
      lse: [rows, N] f32.
      d_out: [rows, N, H], cotangent of the result.
      output_scale: of the result.
      block: rows of a block of queries, a multiple of 16.

    Returns:
      `q` with the first row of each sequence's statistics; and [N, 2, statistics rows] int32, the
      bits of f32. A sequence begins with a whole block, so TMA copies begin at whole 64 bytes
      (`attention_backward.rows.statistics` says why), and no block has rows of two sequences. Rows
      of no query, also those at the end, have an infinite lse, hence weights 0, and a delta of 0.
    """
    blocks = -(-q.length // block)
    end = jnp.cumsum(blocks, dtype=jnp.int32)
    first = (end - blocks) * block
    number = jnp.arange(most_blocks(q.length.size, out.shape[0], block), dtype=jnp.int32)
    sequence = jnp.minimum(jagged.search_right(end, number), q.length.size - 1)
    start = number * block - first[sequence]
    rows = jnp.stack((q.target[sequence] + start, q.length[sequence] - start), axis=1)
    values = statistics_of(rows, out, lse, d_out, output_scale=output_scale, block=block)
    return q._replace(statistics=first), values


def statistics_of(
    blocks: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    d_out: jax.Array,
    *,
    output_scale: float,
    block: int,
) -> jax.Array:
    """The second result of `with_statistics`.

    Args:
      blocks: [blocks, 2] int32, the first query of each block in the result, which is arbitrary if
        there is none, and the number of queries from there on; it may exceed `block`.
      out: as for `with_statistics`, like the arguments that follow.
    """
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    # With an output_scale of 0 all gradients are 0, for every delta.
    delta = delta * jnp.float32(1 / output_scale if output_scale else 0)
    delta = jnp.where(lse == -jnp.inf, 0.0, delta)
    both = jnp.stack((weight_exponents(lse), delta))
    position = jnp.arange(block, dtype=jnp.int32)[None]
    is_query = (position < blocks[:, 1:]).reshape(-1)
    row = jnp.where(is_query, (position + blocks[:, :1]).reshape(-1), 0)
    absent = jnp.asarray([jnp.inf, 0.0], jnp.float32)[:, None, None]
    values = jnp.where(is_query[None, :, None], jnp.take(both, row, axis=1, mode="clip"), absent)
    padding = jnp.broadcast_to(absent, (2, ABSENT_ROWS, lse.shape[1]))
    values = jnp.moveaxis(jnp.concatenate([values, padding], axis=1), 2, 0)
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def most_blocks(sequences: int, total: int, block: int) -> int:
    """The largest number of blocks of any `sequences` sequences with `total` rows together."""
    return jagged.most_tiles(sequences, total, block, None)
