"""Which scores of a block count: a bit of each, from the keys that every query sees.

One word holds the bits of a thread's scores. It is computed where registers are free.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.pallas.hopper import inline, mosaic, per_thread, stores
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.problems.hopper import WGMMA_M

#: Parts of `ends`: the range of keys that a query sees, and the gap in it.
RANGE, GAP = range(2)


def all_bits(columns: int) -> jax.Array:
    """Makes the bits of scores [64, columns] that all count; under interpretation, bools."""
    return jnp.ones((WGMMA_M, columns), bool) if mosaic.is_interpreted() else per_thread.same(-1)


def restrict(
    bits: jax.Array,
    ends: Any,
    part: int,
    query: Any,
    key: Any,
    columns: int,
    *,
    queries_are_rows: bool,
) -> jax.Array:
    """Clears the bits of keys outside their queries' ranges, or inside their gaps.

    `bits` are of scores [64, columns], of 64 queries from `query` on by keys from `key` on, or the
    reverse. `ends` [2, queries, 2] int32 has begin and end of each query's `RANGE` and `GAP`, and
    `part` says which.
    """
    if mosaic.is_interpreted():
        shape = (WGMMA_M, columns) if queries_are_rows else (columns, WGMMA_M)
        keys = jnp.arange(shape[1], dtype=jnp.int32)[None] + key
        begin, end = (ends[part, pl.ds(query, shape[0]), i][:, None] for i in range(2))
        inside = (keys >= begin) & (keys < end)
        inside = inside if queries_are_rows else inside.T
        return bits & (inside if part == RANGE else ~inside)
    before = part * ends.shape[1]

    @inline.code(ends, bits, query, key, returns=per_thread.INT32)
    def computed(ends: ir.Value, bits: Any, query: Integer, key: Integer) -> Integer:
        thread = stores.late_thread_number()
        row, i32 = stores.thread_row(thread, 0), ir.IntegerType.get_signless(32)
        column = thread % 4 * 2
        query = query + (row if queries_are_rows else column)
        key = key + (column if queries_are_rows else row)
        address = stores.device_address(ends, [(query + before, 2)], 4)
        steps = [
            (8 * half, 8 * i + j) for i in range(columns // 8) for half in (0, 1) for j in (0, 1)
        ]
        found: dict[int, Any] = {}
        word = inline.i32(0)
        for bit, step in enumerate(steps):
            query_step, key_step = step if queries_are_rows else step[::-1]
            if query_step not in found:
                at = mgpu.utils.getelementptr(address, [inline.i32(2 * query_step)], i32)
                begin, end = per_thread.load_words(at, 2)
                found[query_step] = begin, end - begin
            begin, length = found[query_step]
            inside = (key + key_step - begin).below(length)
            kept = (inline.bit(bit), 0) if part == RANGE else (0, inline.bit(bit))
            word = word | inside.select(*kept)
        return per_thread.scalar(bits) & word

    return computed


def keep(
    bits: jax.Array, values: Sequence[jax.Array], fills: Sequence[float], begin: int
) -> tuple[jax.Array, ...]:
    """Replaces values [64, columns] f32, from column `begin` on, whose bit is clear, by fills."""
    columns = values[0].shape[1]
    if mosaic.is_interpreted():
        kept = bits[:, begin : begin + columns]
        return tuple(jnp.where(kept, x, jnp.float32(y)) for x, y in zip(values, fills, strict=True))

    @inline.code(bits, *values, returns=tuple(values))
    def selected(bits: Any, *arrays: mgpu.FragmentedArray) -> Any:
        word, found = per_thread.scalar(bits), [x.registers.copy() for x in arrays]
        for i in range(found[0].size):
            pairs = [[vector.extract(x.flat[i], [], [j]) for j in (0, 1)] for x in found]
            for j in range(2):
                is_seen = (word & inline.bit(begin // 2 + 2 * i + j)).differs(0)
                for pair, fill in zip(pairs, fills, strict=True):
                    pair[j] = arith.select(is_seen, pair[j], inline.f32(fill))
            for x, pair in zip(found, pairs, strict=True):
                x.flat[i] = vector.from_elements(x.flat[i].type, pair)
        return tuple(inline.accumulator(x) for x in found)

    return tuple(selected)
