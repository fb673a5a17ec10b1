"""Masks of the backward kernels: which blocks a tile loads, and which scores of a block count.

A query row sees a range of the keys of its sequence, without a gap. XLA describes every block of 64
queries (*group*, as of a softmax's statistics): the keys that its rows see. For each tile, XLA
counts the blocks that one of its rows sees, and finds a run of *whole* blocks, which need no mask.
It sorts the tiles so that those whose blocks are neighbours run at the same time. The producer
sends whole blocks first. For the other blocks it makes XLA's comparisons again, and says which
consumers skip or mask them. Weights and gradients of scores that a row does not see become 0.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ikbo_jax.pallas.activations import slopes as gdpa_slopes
from ikbo_jax.pallas.gdpa_backward import stored
from ikbo_jax.pallas.gdpa_backward.context import FIRST, FLAGS, ORIGIN, BackwardContext
from ikbo_jax.pallas.hopper import mosaic, seen
from ikbo_jax.pallas.hopper.visible import ranges_and_gaps
from ikbo_jax.pallas.worklist.lists import STATISTICS_ROW, Offsets, Work, Works, WorkSettings
from ikbo_jax.problems.hopper import NUM_CONSUMERS, TILE_ROWS, WGMMA_M
from ikbo_jax.reference import hstu, jagged

#: Flags of a consumer, which has `FLAG_BITS`: some row's range begins or ends in the block; some
#: row's gap does; or no row sees a key.
CUT, GAP, UNSEEN = 1, 2, 4
FLAG_BITS, ALL_FLAGS = 3, 7
NO_ROW_SEES = UNSEEN | UNSEEN << FLAG_BITS
#: Words of a tile: blocks of all heads that its rows see; the first one, counted from the first
#: block of the keys' sequence, or of all queries; first and last block plus 1 of the first blocks
#: in a row that no row of the tile needs a mask for.
BLOCK_COUNT, BEGIN_BLOCK, WHOLE_BEGIN, WHOLE_END = 5, 7, 8, 9
TILE_WORDS = 10
#: Words of a group, first and last key plus 1 each: of the keys that a row sees, of those in the
#: ranges of all rows, of those around all gaps, of those in the gaps of all rows.
SEEN, IN_RANGES, NEAR_GAPS, IN_GAPS = 0, 2, 4, 6
GROUP_WORDS = 8
#: So many tiles of both kernels are sorted by comparing all pairs: XLA's sort takes 11 us for 1,024
#: tiles, comparisons 2 to 4.
MOST_COMPARED = 4096


class Masks(NamedTuple):
    """Device memory, for rows in the order of a softmax's statistics; `stored` describes the
    others.

    `rows` [2, rows, 2] int32 are begin and end of every row's range, and of the gap in it; `groups`
    are [groups, GROUP_WORDS] int32.
    """

    rows: Any
    groups: Any
    places: Any = None
    d_scores: Any = None


def _is_cut(words: Callable[[int], Any], key: Any, end: Any) -> tuple[Any, Any]:
    """Whether some row's range begins or ends in the keys [key, end); and whether a gap does."""
    begins, ends = words(IN_RANGES)
    is_cut = (key < begins) | (end > ends)
    begins, ends = words(NEAR_GAPS)
    return is_cut, (key < ends) & (end > begins)


def _sees_none(words: Callable[[int], Any], key: Any, end: Any) -> Any:
    """Whether no row of a group sees the keys [key, end); `words` reads two words of the group."""
    begins, ends = words(IN_GAPS)
    is_hole = (key >= begins) & (end <= ends)
    begins, ends = words(SEEN)
    return is_hole | (key >= ends) | (end <= begins)


# Host side


def mask_work(
    works: Works,
    offsets: Offsets,
    intervals: jax.Array,
    settings: WorkSettings,
    rows_of_groups: tuple[int, int],
    *,
    stores: bool = False,
) -> tuple[Works, Masks]:
    """Leaves the blocks that rows of a tile see to the tile; sorts tiles by groups, then by blocks.

    `works` have statistics, and blocks of 64 queries. `intervals` [rows of the result, 4] int32 are
    as in `reference.gdpa.Arrays`. `rows_of_groups` says how many neighbouring rows, of keys and of
    queries, make a group. `stores`: whether gradients of scores have places.
    """
    assert works.blocks is not None
    position = jnp.arange(WGMMA_M, dtype=jnp.int32)
    blocks = jnp.pad(works.blocks, ((0, TILE_ROWS // WGMMA_M), (0, 0)))
    is_row = position[None] < blocks[:, 1:2]
    if offsets.rule is None:
        number = jnp.where(is_row, blocks[:, :1] + position[None], 0)
        found = ranges_and_gaps(intervals.at[number].get(mode="clip"))
    else:
        found = _seen_by_rule(offsets.rule, offsets, blocks[:, 3], blocks[:, 2:3] + position[None])
    found = jnp.where(is_row[..., None], found, 0)
    # The barrier keeps XLA from computing and storing ranges twice.
    rows = lax.optimization_barrier(jnp.stack((found[..., :2], found[..., 2:])))
    groups = _groups(rows[:, : len(works.blocks)], is_row)
    masks = Masks(
        rows.reshape(2, -1, 2), jnp.pad(jnp.stack(groups, axis=1), ((0, NUM_CONSUMERS), (0, 0)))
    )
    of_each = _seen_keys(works, offsets, masks.groups, settings)
    queries, of_queries = _with_blocks(works.queries, of_each, rows_of_groups[0])
    of_each = _seen_queries(works, offsets, groups, settings.parts)
    keys, of_keys = _with_blocks(works.keys, of_each, rows_of_groups[1], settings.group)
    if stores:
        tiles, places = stored.with_places(keys.tiles, of_each.is_seen, offsets)
        keys, masks = keys._replace(tiles=tiles), masks._replace(places=places)
    order = _order(jnp.concatenate((of_queries, of_keys + 2**30)))
    count = queries.tiles.shape[0]
    queries = queries._replace(tiles=queries.tiles.at[order[:count]].get(mode="clip"))
    keys = keys._replace(tiles=keys.tiles.at[order[count:] - count].get(mode="clip"))
    return works._replace(queries=queries, keys=keys), masks


def _seen_by_rule(
    rule: hstu.Rule, offsets: Offsets, sequence: jax.Array, row: jax.Array
) -> jax.Array:
    """Computes ranges and gaps of groups' rows, numbered in their sequences: [groups, 64, 4].

    Reads no array of all rows: XLA would search their sequences and positions by two kernels.
    """

    def of_group(array: jax.Array) -> jax.Array:
        return array.at[sequence].get(mode="clip")[:, None]

    _, length = jagged.bounds(offsets.cu_seqlens_kv, offsets.kv_rows, offsets.max_seqlen_kv)
    if offsets.q_to_kv is not None:
        length = length.at[offsets.q_to_kv].get(mode="clip")
    length, rows = of_group(length), jnp.int32(offsets.q_rows)
    if offsets.cu_seqlens_q is not None:
        bounds = offsets.cu_seqlens_q, offsets.q_rows, offsets.max_seqlen_q
        rows = of_group(jagged.bounds(*bounds)[1])
    numbers = (0 if x is None else of_group(x) for x in (offsets.contextual, offsets.num_targets))
    sequences = hstu.Sequence(length, *numbers).clamped(rule)
    found = hstu.seen(rule, length - rows + row, sequences)
    return jnp.stack([x + 0 * row for x in found], axis=-1)


def _order(numbers: jax.Array) -> jax.Array:
    """Sorts numbers, the earliest of equal ones first; returns places in `numbers`."""
    if numbers.size > MOST_COMPARED:
        return jnp.argsort(numbers, stable=True)
    index = jnp.arange(numbers.size, dtype=jnp.int32)
    one, other = numbers[:, None], numbers[None]
    is_before = (other < one) | ((other == one) & (index[None] < index[:, None]))
    place = jnp.sum(is_before, axis=1, dtype=jnp.int32)
    return jnp.sum(
        jnp.where(place[None] == index[:, None], index[None], 0), axis=1, dtype=jnp.int32
    )


def _groups(rows: jax.Array, is_row: jax.Array) -> list[jax.Array]:
    """Computes the words of groups from their rows [2, groups, 64, 2]; `is_row`: which exist."""
    most = jnp.int32(jnp.iinfo(jnp.int32).max)
    begin, end, gap_begin, gap_end = (rows[i, ..., j] for i in range(2) for j in range(2))
    is_row = is_row[: len(begin)]
    sees, has_gap = begin < end, gap_begin < gap_end

    return _reduced(
        (jnp.minimum, most, jnp.where(sees, begin, most)),
        (jnp.maximum, 0, jnp.where(sees, end, 0)),
        (jnp.maximum, 0, jnp.where(is_row, begin, 0)),
        (jnp.minimum, most, jnp.where(is_row, end, most)),
        (jnp.minimum, most, jnp.where(has_gap, gap_begin, most)),
        (jnp.maximum, 0, jnp.where(has_gap, gap_end, 0)),
        # A row that sees keys and has no gap leaves no hole.
        (jnp.maximum, 0, jnp.where(sees, jnp.where(has_gap, gap_begin, most), 0)),
        (jnp.minimum, most, jnp.where(sees, jnp.where(has_gap, gap_end, 0), most)),
    )


def _reduced(*kinds: tuple[Callable[..., Any], Any, jax.Array]) -> list[jax.Array]:
    """Reduces the second axis of arrays by one kernel; takes (operation, neutral number, array)."""
    operations, neutral, arrays = zip(*kinds, strict=True)

    def combine(*numbers: Any) -> tuple[Any, ...]:
        return tuple(f(x, y) for f, x, y in zip(operations, *numbers, strict=True))

    return list(lax.reduce(arrays, tuple(map(jnp.int32, neutral)), combine, (1,)))


class _Blocks(NamedTuple):
    """Blocks of each tile, [tiles, blocks] bool, and tiles' first rows or keys, [tiles] int32."""

    origin: jax.Array
    is_seen: jax.Array
    is_whole: jax.Array  # seen blocks that need no mask
    is_after: jax.Array  # blocks that are not whole, behind a whole one


def _seen_keys(
    works: Works, offsets: Offsets, groups: jax.Array, settings: WorkSettings
) -> _Blocks:
    """Says which blocks of its keys each tile of queries sees."""
    origin, size = works.queries.tiles[:, STATISTICS_ROW], settings.query_block
    longest = offsets.kv_rows if offsets.max_seqlen_kv is None else offsets.max_seqlen_kv

    def of_consumer(consumer: int, number: jax.Array) -> tuple[Any, ...]:
        found = groups.at[lax.div(origin, jnp.int32(WGMMA_M)) + consumer].get(mode="clip")
        key = number * size
        return lambda i: (found[:, i, None], found[:, i + 1, None]), key, key + size

    return _compare(works.queries, origin, -(-longest // size), of_consumer)


def _compare(
    work: Work,
    origin: jax.Array,
    size: int,
    of_consumer: Callable[[int, jax.Array], tuple[Any, ...]],
    is_own: Any = True,
) -> _Blocks:
    """Says whether a row of each tile sees a block, and whether none needs a mask, as producers do.

    `of_consumer` takes a consumer's number and blocks' numbers [1, `size`], and returns what
    `_is_cut` takes; `is_own` [tiles, `size`] says which of these blocks may be a tile's.
    """
    number = jnp.arange(size, dtype=jnp.int32)[None]
    is_seen, is_whole = jnp.bool_(False), jnp.bool_(True)
    for consumer in range(NUM_CONSUMERS):
        compared = of_consumer(consumer, number)
        has_rows = work.tiles[:, 2:3] > consumer * WGMMA_M
        is_cut, has_gap = _is_cut(*compared)
        is_seen |= has_rows & ~_sees_none(*compared)
        is_whole &= ~(has_rows & (is_cut | has_gap))
    is_seen &= _is_below(work, 0) & is_own
    is_whole &= is_seen
    is_after = ~is_whole & jnp.pad(is_whole[:, :-1], ((0, 0), (1, 0)))
    return _Blocks(origin, is_seen, is_whole, is_after)


def _is_below(work: Work, which: int) -> jax.Array:
    """Says which entries [entries, 1] come before one of the two counts.

    Tiles with blocks come first; entries past the last tile are as memory was.
    """
    return jnp.arange(work.tiles.shape[0], dtype=jnp.int32)[:, None] < work.counts[which]


def _seen_queries(works: Works, offsets: Offsets, groups: list[jax.Array], parts: int) -> _Blocks:
    """Says which blocks of queries each tile of keys sees."""
    keys, blocks = works.keys, works.blocks
    assert blocks is not None
    first_row = keys.tiles[:, 1]
    if offsets.q_to_kv is None:
        sequence = keys.tiles[:, 3]
        key = first_row - works.queries.ranges.at[sequence, 0].get(mode="clip")
        _, _, rows, row = jnp.moveaxis(keys.ranges.at[sequence].get(mode="clip"), 1, 0)
        begin = lax.div(row, jnp.int32(WGMMA_M))[:, None]
        end = lax.div(row + rows + (WGMMA_M - 1), jnp.int32(WGMMA_M))[:, None]
        number = jnp.arange(len(blocks), dtype=jnp.int32)[None]
        is_own = (number >= begin) & (number < end)
    else:
        key, kv, kv_of = _shared_keys(first_row, blocks, offsets, parts)
        is_own = kv[:, None] == kv_of[None]
    first, last = key[:, None], key[:, None] + keys.tiles[:, 2:3]

    def of_consumer(consumer: int, number: jax.Array) -> tuple[Any, ...]:
        def words(i: int) -> list[jax.Array]:
            return [x[None] for x in groups[i : i + 2]]

        key = first + consumer * WGMMA_M
        return words, key, jnp.minimum(key + WGMMA_M, last)

    # [tiles, blocks], which XLA fuses with the sums: 512 x 1,024 for 65,536 rows.
    return _compare(keys, key, len(blocks), of_consumer, is_own)


def _shared_keys(
    first_row: jax.Array, blocks: jax.Array, offsets: Offsets, parts: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns each tile's first key and key sequence, and each block of queries' key sequence."""
    starts, _ = jagged.bounds(offsets.cu_seqlens_kv, offsets.kv_rows, offsets.max_seqlen_kv)
    rows = jnp.int32(offsets.kv_rows)
    kv = jnp.maximum(jagged.search_right(starts, lax.rem(first_row, rows)) - 1, 0)
    key = lax.rem(first_row, rows) - starts.at[kv].get(mode="clip")
    if offsets.cu_seqlens_q is None:
        sequence = lax.div(blocks[:, 0], jnp.int32(offsets.q_rows))
    else:
        q_starts, _ = jagged.bounds(offsets.cu_seqlens_q, offsets.q_rows, None)
        sequence = jnp.maximum(jagged.search_right(q_starts, blocks[:, 0]) - 1, 0)
    assert offsets.q_to_kv is not None
    kv_of = jnp.clip(offsets.q_to_kv.at[sequence].get(mode="clip"), 0, starts.size - 1)
    kv_of += lax.rem(sequence, jnp.int32(parts)) * starts.size
    return key, kv + lax.div(first_row, rows) * starts.size, kv_of


def _with_blocks(
    work: Work, blocks: _Blocks, group_rows: int, heads: int = 1
) -> tuple[Work, jax.Array]:
    """Gives tiles the blocks that they see, of all heads; returns numbers by which to sort them."""
    of_group = blocks.is_seen.shape[1]
    number = jnp.arange(of_group, dtype=jnp.int32)[None]
    # The first run of whole blocks ends at the first block behind a whole one.
    count, *words = _reduced(
        (jnp.add, 0, blocks.is_seen.astype(jnp.int32)),
        *((jnp.minimum, of_group, jnp.where(x, number, of_group)) for x in blocks[1:]),
    )
    columns = jnp.stack([count * heads, blocks.origin, *words], axis=1)
    tiles = jnp.concatenate((work.tiles[:, :BLOCK_COUNT], columns), axis=1)
    # A range's row of the second operand: of queries in the result, which may be broadcast.
    first = work.ranges.at[work.tiles[:, 3], 1].get(mode="clip")
    order = lax.div(first, jnp.int32(group_rows)) * (of_group + 1) + (of_group - count)
    return work._replace(tiles=tiles), jnp.where(_is_below(work, 1)[:, 0], order, 2**30 - 1)


# The producer


def range_start(ctx: BackwardContext, index: Any) -> Any:
    """Returns the row of `Masks.rows` of a range's first query; 0 in the kernel for queries."""
    return ctx.range_word(index, 3) if ctx.shape.is_for_keys else jnp.int32(0)


def range_blocks(ctx: BackwardContext, index: Any) -> Any:
    """Counts the blocks of a range."""
    return pl.cdiv(ctx.range_word(index, 2), ctx.config.block)


def whole_blocks(ctx: BackwardContext, tile: Any, index: Any) -> tuple[Any, Any]:
    """Returns first and last number, plus 1, of a range's blocks that need no mask."""
    before, count = lax.div(range_start(ctx, index), WGMMA_M), range_blocks(ctx, index)
    begin, end = (ctx.tile_word(tile, word) - before for word in (WHOLE_BEGIN, WHOLE_END))
    return jnp.clip(begin, 0, count), jnp.clip(end, 0, count)


def block_flags(ctx: BackwardContext, tile: Any, first: Any, done: Any) -> tuple[Any, Any]:
    """Says whether a row of a tile sees a block, and returns both consumers' flags.

    `first` is the row of `Masks.rows` of the range's first query; `done` rows come before the
    block.
    """
    origin, rows = ctx.tile_word(tile, STATISTICS_ROW), ctx.tile_word(tile, 2)
    is_seen, flags = jnp.bool_(False), jnp.int32(0)
    for consumer in range(NUM_CONSUMERS):
        if ctx.shape.is_for_keys:
            number, key = lax.div(first + done, WGMMA_M), origin + consumer * WGMMA_M
            end = jnp.minimum(key + WGMMA_M, origin + rows)
        else:
            number, key = lax.div(origin, WGMMA_M) + consumer, done
            end = key + ctx.config.block
        words = functools.partial(_group_words, ctx, number)
        is_cut, has_gap = _is_cut(words, key, end)
        found = jnp.where(is_cut, CUT, 0) + jnp.where(has_gap, GAP, 0)
        sees_none = (rows <= consumer * WGMMA_M) | _sees_none(words, key, end)
        flags = flags | jnp.where(sees_none, UNSEEN, found) << (FLAG_BITS * consumer)
        is_seen = is_seen | ~sees_none
    return is_seen, flags


def unseen(flags: Any) -> list[Any]:
    """Says for each consumer whether none of its rows sees a block."""
    return [(flags & UNSEEN << FLAG_BITS * consumer) != 0 for consumer in range(NUM_CONSUMERS)]


def _group_words(ctx: BackwardContext, number: Any, word: int) -> list[Any]:
    place = mosaic.opaque(number)
    return [ctx.operands.masks.groups[place, word + i] for i in range(2)]


# Consumers


def received_flags(ctx: BackwardContext, step: Any) -> Any:
    """Reads a consumer's flags of a received block."""
    consumer = mosaic.warpgroup_index()
    return ctx.shared.streamed.word(step, FLAGS) >> (FLAG_BITS * consumer) & ALL_FLAGS


def seen_bits(ctx: BackwardContext, item: Any, step: Any, flags: Any) -> jax.Array:
    """Computes which scores of a tile and a block count."""
    columns = ctx.config.block

    def restrict(part: int, bits: jax.Array) -> jax.Array:
        consumer = mosaic.warpgroup_index()
        tile = mosaic.opaque(item)
        places = [
            ctx.shared.stationary.word(tile, ORIGIN) + consumer * WGMMA_M,
            ctx.shared.streamed.word(step, FIRST),
        ]
        query, key = places[::-1] if ctx.shape.is_for_keys else places
        return seen.restrict(
            *(bits, ctx.operands.masks.rows, part, query, key, columns),
            queries_are_rows=not ctx.shape.is_for_keys,
        )

    bits = seen.all_bits(columns)
    for part, flag in (seen.RANGE, CUT), (seen.GAP, GAP):
        branch = functools.partial(restrict, part)
        bits = lax.cond((flags & flag) != 0, branch, lambda x: x, bits)
    return bits


def keep_seen(
    ctx: BackwardContext,
    block: tuple[Any, jax.Array],
    begin: int,
    weights: jax.Array,
    slope: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Replaces weights and slopes [64, columns] f32, from column `begin` on, that a row does not
    see.
    """
    zero = 0.0 if ctx.shape.has_softmax else gdpa_slopes.zero_slope(ctx.shape.activation)
    fills = [0.0] if slope is weights else [0.0, zero]
    values = [weights, slope][: len(fills)]
    if not ctx.shape.is_for_keys:  # weights have no use, unless they are the slopes, too
        values, fills = values[-1:], fills[-1:]
    flags, bits = block

    def select(*values: jax.Array) -> tuple[jax.Array, ...]:
        return seen.keep(bits, values, fills, begin)

    kept = lax.cond(flags != 0, select, lambda *x: x, *values)
    return kept[0], kept[-1]
