"""Merges neighbouring sequences that have the same keys, for the kernel that lists tiles.

Candidates of one user are such sequences: merged, they fill whole tiles.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ikbo_jax.pallas.hopper import per_thread
from ikbo_jax.pallas.hopper.launch import WarpgroupContext
from ikbo_jax.problems.hopper import WARPGROUP_SIZE

#: Threads whose numbers one turn of the loop reads.
UNROLL = 8


def kv_number(ctx: WarpgroupContext, sequence: jax.Array) -> jax.Array:
    """The sequences of keys of sequences of queries, by `q_to_kv`."""
    found = per_thread.gather(ctx.operands.q_to_kv, sequence, "global", interpret=ctx.interpret)
    return jnp.clip(found, 0, ctx.operands.cu_seqlens_kv.shape[0] - 2)


def merge(ctx: WarpgroupContext) -> None:
    """Fills `shared.kv_numbers` and `shared.lengths`.

    A segment is merged into the one before it if both have the same keys and no row lies between
    them. A thread has consecutive segments, from the last one down; the end of a group that begins
    in them and ends in a later thread's comes from there.
    """
    shape, shared, thread, interpret = ctx.shape, ctx.shared, per_thread.number(), ctx.interpret
    each = pl.cdiv(shape.segments, WARPGROUP_SIZE)
    none = per_thread.same(-1)

    @pl.loop(0, each)
    def _(turn: Any) -> None:
        index = turn * WARPGROUP_SIZE + thread
        number = kv_number(ctx, jnp.clip(index - 1, 0, shape.sequences - 1))
        exists = index < shape.segments
        per_thread.scatter(shared.kv_numbers, index, number, exists, interpret=interpret)

    plgpu.commit_smem()

    def at(ref: Any, i: jax.Array) -> jax.Array:
        i = jnp.clip(i, 0, shape.segments - 1)
        return per_thread.gather(ref, i, "shared", interpret=interpret)

    def is_last(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Whether no segment is merged into these; and where the rows that have keys end."""
        start, end = at(shared.q_offsets, index), at(shared.q_offsets, index + 1)
        found = (index < 1) | (index >= shape.sequences)
        found |= at(shared.kv_numbers, index) != at(shared.kv_numbers, index + 1)
        if shape.max_seqlen_q is not None:
            found |= end - start > shape.max_seqlen_q
            end = jnp.minimum(end, start + shape.max_seqlen_q)
        return found, end

    def group_end(i: Any, end: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = thread * each + (each - 1 - i)
        found, own = is_last(index)
        return index, jnp.where(found, own, end)

    first = lax.fori_loop(0, each, lambda i, end: group_end(i, end)[1], none)
    per_thread.scatter(shared.parts, thread, first, thread >= 0, interpret=interpret)
    plgpu.commit_smem()

    def after(turn: Any, end: jax.Array) -> jax.Array:
        for i in range(UNROLL):
            other = WARPGROUP_SIZE - 1 - (turn * UNROLL + i)
            part = jnp.maximum(none, shared.parts[other])  # a number for each thread
            end = jnp.where((thread < other) & (part >= 0), part, end)
        return end

    end = lax.fori_loop(0, WARPGROUP_SIZE // UNROLL, after, none)

    def keep(i: Any, end: jax.Array) -> jax.Array:
        index, end = group_end(i, end)
        is_first, _ = is_last(index - 1)
        length = jnp.where(is_first, end - at(shared.q_offsets, index), 0)
        exists = index < shape.segments
        per_thread.scatter(shared.lengths, index, length, exists, interpret=interpret)
        return end

    lax.fori_loop(0, each, keep, end)
    plgpu.commit_smem()
