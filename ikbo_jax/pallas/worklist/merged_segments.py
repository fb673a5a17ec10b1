"""Merges neighbouring sequences that have the same keys, for the kernel that lists tiles.

Candidates of one user are such sequences: merged, they fill whole tiles.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ikbo_jax.pallas.hopper.per_thread import same
from ikbo_jax.pallas.worklist.jagged_segments import SegmentContext


def merge(ctx: SegmentContext) -> None:
    """Marks in `shared.kv_numbers` the segments that are merged into the one before.

    A segment is merged if it has the same keys as the one before it, and no row lies between them.
    Its number becomes -1 - e, where e is the row at which its group ends. So no second array is
    needed: 20,000 sequences fit shared memory.

    A thread has consecutive segments, from the last one down; the end of a group that begins in
    them and ends in a later thread's comes from there. Ends rise, so the next one is the least.
    """
    shape, shared, threads = ctx.shape, ctx.shared, ctx.threads
    turns, step, each = threads.parts(shape.segments)
    first = (threads.count - 1 - threads.number()) * each
    last = max(shape.sequences, 1)

    def number(index: jax.Array) -> jax.Array:
        return threads.read(shared.kv_numbers, jnp.clip(index, 1, last))

    def starts(index: jax.Array) -> jax.Array:
        return threads.read(shared.q_offsets, jnp.clip(index, 0, shape.segments))

    def end(start: jax.Array, following: jax.Array) -> jax.Array:
        """Where a segment's rows that have keys end."""
        if shape.max_seqlen_q is None:
            return following
        return jnp.minimum(following, start + shape.max_seqlen_q)

    def is_merged(index: jax.Array, numbers: tuple[Any, Any], rows: tuple[Any, Any]) -> jax.Array:
        """By the numbers of the segment before and of this one, and where both start."""
        found = (index > 1) & (index <= shape.sequences) & (numbers[0] == numbers[1])
        return found & (end(*rows) == rows[1]) if shape.max_seqlen_q is not None else found

    def batch(turn: Any, read_number: Any) -> list[tuple[jax.Array, Any, Any]]:
        """(index, kv number of the segment before, (starts before, of this one, and after))."""
        top = first + (each - 1 - turn * step)
        numbers = [read_number(top - i - 1) for i in range(step)]
        rows = [starts(top - i + 1) for i in range(step + 2)]
        return [(top - i, numbers[i], rows[i : i + 3][::-1]) for i in range(step)]

    def group_ends(turn: Any, carry: tuple[Any, ...], read_number: Any, mark: Any) -> Any:
        """The carry: end of the group, whether it ends here (0 or 1), this segment's number."""
        group, is_end, own = carry
        for index, before, (previous, start, following) in batch(turn, read_number):
            group = jnp.where(is_end > 0, end(start, following), group)
            merged = is_merged(index, (before, own), (previous, start))
            mark(index, merged, group)
            is_end, own = jnp.where(merged, 0, 1), before
        return group, is_end, own

    # What lies beyond a thread's segments, before threads change it.
    above = first + each
    is_open = is_merged(
        above, (number(above - 1), number(above)), (starts(above - 1), starts(above))
    )
    carry = (same(-1), jnp.where(is_open, 0, 1), number(above - 1))
    below = number(first - 1)

    def ends(turn: Any, carry: Any) -> Any:
        return group_ends(turn, carry, number, lambda *_: None)

    open_end, _, _ = lax.fori_loop(0, turns, ends, carry)
    found = jnp.where(open_end < 0, -(2**31 - 1), -open_end)
    (later,) = threads.maxima_before([found], shared.parts, 3 * threads.warps)

    def mark(index: jax.Array, merged: jax.Array, group: jax.Array) -> None:
        threads.keep(shared.kv_numbers, index, -1 - group, merged)

    def own_number(index: jax.Array) -> jax.Array:
        return jnp.where(index < first, below, number(index))

    def keep(turn: Any, carry: Any) -> Any:
        return group_ends(turn, carry, own_number, mark)

    # -later overflows for none, where no group ends later and so none is open.
    lax.fori_loop(0, turns, keep, (-jnp.maximum(later, -(2**31 - 1)), *carry[1:]))
    threads.commit()
