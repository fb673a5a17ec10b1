"""Lists tiles and ranges of jagged sequences by XLA: more than fit shared memory, or interpreted.

A tile is some rows of one *segment*: a sequence of queries or keys; consecutive sequences of
queries that attend to the same keys; or rows of no sequence, whose results are zeros. Tiles whose
segments have most blocks come first, and tiles without work last, so that CTAs which take every
n-th tile finish together. A list is long enough for any offsets.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ikbo_jax.pallas.hopper import mosaic
from ikbo_jax.pallas.worklist import counted_order
from ikbo_jax.pallas.worklist.keys_of_tile import keys_of_tile
from ikbo_jax.pallas.worklist.lists import (
    KV_LENGTH,
    KV_START,
    STATISTICS_ROW,
    Offsets,
    TileList,
    Work,
    Works,
    WorkSettings,
    early_keys,
)
from ikbo_jax.problems.hopper import TILE_ROWS
from ikbo_jax.reference import jagged
from ikbo_jax.reference.hstu import Sequence


def is_preferred() -> bool:
    """Returns whether kernels are interpreted, which runs lists and sums thread by thread."""
    return mosaic.is_interpreted()


class _Rows(NamedTuple):
    """Rows of sequences or gaps, [count] int32 each."""

    source: jax.Array  # first row that is read
    target: jax.Array  # first row that is written
    length: jax.Array


def query_tiles(offsets: Offsets, *, size: int, unit: int = 1) -> TileList:
    """Lists tiles of queries; `tiles.query_tiles` describes the arguments."""
    (q, *gaps), keys = _queries(offsets), _keys_of_queries(offsets)
    words = keys.source, keys.length
    if offsets.q_to_kv is not None and not offsets.is_broadcast:
        q = _merge_neighbours(q, words)
    columns, _, counts = _cut(
        [q, *gaps], words, -(-words[1] // unit), size=size, total=offsets.result_rows
    )
    return TileList(jnp.stack(columns, axis=1), counts)


def masked_tiles(
    offsets: Offsets, *, size: int, unit: int, keys_per_group: int | None = None
) -> TileList:
    """Lists tiles of queries that have a rule, as `masked.masked_tiles` does."""
    rule = offsets.rule
    assert rule is not None
    (q, *gaps), keys = _queries(offsets), _keys_of_queries(offsets)
    numbers = (
        jnp.zeros_like(q.length) if x is None else x
        for x in (offsets.contextual, offsets.num_targets)
    )
    words = (keys.source, keys.length, keys.length - q.length, *numbers)
    (*rows, kv_start, kv_length, position, contextual, targets), done, counts = _cut(
        [q, *gaps], words, keys.length, size=size, total=offsets.result_rows
    )
    sequence = Sequence(kv_length, contextual, targets)
    first, count, mask = keys_of_tile(
        rule, position + done, jnp.maximum(rows[2], 1), sequence, unit
    )
    columns = (*rows, kv_start + first, count, *mask)
    listed = jnp.stack([x + jnp.zeros_like(done) for x in columns], axis=1)
    return by_blocks(TileList(listed, counts), unit, keys_per_group, early_keys(rule))


def by_blocks(
    listed: TileList, unit: int, keys_per_group: int | None = None, early: int | None = None
) -> TileList:
    """Sorts tiles by groups of keys, then by falling numbers of blocks; those without are last.

    Tiles of more than `early` keys come before all groups.
    """
    is_tile = jnp.arange(listed.words.shape[0], dtype=jnp.int32) < listed.counts[1]
    blocks = jnp.where(is_tile, -(-listed.words[:, KV_LENGTH] // unit), -1)
    groups = listed.words[:, KV_START] // (keys_per_group or 2**31 - 1)
    if early is not None:
        groups = jnp.where(listed.words[:, KV_LENGTH] > early, 0, groups)
    groups = jnp.where(blocks > 0, groups, 2**31 - 1)
    words = listed.words[jnp.lexsort((-blocks, groups))]
    return TileList(words, listed.counts.at[0].set(jnp.sum(blocks > 0, dtype=jnp.int32)))


def works(offsets: Offsets, settings: WorkSettings) -> Works:
    """Lists the work of both backward kernels, as `works.works` does.

    Under interpretation, XLA orders sequences that share keys; otherwise a launch, if they fit it.
    """
    key_block, parts = settings.key_block, settings.parts
    (q, *gaps), (kv, *kv_gaps) = _queries(offsets), _keys(offsets)
    number = jnp.arange(offsets.sequences, dtype=jnp.int32)
    batch_kv = kv.source.size
    kv_of = number if offsets.q_to_kv is None else jnp.clip(offsets.q_to_kv, 0, batch_kv - 1)
    blocks = -(-q.length // key_block)
    statistics, rows = jnp.zeros_like(number), None
    if settings.has_statistics:
        ends = jnp.cumsum(blocks, dtype=jnp.int32)
        statistics = (ends - blocks) * key_block
        rows = _blocks(offsets, q, ends, key_block)
    words = (kv_of, kv_of + 1, -(-kv.length // settings.query_block)[kv_of], statistics)
    kv_ranges = _ranges(kv, jnp.zeros_like(kv.source))
    queries = _work([q, *gaps], words, kv_ranges, offsets.result_rows)
    blocks *= settings.group
    begin = jnp.arange(batch_kv * parts, dtype=jnp.int32)
    end = begin + 1
    if offsets.q_to_kv is not None:  # every n-th sequence of queries belongs to copy n of the keys
        kv_of = kv_of + number % parts * batch_kv
        order = counted_order.ordered(None, kv_of, batch_kv * parts).order
        q, statistics = _Rows(*(x[order] for x in q)), statistics[order]
        end = jagged.search_right(kv_of[order], begin)
        begin = jnp.concatenate([jnp.zeros_like(end, shape=1), end[:-1]])
        sums = jnp.cumsum(blocks[order], dtype=jnp.int32)
        sums = jnp.concatenate([jnp.zeros_like(sums, shape=1), sums])
        blocks = sums[end] - sums[begin]
    segments = [
        _Rows(x.source + part * offsets.kv_rows, x.target + part * offsets.kv_rows, x.length)
        for x in (kv, *kv_gaps)
        for part in range(parts)
    ]
    words = (begin, end, blocks, jnp.zeros_like(begin))
    keys = _work(segments, words, _ranges(q, statistics), offsets.kv_rows * parts)
    return Works(queries, keys, rows)


def _queries(offsets: Offsets) -> list[_Rows]:
    if offsets.cu_seqlens_q is not None:
        return _segments(offsets.cu_seqlens_q, offsets.q_rows, offsets.max_seqlen_q)
    number = jnp.arange(offsets.sequences, dtype=jnp.int32)
    length = jnp.full_like(number, offsets.q_rows)
    return [_Rows(jnp.zeros_like(number), number * offsets.q_rows, length)]


def _keys(offsets: Offsets) -> list[_Rows]:
    return _segments(offsets.cu_seqlens_kv, offsets.kv_rows, offsets.max_seqlen_kv)


def _keys_of_queries(offsets: Offsets) -> _Rows:
    """Finds the keys of each sequence of queries."""
    keys = _keys(offsets)[0]
    if offsets.q_to_kv is None:
        return keys
    index = jnp.clip(offsets.q_to_kv, 0, keys.source.size - 1)
    return _Rows(*(x[index] for x in keys))


def _segments(cu_seqlens: jax.Array, total: int, longest: int | None) -> list[_Rows]:
    """Finds rows of sequences; and of none: before the first, after the last, and past a bound."""
    start, whole = jagged.bounds(cu_seqlens, total, None)
    length = whole if longest is None else jnp.minimum(whole, longest)
    zero = jnp.zeros_like(start, shape=1)
    begin = jnp.concatenate([zero, (start + whole)[-1:]])
    found = [
        _Rows(start, start, length),
        _Rows(begin, begin, jnp.concatenate([start[:1], zero + total]) - begin),
    ]
    past = start + length
    return found if longest is None else [*found, _Rows(past, past, whole - length)]


def _merge_neighbours(rows: _Rows, keys: tuple[jax.Array, ...]) -> _Rows:
    """Merges adjacent sequences with the same keys into the first; the others get length 0."""
    start, end, count = rows.source, rows.source + rows.length, rows.source.size
    is_different = start[1:] != end[:-1]
    for x in keys:
        is_different |= x[1:] != x[:-1]
    is_first = jnp.concatenate([jnp.ones_like(is_different, shape=min(count, 1)), is_different])
    index = jnp.where(is_first, jnp.arange(count, dtype=jnp.int32), count)
    # For each sequence, the index of the next one that is not merged into it.
    after = jnp.append(lax.cummin(index, reverse=True)[1:], jnp.int32(count))[:count]
    return rows._replace(length=jnp.where(is_first, end[after - 1] - start, 0))


def _cut(
    segments: list[_Rows], words: tuple[jax.Array, ...], cost: jax.Array, *, size: int, total: int
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Cuts sequences, then gaps, of `total` rows, into tiles of at most `size` rows.

    `words` and `cost` are of the sequences, and 0 of gaps. The most expensive sequences come first.
    Returns the columns of a list of tiles: first rows read and written, numbers of rows, and
    `words`; the tiles' first rows in their segments; and the counts of tiles with a cost and of all
    tiles.
    """
    source, target, length = map(jnp.concatenate, zip(*segments, strict=True))
    cost, *columns = (jnp.pad(x, (0, length.size - x.size)) for x in (cost, *words))
    tiles = -(-length // size)
    counts = jnp.stack([jnp.where(cost > 0, tiles, 0), tiles]).sum(axis=1, dtype=jnp.int32)
    order = jnp.argsort(-cost, stable=True)
    ends = jnp.cumsum(tiles[order], dtype=jnp.int32)
    number = jnp.arange(max(jagged.most_tiles(length.size, total, size), 1), dtype=jnp.int32)
    place = jnp.minimum(jagged.search_right(ends, number), length.size - 1)
    segment = order[place]
    start = (number - (ends - tiles[order])[place]) * size
    source, target, length, *columns = (x[segment] for x in (source, target, length, *columns))
    rows = jnp.clip(length - start, 0, size)
    return [source + start, target + start, rows, *columns], start, counts


def _work(
    segments: list[_Rows], words: tuple[jax.Array, ...], ranges: jax.Array, total: int
) -> Work:
    """Lists tiles of one kernel; `words`: begin, end and blocks of ranges, first statistics."""
    columns, start, counts = _cut(segments, words, words[2], size=TILE_ROWS, total=total)
    columns[STATISTICS_ROW] += start
    return Work(jnp.stack([*columns, jnp.zeros_like(start)], axis=1), counts, ranges)


def _ranges(rows: _Rows, statistics: jax.Array) -> jax.Array:
    return jnp.stack((rows.source, rows.target, rows.length, statistics), axis=1)


def _blocks(offsets: Offsets, q: _Rows, ends: jax.Array, size: int) -> jax.Array:
    """Lists `Works.blocks`; `ends` are running sums of the sequences' blocks."""
    count = jagged.most_tiles(offsets.sequences, offsets.result_rows, size)
    number = jnp.arange(count, dtype=jnp.int32)
    sequence = jnp.minimum(jagged.search_right(ends, number), ends.size - 1)
    before = ends - -(-q.length // size)
    start = (number - before[sequence]) * size
    columns = q.target[sequence] + start, q.length[sequence] - start, start, sequence
    return jnp.stack(columns, axis=1)
