"""A candidate's own token: one more key and value that only the candidate's queries see.

The consumer that stores a row computes the row's score with the token, and merges it into the row's
softmax before the result is divided. So own tokens cost the loads of themselves and of the queries:
a pass over the results and their lse in XLA reads and writes all of them once more.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.pallas.few_queries import candidates
from ikbo_jax.pallas.few_queries.context import Context, Item, Part
from ikbo_jax.pallas.flash import softmax
from ikbo_jax.pallas.hopper import inline, per_thread, stores, warps
from ikbo_jax.pallas.hopper.row_vectors import unpacked
from ikbo_jax.problems.hopper import WGMMA_M

#: Numbers of 16 bits of a vector of 16 bytes, and of the vectors that the four threads of a row
#: load at once.
_VECTOR = 8
_STEP = stores.ROW_THREADS * _VECTOR
_SCALAR = plgpu.Layout.WG_SPLAT(())


def merged(
    ctx: Context, item: Item, part: Part, acc: jax.Array, maximum: jax.Array, sums: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds own tokens to a part's (acc, maximum, sums); of split keys, to the first split's."""
    state = acc, maximum, sums
    if ctx.shape.splits == 1:
        return _merged(ctx, item, part, *state)
    is_first = item.target < ctx.shape.rows
    added: tuple[jax.Array, jax.Array, jax.Array] = lax.cond(
        is_first, lambda: _merged(ctx, item, part, *state), lambda: state
    )
    return added


def _merged(
    ctx: Context, item: Item, part: Part, acc: jax.Array, maximum: jax.Array, sums: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    log2_scale = ctx.shape.log2_scale
    score, value = _loaded(ctx, item, part, acc.shape)
    larger = softmax.further(log2_scale)(maximum, score)
    base = softmax.finite(larger, log2_scale)
    shrink, weight = (jnp.exp2((x - base) * jnp.float32(log2_scale)) for x in (maximum, score))
    acc = acc * lax.broadcast_in_dim(shrink, acc.shape, (0,))
    acc = acc + value * lax.broadcast_in_dim(weight, acc.shape, (0,))
    return acc, larger, sums * shrink + weight


def _loaded(
    ctx: Context, item: Item, part: Part, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Loads the scores [64] f32 of own tokens, not scaled, and their values [64, columns] f32."""
    sizes, operands = ctx.shape, ctx.operands
    first = part.offset if sizes.listed else lax.rem(part.target, sizes.rows)
    kv_head = lax.div(item.head, jnp.int32(sizes.q_heads // sizes.kv_heads))
    column = ctx.first_column_block * 64 if ctx.shares_columns else jnp.int32(0)
    if ctx.interpret:
        return _interpreted(ctx, first, part.rows, item.head, kv_head, column, shape[1])
    tables, dtype = candidates.tables(ctx), operands.query.dtype
    row_type = plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=stores.ROW_LAYOUT)
    value_type = plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA)
    head_dim, kv_heads, q_len = sizes.head_dim, sizes.kv_heads, sizes.q_len

    @plgpu.inline_mgpu(
        arg_types=(*(plgpu.RefType(),) * 3, *(_SCALAR,) * 5, *(plgpu.RefType() for _ in tables)),
        return_type=(row_type, value_type),
    )
    def load(_: Any, query: ir.Value, key: ir.Value, value: ir.Value, *rest: Any) -> Any:
        first, count, head, kv_head, column = (x.registers.item() for x in rest[:5])
        thread = stores.thread_number()
        of_row = arith.remui(thread, inline.i32(stores.ROW_THREADS))
        part_column = arith.muli(of_row, inline.i32(_VECTOR))

        def vectors(ref: ir.Value, terms: Any, width: int) -> list[list[ir.Value]]:
            address = stores.device_address(ref, [*terms, (part_column, 1)], 2)
            byte = ir.IntegerType.get_signless(8)
            return [
                per_thread.load_words(
                    mgpu.utils.getelementptr(address, [2 * i], byte), 4, is_early=True
                )
                for i in range(0, width, _STEP)
            ]

        def of_half(half: int) -> tuple[Any, Any, Any]:
            tile_row = stores.thread_row(thread, half)
            row = arith.remui(tile_row, inline.i32(sizes.head_rows))
            member = arith.divui(tile_row, inline.i32(sizes.head_rows))
            member = arith.minui(member, inline.i32(sizes.group - 1))
            # Rows of nobody repeat the last one, whose loads are in L1 then.
            row = arith.addi(first, arith.minsi(row, arith.subi(count, inline.i32(1))))
            number = arith.divui(row, inline.i32(q_len))
            candidate = candidates.candidate_of(ctx, number, rest[5:])
            if sizes.listed:
                row = arith.addi(
                    arith.muli(candidate, inline.i32(q_len)), arith.remui(row, inline.i32(q_len))
                )
            own = [(candidate, kv_heads * head_dim), (kv_head, head_dim)]
            head_of_row = arith.addi(head, member)
            return (
                vectors(
                    query, [(row, sizes.q_heads * head_dim), (head_of_row, head_dim)], head_dim
                ),
                vectors(key, own, head_dim),
                vectors(value, [*own, (column, 1)], shape[1]),
            )

        def score(query: Any, key: Any) -> ir.Value:
            total = inline.f32(0.0)
            for words in zip(query, key, strict=True):
                for pair in zip(*words, strict=True):
                    numbers = (unpacked(word, dtype) for word in pair)
                    for a, b in zip(*numbers, strict=True):
                        total = arith.addf(total, arith.mulf(a, b))
            for distance in (1, 2):
                other = mgpu.utils.shfl_bfly(total, distance)
                total = arith.addf(total, other)
            return total

        pair = ir.VectorType.get((2,), ir.F32Type.get())
        single = ir.VectorType.get((1,), ir.F32Type.get())
        scores, columns = [], []
        halves = [of_half(half) for half in (0, 1)] if head_dim <= 128 else None
        for half in (0, 1):
            query_words, key_words, value_words = halves[half] if halves else of_half(half)
            scores.append(vector.from_elements(single, [score(query_words, key_words)]))
            words = [x for y in value_words for x in warps.transposed(y, of_row)]
            columns.append([vector.from_elements(pair, unpacked(x, dtype)) for x in words])
        layout = stores.ROW_LAYOUT.to_mgpu()
        rows = mgpu.FragmentedArray(
            _registers=np.array(scores, dtype=object).reshape(layout.registers_shape((WGMMA_M,))),
            _layout=layout,
            _is_signed=None,
        )
        # A thread's pairs of columns alternate between its two rows.
        flat = [x for both in zip(*columns, strict=True) for x in both]
        registers = np.array(flat, dtype=object)
        return rows, inline.accumulator(registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape(shape)))

    found: tuple[jax.Array, jax.Array] = load(
        *(operands.query, operands.self_key, operands.self_value),
        *(first, part.rows, item.head, kv_head, column),
        *tables,
    )
    return found


def _interpreted(
    ctx: Context, first: Any, count: Any, head: Any, kv_head: Any, column: Any, width: int
) -> tuple[jax.Array, jax.Array]:
    shape = ctx.shape
    tile_row = jnp.arange(WGMMA_M, dtype=jnp.int32)
    row = lax.rem(tile_row, jnp.int32(shape.head_rows))
    member = jnp.minimum(lax.div(tile_row, jnp.int32(shape.head_rows)), shape.group - 1)
    row = first + jnp.minimum(row, count - 1)
    number, of_candidate = lax.div(row, jnp.int32(shape.q_len)), lax.rem(row, shape.q_len)
    candidate = candidates.interpreted(ctx, number)
    if shape.listed:
        row = candidate * shape.q_len + of_candidate

    def rows(ref: Any, row: Any, head: Any) -> jax.Array:
        values = ref[...].astype(jnp.float32)
        found = jnp.take(values.reshape(-1, shape.head_dim), row * values.shape[1] + head, axis=0)
        return found

    score = jnp.sum(
        rows(ctx.operands.query, row, head + member)
        * rows(ctx.operands.self_key, candidate, kv_head),
        axis=1,
    )
    value = rows(ctx.operands.self_value, candidate, kv_head)
    return score, lax.dynamic_slice_in_dim(value, column, width, axis=1)
