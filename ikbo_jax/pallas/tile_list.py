"""Lists of tiles of jagged sequences, made by XLA before a kernel runs, from offsets on the device.

A tile is some rows of one *segment*: of a sequence of queries, of neighbouring sequences that meet
the same keys, or of a gap between sequences, whose results are zeros.  It meets the keys of its
sequence, the *other* side.  Tiles with most keys come first and those without any last, so that
CTAs which take every n-th tile finish together, and so that a pipeline never meets an empty tile.

The list is as long as any offsets can need; how many tiles there are is known on the device only.
Everything is counting by comparison, in a few fused kernels: a sort or a scan of a thousand numbers
would take as long as all of it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

#: Words of a tile in `TileList.words`: first row in the array that is read, first row in the array
#: that is written, rows; first and number of what it meets on the other side.
SOURCE, TARGET, ROWS, KV_START, KV_LENGTH = range(5)
TILE_WORDS = 5
#: Segments up to which comparing all pairs is cheaper than sorting.
MOST_COMPARED = 8192


class TileList(NamedTuple):
    """Tiles in the order in which they are worked on.

    Attributes:
      words: [most, TILE_WORDS] int32.
      counts: [2] int32: tiles that meet anything, which come first, and all tiles.
    """

    words: jax.Array
    counts: jax.Array


class _Segments(NamedTuple):
    """[segments] int32 each; `others` is what a segment's tiles cost."""

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
) -> TileList:
    """Tiles of queries; OTHER is the first row of a tile's keys and OTHERS their number.

    Args:
      cu_seqlens_q: [batch + 1] int32; None: every sequence has the same `q_rows` queries, and the
        rows that are written follow sequence after sequence.
      cu_seqlens_kv: [batch_kv + 1] int32.
      q_to_kv: [batch] int32, clamped, or None: each its own.
      q_rows: rows of the queries' array.
      kv_rows: rows of the keys' array.
      max_seqlen_q: rows of a sequence beyond it are a gap; or None.
      max_seqlen_kv: keys of a sequence beyond it are not met; or None.
      size: rows of a tile, at most.
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
        return _cut(segments, size, number.size * q_rows)
    start, length, end = _sequences(q_offsets, max_seqlen_q)
    segments = _Segments(start, start, length, kv_start, kv_length)
    gaps = _gaps(segments, end, q_rows, max_seqlen_q)
    if q_to_kv is not None and q_to_kv.size > 1:
        segments = _merge_neighbours(segments)
    both: _Segments = jax.tree.map(lambda *x: jnp.concatenate(x), segments, gaps)
    return _cut(both, size, q_rows)


def _increasing(
    cu_seqlens: tuple[jax.Array | None, jax.Array], totals: tuple[int, int]
) -> tuple[jax.Array | None, jax.Array]:
    """Offsets that increase within [0, total], whatever they hold; of both sides."""
    q, kv = cu_seqlens
    if q is None:
        return None, _running_maximum(jnp.clip(kv, 0, totals[1]))
    clipped = [jnp.clip(x, 0, total) for x, total in zip((q, kv), totals, strict=True)]
    if q.shape != kv.shape:
        return _running_maximum(clipped[0]), _running_maximum(clipped[1])
    both = _running_maximum(jnp.stack(clipped))  # one kernel instead of two
    return both[0], both[1]


def _running_maximum(x: jax.Array) -> jax.Array:
    """Of the last axis; nothing is below 0."""
    if x.shape[-1] > MOST_COMPARED:
        return lax.cummax(x, axis=x.ndim - 1)
    position = jnp.arange(x.shape[-1], dtype=jnp.int32)
    is_before = position[None] <= position[:, None]
    return jnp.max(jnp.where(is_before, x[..., None, :], 0), axis=-1)


def _sequences(
    offsets: jax.Array, max_seqlen: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """First rows, lengths and where the next ones begin."""
    length = offsets[1:] - offsets[:-1]
    if max_seqlen is not None:
        length = jnp.minimum(length, max_seqlen)
    return offsets[:-1], length, offsets[1:]


def _merge_neighbours(segments: _Segments) -> _Segments:
    """Neighbours that meet the same keys as one, which the first of them stands for.

    Candidates of one request are such neighbours: joined, they fill whole tiles.
    """
    start, end = segments.source, segments.source + segments.length
    is_different = start[1:] != end[:-1]
    for keys in (segments.kv_start, segments.kv_length):
        is_different |= keys[1:] != keys[:-1]
    is_first = jnp.concatenate([jnp.ones(1, bool), is_different])
    index = jnp.arange(start.size, dtype=jnp.int32)
    # The first one of the next run, for each.
    if start.size > MOST_COMPARED:
        after = lax.cummin(jnp.where(is_first, index, start.size), reverse=True)
        after = jnp.concatenate([after[1:], jnp.full(1, start.size, jnp.int32)])
    else:
        is_after = is_first[None] & (index[None] > index[:, None])
        after = jnp.min(jnp.where(is_after, index[None], start.size), axis=1)
    return segments._replace(length=jnp.where(is_first, end[after - 1] - start, 0))


def _gaps(segments: _Segments, end: jax.Array, total: int, max_seqlen: int | None) -> _Segments:
    """The rows of no sequence."""
    first, last = segments.source[:1], end[-1:]
    starts = [jnp.zeros_like(first), last]
    lengths = [first, total - last]
    if max_seqlen is not None:
        starts.append(segments.source + segments.length)
        lengths.append(end - starts[-1])
    start, length = jnp.concatenate(starts), jnp.concatenate(lengths)
    nothing = jnp.zeros_like(start)
    return _Segments(start, start, length, nothing, nothing)


def _cut(segments: _Segments, size: int, total: int) -> TileList:
    """The list of all tiles of at most `size` rows of `segments`, which have `total` rows."""
    nonempty = min(segments.length.size, total)
    most = max(nonempty + (total - nonempty) // size, 1)
    segment, first, counts = order_tiles(segments.kv_length, -(-segments.length // size), most)
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
    """Lists tiles of segments, those of the largest `cost` first, in order where costs are equal.

    Args:
      cost: [segments] int32, at least 0.
      tiles: [segments] int32, tiles of a segment.
      most: length of the list, which is enough for all of them.

    Returns:
      The segment of each place of the list [most]; the place of its first tile [most]; and [2]
      int32: tiles of segments that cost anything, and all tiles. Places past those have any
      segment.
    """
    segments = tiles.size
    counts = jnp.stack([jnp.where(cost > 0, tiles, 0), tiles]).sum(axis=1, dtype=jnp.int32)
    if segments > MOST_COMPARED or most * segments >= 2**31:
        return *_order_sorted(cost, tiles, most), counts
    number = jnp.arange(segments, dtype=jnp.int32)
    # One key for cost and number, so that there is one comparison. Costs that it has no room for
    # count as one: the order is for speed.
    key = jnp.minimum(cost, (2**31 - 1) // segments - 1) * segments - number
    first = jnp.sum(jnp.where(key[None] > key[:, None], tiles[None], 0), axis=1, dtype=jnp.int32)
    # Likewise one number for a segment's first place and the segment: the largest one that does
    # not lie past a place is that of the segment there.
    code = jnp.where(tiles > 0, first * segments + number, 0)
    past = (jnp.arange(most, dtype=jnp.int32) + 1) * segments
    found = jnp.max(jnp.where(code[None] < past[:, None], code[None], 0), axis=1)
    return found % segments, found // segments, counts


def _order_sorted(cost: jax.Array, tiles: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Segments and their first places, for many segments."""
    order = jnp.argsort(-cost, stable=True).astype(jnp.int32)
    tiles = tiles[order]
    end = jnp.cumsum(tiles)
    number = jnp.arange(most, dtype=jnp.int32)
    # Unrolled, the search is part of one fused kernel.
    segment = jnp.searchsorted(end, number, side="right", method="scan_unrolled").astype(jnp.int32)
    segment = jnp.minimum(segment, end.size - 1)
    return order[segment], (end - tiles)[segment]
