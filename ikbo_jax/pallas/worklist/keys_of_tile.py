"""The keys that a tile's rows see by a rule, and which blocks of keys need a mask.

The functions take numbers of tiles, arrays or scalars, inside of a kernel and in XLA.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from ikbo_jax.pallas.worklist.lists import has_long_tiles
from ikbo_jax.problems.hopper import NUM_CONSUMERS, WGMMA_M
from ikbo_jax.reference.hstu import Rule, Seen, Sequence, seen


class Bounds(NamedTuple):
    """Extremes of the keys that a consumer's rows see: of their ranges, and of the gaps in these.

    All rows see the keys in [begin, end), except perhaps some in [gap_begin, gap_end).
    """

    first: Any
    last: Any
    begin: Any
    end: Any
    gap_begin: Any
    gap_end: Any


def _bounds(rule: Rule, sequence: Sequence, first: Any, last: Any) -> Bounds:
    """Finds the bounds of the rows at positions `first` to `last` by some of the rows.

    Begins rise up to the rows without a window. Ends of contextual tokens are equal, then rise.
    """
    first_target = sequence.length - sequence.targets

    def at(position: Any) -> Seen:
        return seen(rule, jnp.clip(position, first, last), sequence)

    ends = at(first), at(last)
    windowed = at(first_target - rule.full_tail - 1) if rule.full_tail else ends[1]
    low, high = [ends[0]], list(ends)
    if rule.contextual != 0:
        low.append(at(sequence.contextual))
    if rule.has_targets and not rule.causal:
        low.append(at(first_target))
        high.append(at(first_target - 1))
    least = functools.reduce(jnp.minimum, (x.end for x in low))
    most = functools.reduce(jnp.maximum, (x.end for x in high))
    begin = jnp.minimum(ends[0].begin, ends[1].begin)
    return Bounds(begin, most, windowed.begin, least, ends[1].gap_begin, ends[1].gap_end)


def keys_of_tile(
    rule: Rule, position: Any, rows: Any, sequence: Sequence, unit: int
) -> tuple[Any, Any, tuple[Any, ...]]:
    """Finds the keys of a tile of `rows` rows, at least 1, and its mask.

    `position` is the first row's in its sequence, `unit` the keys of a block. Returns the first key
    in the sequence, the number of keys that are not skipped, and the words of the mask.
    """

    def divide(keys: Any) -> Any:
        return lax.div(keys, jnp.full_like(keys, unit))

    def block(key: Any, rest: int = 0) -> Any:
        return divide(jnp.maximum(key, 0) + rest)

    given, sequence = sequence, sequence.clamped(rule)
    last_row = position + rows - 1
    # Rows before the first key see nothing.
    visible = _bounds(rule, sequence, jnp.maximum(position, 0), jnp.maximum(last_row, 0))
    has_keys = (sequence.length > 0) & (last_row >= 0)
    # Of each thread its own, even if it is 0 in all: `jnp.where` would make it unsigned.
    first = jnp.where(has_keys, visible.first + 0 * position, 0)
    last = jnp.where(has_keys, visible.last, 0)
    # Keys in the gap of the first row are in the gaps of all rows.
    hole = seen(rule, position, sequence)
    before = divide(jnp.maximum(hole.gap_begin - first, 0) + (unit - 1))
    skipped = divide(jnp.maximum(hole.gap_end - first - before * unit, 0)) * unit
    mask, seen_blocks = [before, skipped, first, position, *given], []
    for consumer in range(NUM_CONSUMERS):
        top = jnp.minimum(position + consumer * WGMMA_M, last_row)
        bottom = jnp.minimum(top + (WGMMA_M - 1), last_row)
        bounds = _bounds(rule, sequence, top, bottom)
        gap_begin, gap_end = bounds.gap_begin, bounds.gap_end
        # The blocks that no range begins in or after; the first one in which a range ends; and the
        # first and last block plus 1 of gaps.
        mask.append(block(bounds.begin - first, unit - 1))
        mask.append(block(bounds.end - first - skipped))
        mask.append(block(gap_begin - first))
        mask.append(jnp.where(gap_begin < gap_end, block(gap_end - first - skipped, unit - 1), 0))
        if has_long_tiles(rule):  # rows that see nothing have a block, whose weights are 0
            count = divide(jnp.maximum(bounds.last - first - skipped, 1) + (unit - 1))
            has_rows = has_keys & (position + consumer * WGMMA_M <= last_row)
            seen_blocks.append(jnp.where(has_rows, count, 0 * position))
    # Rows without keys have a hole, too.
    count = jnp.clip(last - first - skipped, 0, sequence.length)
    return first, count, (*mask, *seen_blocks)
