"""Lists of tiles of jagged sequences, before a kernel's launch; computed by XLA in this module.

A tile is some rows of one *segment*.  A segment is a sequence of queries; or consecutive sequences
of queries that attend to the same keys; or a gap between sequences, whose results are zeros.  Tiles
with most keys come first, and tiles without keys last, so that CTAs which take every n-th tile
finish together, and the pipelined loops of a kernel contain no tile without keys.

The list is long enough for any offsets; only the device knows the number of tiles.  All positions
are counted by comparisons, in a few fused kernels: one sort or scan of a thousand numbers would
take as long as all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ikbo_jax.reference.jagged import search_right

#: Words of a tile in `TileList.words`: first row in the array that is read, first row in the array
#: that is written, number of rows; first row and number of its keys.
SOURCE, TARGET, ROWS, KV_START, KV_LENGTH = range(5)
TILE_WORDS = 5
#: Up to this number of segments, comparing all pairs is cheaper than sorting.
MOST_COMPARED = 8192


class TileList(NamedTuple):
    """Tiles in the order in which the kernel computes them.

    Attributes:
      words: [most tiles, TILE_WORDS] int32.
      counts: [2] int32: number of tiles with keys, which come first; number of all tiles.
    """

    words: jax.Array
    counts: jax.Array


class _Segments(NamedTuple):
    """[segments] int32 each: first row read, first row written, rows; first key, number of keys."""

    source: jax.Array
    target: jax.Array
    length: jax.Array
    kv_start: jax.Array
    kv_length: jax.Array


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
) -> TileList:
    """The list of tiles of queries.

    Args:
      cu_seqlens_q: [batch + 1] int32; None: all sequences have the same `q_rows` queries, and their
        results follow one another.
      cu_seqlens_kv: [batch_kv + 1] int32.
      q_to_kv: [batch] int32, clamped; None: query sequence b attends to key-value sequence b.
      q_rows: rows of the queries' array.
      kv_rows: rows of the keys' array.
      max_seqlen_q: longest sequence of queries, or None; rows beyond it are a gap.
      max_seqlen_kv: longest sequence of keys, or None; keys beyond it are ignored.
      size: largest number of rows of a tile.
      unit: keys of a block; sequences with equally many blocks stay in order.
    """
    q_offsets, kv_offsets = _increasing((cu_seqlens_q, cu_seqlens_kv), (q_rows, kv_rows))
    kv_start, kv_length, _ = _sequences(kv_offsets, max_seqlen_kv)
    if q_to_kv is not None:
        index = jnp.clip(q_to_kv, 0, kv_start.size - 1)
        kv_start, kv_length = kv_start[index], kv_length[index]
    if q_offsets is None:
        number = jnp.arange(kv_start.size, dtype=jnp.int32)
        length = jnp.full_like(number, q_rows)
        segments = _Segments(jnp.zeros_like(number), number * q_rows, length, kv_start, kv_length)
        return _cut(segments, size, number.size * q_rows, unit)
    start, length, end = _sequences(q_offsets, max_seqlen_q)
    segments = _Segments(start, start, length, kv_start, kv_length)
    gaps = _gaps(segments, end, q_rows, max_seqlen_q)
    if q_to_kv is not None and q_to_kv.size > 1:
        segments = _merge_neighbours(segments)
    both: _Segments = jax.tree.map(lambda *x: jnp.concatenate(x), segments, gaps)
    return _cut(both, size, q_rows, unit)


def _increasing(
    cu_seqlens: tuple[jax.Array | None, jax.Array], totals: tuple[int, int]
) -> tuple[jax.Array | None, jax.Array]:
    """Offsets of queries and of keys, made to rise monotonically within [0, total]."""
    q, kv = cu_seqlens
    if q is None:
        return None, _running_maximum(jnp.clip(kv, 0, totals[1]))
    clipped = [jnp.clip(x, 0, total) for x, total in zip((q, kv), totals, strict=True)]
    if q.shape != kv.shape:
        return _running_maximum(clipped[0]), _running_maximum(clipped[1])
    both = _running_maximum(jnp.stack(clipped))  # one kernel instead of two
    return both[0], both[1]


def _running_maximum(x: jax.Array) -> jax.Array:
    """Running maximum along the last axis of x >= 0."""
    if x.shape[-1] > MOST_COMPARED:
        return lax.cummax(x, axis=x.ndim - 1)
    position = jnp.arange(x.shape[-1], dtype=jnp.int32)
    is_before = position[None] <= position[:, None]
    return jnp.max(jnp.where(is_before, x[..., None, :], 0), axis=-1)


def _sequences(
    offsets: jax.Array, max_seqlen: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(first rows, lengths, first rows of the next sequences)."""
    length = offsets[1:] - offsets[:-1]
    if max_seqlen is not None:
        length = jnp.minimum(length, max_seqlen)
    return offsets[:-1], length, offsets[1:]


def _merge_neighbours(segments: _Segments) -> _Segments:
    """Merges adjacent segments with the same keys into the first of them; the others get length 0.

    Candidates of one request are such segments: merged, they fill whole tiles.
    """
    start, end = segments.source, segments.source + segments.length
    is_different = start[1:] != end[:-1]
    for keys in (segments.kv_start, segments.kv_length):
        is_different |= keys[1:] != keys[:-1]
    is_first = jnp.concatenate([jnp.ones(1, bool), is_different])
    index = jnp.arange(start.size, dtype=jnp.int32)
    # For each segment, the index of the next segment that is not merged into it.
    if start.size > MOST_COMPARED:
        after = lax.cummin(jnp.where(is_first, index, start.size), reverse=True)
        after = jnp.concatenate([after[1:], jnp.full(1, start.size, jnp.int32)])
    else:
        is_after = is_first[None] & (index[None] > index[:, None])
        after = jnp.min(jnp.where(is_after, index[None], start.size), axis=1)
    return segments._replace(length=jnp.where(is_first, end[after - 1] - start, 0))


def _gaps(segments: _Segments, end: jax.Array, total: int, max_seqlen: int | None) -> _Segments:
    """Segments of the rows that belong to no sequence."""
    first, last = segments.source[:1], end[-1:]
    starts = [jnp.zeros_like(first), last]
    lengths = [first, total - last]
    if max_seqlen is not None:
        starts.append(segments.source + segments.length)
        lengths.append(end - starts[-1])
    start, length = jnp.concatenate(starts), jnp.concatenate(lengths)
    nothing = jnp.zeros_like(start)
    return _Segments(start, start, length, nothing, nothing)


def _cut(segments: _Segments, size: int, total: int, unit: int) -> TileList:
    """Cuts `segments`, which have `total` rows, into tiles of at most `size` rows."""
    nonempty = min(segments.length.size, total)
    most = max(nonempty + (total - nonempty) // size, 1)
    cost = -(-segments.kv_length // unit)
    segment, first, counts = order_tiles(cost, -(-segments.length // size), most)
    start = (jnp.arange(most, dtype=jnp.int32) - first) * size
    rows = jnp.clip(segments.length[segment] - start, 0, size)
    rows_of_tile = (segments.source[segment] + start, segments.target[segment] + start, rows)
    words = jnp.stack(
        [*rows_of_tile, segments.kv_start[segment], segments.kv_length[segment]], axis=1
    )
    return TileList(words, counts)


def order_tiles(
    cost: jax.Array, tiles: jax.Array, most: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Orders the tiles of all segments by falling `cost`, stably.

    Args:
      cost: [segments] int32, at least 0.
      tiles: [segments] int32, number of tiles of each segment.
      most: length of the list, at least the number of all tiles.

    Returns:
      segment [most] int32, of the tile at each list position; first [most] int32, position of that
      segment's first tile; and [2] int32: number of tiles with cost > 0, and of all tiles. Beyond
      the last tile, segment and first are arbitrary.
    """
    segments = tiles.size
    counts = jnp.stack([jnp.where(cost > 0, tiles, 0), tiles]).sum(axis=1, dtype=jnp.int32)
    if segments > MOST_COMPARED or most * segments >= 2**31:
        return *_order_sorted(cost, tiles, most), counts
    number = jnp.arange(segments, dtype=jnp.int32)
    # One sort key holds cost and number, so that one comparison suffices. Costs that exceed its
    # range count as equal: the order only affects speed.
    key = jnp.minimum(cost, (2**31 - 1) // segments - 1) * segments - number
    first = jnp.sum(jnp.where(key[None] > key[:, None], tiles[None], 0), axis=1, dtype=jnp.int32)
    # Likewise, one code holds a segment's first position and its number. The segment at a position
    # has the largest code whose first position is not past it.
    code = jnp.where(tiles > 0, first * segments + number, 0)
    past = (jnp.arange(most, dtype=jnp.int32) + 1) * segments
    found = jnp.max(jnp.where(code[None] < past[:, None], code[None], 0), axis=1)
    return found % segments, found // segments, counts


def _order_sorted(cost: jax.Array, tiles: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """(segment, first) of `order_tiles`, for many segments."""
    order = jnp.argsort(-cost, stable=True).astype(jnp.int32)
    tiles = tiles[order]
    end = jnp.cumsum(tiles)
    number = jnp.arange(most, dtype=jnp.int32)
    # Unrolled, the search becomes part of one fused kernel.
    segment = jnp.minimum(search_right(end, number), end.size - 1)
    return order[segment], (end - tiles)[segment]
