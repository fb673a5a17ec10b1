"""A candidate's own token: one more key and value that only the candidate's queries see.

The consumer that stores a row computes the row's score with the token, and merges it into the row's
softmax before the result is divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.pallas.hopper import inline, mosaic, operand_tiles, per_thread, stores, warps
from ikbo_jax.pallas.hopper.row_vectors import unpacked
from ikbo_jax.problems.hopper import WGMMA_M

#: Numbers of 16 bits of a vector of 16 bytes, and of the vectors that the four threads of a row
#: load at once.
_VECTOR = 8
_STEP = stores.ROW_THREADS * _VECTOR
_SCALAR = plgpu.Layout.WG_SPLAT(())


class Order(NamedTuple):
    """Finds candidates: entry `number` of a table, or `number` itself if there is no table.

    Attributes:
      tables: references that inline code takes as arguments.
      candidate: computes the candidate of (number, the tables) in inline code; `interpreted`: those
        of an array of numbers, under interpretation.
      has_queries: whether queries are in the order of candidates; else in the order of numbers.
    """

    tables: tuple[Any, ...]
    candidate: Callable[[ir.Value, Any], ir.Value]
    interpreted: Callable[[jax.Array], jax.Array]
    has_queries: bool = False

    @classmethod
    def of_packed(cls, targets: Any, batch: int) -> Order:
        """Describes queries in the order of users, by `targets` [B] int32 in device memory."""

        def candidate(number: ir.Value, tables: Any) -> ir.Value:
            number = arith.minui(number, inline.i32(batch - 1))
            return warps.load(tables[0], number) if tables else number

        def interpreted(number: jax.Array) -> jax.Array:
            return number if targets is None else jnp.take(targets[...], number, mode="clip")

        return cls(() if targets is None else (targets,), candidate, interpreted)


class Rows(NamedTuple):
    """The 64 rows of a warpgroup's tile.

    Row 0 is row `first` of a head; rows [begin, end) are stored, and others repeat these. From
    query head `head` on, `group` heads (static) have `head_rows` rows each.
    """

    first: Any
    begin: Any
    end: Any
    head: Any
    kv_head: Any
    group: int = 1
    head_rows: int = WGMMA_M


def load(
    ctx: Any, rows: Rows, order: Order, columns: int, column: Any = 0, *, at_once: bool
) -> tuple[jax.Array, jax.Array]:
    """Loads the scores [64] f32 of own tokens, not scaled, and their values [64, columns] f32.

    `column` is the first of the values' columns. With `at_once`, a thread issues the loads of both
    of its rows before it uses the first ones; otherwise they take fewer registers.
    """
    operands = ctx.operands.query, ctx.operands.self_key, ctx.operands.self_value
    column, tables = jnp.int32(column), len(order.tables)
    if ctx.interpret:
        return _interpreted(ctx, rows, order, columns, column)
    q_len, dtype = ctx.shape.q_len, operands[0].dtype
    _, kv_heads, head_dim = operands[1].shape
    all_rows, q_heads, _ = operands[0].shape
    row_type = plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=stores.ROW_LAYOUT)
    value_type = plgpu.ShapeDtypeStruct((WGMMA_M, columns), jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(
        arg_types=(*(plgpu.RefType(),) * 3, *(_SCALAR,) * 6, *(plgpu.RefType(),) * tables),
        return_type=(row_type, value_type),
    )
    def issue(_: Any, query: ir.Value, key: ir.Value, value: ir.Value, *rest: Any) -> Any:
        first, begin, end, head, kv_head, column = (x.registers.item() for x in rest[:6])
        thread = stores.thread_number()
        of_row = arith.remui(thread, inline.i32(stores.ROW_THREADS))

        def of_half(half: int) -> tuple[Any, Any, Any]:
            member, row = _divided(stores.thread_row(thread, half), rows.head_rows)
            member = arith.minui(member, inline.i32(rows.group - 1))
            # Rows that nobody stores repeat others, whose loads are in L1.
            last = arith.subi(end, inline.i32(1))
            row = arith.addi(first, arith.minsi(arith.maxsi(row, begin), last))
            row = arith.maxsi(arith.minsi(row, inline.i32(all_rows - 1)), inline.i32(0))
            number, of_candidate = _divided(row, q_len)
            candidate = order.candidate(number, rest[6:])
            if order.has_queries:
                row = arith.addi(arith.muli(candidate, inline.i32(q_len)), of_candidate)
            of_query = [(row, q_heads * head_dim), (arith.addi(head, member), head_dim)]
            own = [(candidate, kv_heads * head_dim), (kv_head, head_dim)]
            return (
                _vectors(query, of_query, of_row, head_dim),
                _vectors(key, own, of_row, head_dim),
                _vectors(value, [*own, (column, 1)], of_row, columns),
            )

        halves = [of_half(half) for half in (0, 1)] if at_once else None
        scores, values = [], []
        for half in (0, 1):
            query_words, key_words, value_words = halves[half] if halves else of_half(half)
            scores.append(_score(query_words, key_words, dtype))
            words = [x for four in value_words for x in warps.transposed(four, of_row)]
            values.append([_vector(unpacked(x, dtype)) for x in words])
        # A thread's pairs of columns alternate between its two rows.
        pairs = np.array([x for both in zip(*values, strict=True) for x in both], dtype=object)
        shape = mgpu.WGMMA_LAYOUT.registers_shape((WGMMA_M, columns))
        return stores.row_array(scores), inline.accumulator(pairs.reshape(shape))

    places = rows.first, rows.begin, rows.end, rows.head, rows.kv_head, column
    return issue(*operands, *places, *order.tables)


def read(
    ctx: Any,
    scores: jax.Array,
    values: Any,
    begin: Any,
    columns: int,
    head_rows: int = WGMMA_M,
    first: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Reads a tile's scores [64] f32, not scaled, and values [64, columns] f32 of own tokens.

    A row's candidate has place (begin + row % head_rows) // T: its score is in that column of
    `scores`, its value in row `first` + place of operand tiles.
    """
    q_len = ctx.shape.q_len
    if ctx.interpret:
        row = lax.rem(jnp.arange(WGMMA_M, dtype=jnp.int32), jnp.int32(head_rows))
        place = lax.div(begin + row, jnp.int32(q_len))
        is_own = lax.broadcasted_iota(jnp.int32, scores.shape, 1) == place[:, None]
        rows = jnp.moveaxis(values[...], 0, 1)
        rows = rows.reshape(rows.shape[0], -1)[:, :columns].astype(jnp.float32)
        score = jnp.sum(jnp.where(is_own, scores, 0.0), axis=1)
        return score, jnp.take(rows, first + place, axis=0)
    row_type = plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=stores.ROW_LAYOUT)
    dtype = values.dtype
    value_type = plgpu.ShapeDtypeStruct((WGMMA_M, columns), dtype, layout=plgpu.Layout.WGMMA)

    def place_of(begin: ir.Value, row: ir.Value) -> ir.Value:
        row = arith.addi(begin, arith.remui(row, inline.i32(head_rows)))
        return arith.divui(row, inline.i32(q_len))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(mosaic.operand_transforms(dtype)), _SCALAR),
        return_type=(row_type, value_type),
    )
    def read(_: Any, scores: mgpu.FragmentedArray, values: ir.Value, begin: Any) -> Any:
        thread, begin, found = stores.thread_number(), begin.registers.item(), []
        of_row = arith.remui(thread, inline.i32(stores.ROW_THREADS))
        for half in (0, 1):
            # A thread has two of every eight columns; a row's other threads do not find its place.
            place = place_of(begin, stores.thread_row(thread, half))
            place = arith.subi(place, arith.muli(of_row, inline.i32(2)))
            score = inline.f32(0.0)
            for number, pair in enumerate(scores.registers.flat[half::2]):
                for i in (0, 1):
                    is_own = arith.cmpi(arith.CmpIPredicate.eq, place, inline.i32(8 * number + i))
                    score = arith.select(is_own, vector.extract(pair, [], [i]), score)
            for distance in (1, 2):
                score = arith.addf(score, mgpu.utils.shfl_bfly(score, distance))
            found.append(score)

        def row_of(row: ir.Value) -> ir.Value:
            return arith.addi(place_of(begin, row), inline.i32(first))

        rows = operand_tiles.read_matrices(values, thread, columns, row_of)
        return stores.row_array(found), rows

    score, value = read(scores, values, begin)
    return score, value.astype(jnp.float32)


def _divided(x: ir.Value, divisor: int) -> tuple[ir.Value, ir.Value]:
    """Divides in inline code."""
    return arith.divui(x, inline.i32(divisor)), arith.remui(x, inline.i32(divisor))


def _vector(numbers: list[ir.Value]) -> ir.Value:
    return vector.from_elements(ir.VectorType.get((len(numbers),), numbers[0].type), numbers)


def _vectors(
    ref: ir.Value, terms: list[tuple[ir.Value, int]], of_row: ir.Value, width: int
) -> list[list[ir.Value]]:
    """Loads a thread's part of `width` numbers at sum(value * stride): every fourth vector."""
    address = stores.device_address(ref, [*terms, (of_row, _VECTOR)], 2)
    byte = ir.IntegerType.get_signless(8)
    places = [mgpu.utils.getelementptr(address, [2 * i], byte) for i in range(0, width, _STEP)]
    return [per_thread.load_words(place, 4, is_early=True) for place in places]


def _score(query: list[list[ir.Value]], key: list[list[ir.Value]], dtype: Any) -> ir.Value:
    """Adds the products of a row, which four threads have."""
    total = inline.f32(0.0)
    for words in zip(query, key, strict=True):
        for pair in zip(*words, strict=True):
            for a, b in zip(*(unpacked(word, dtype) for word in pair), strict=True):
                total = arith.addf(total, arith.mulf(a, b))
    for distance in (1, 2):
        total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
    return total


def _interpreted(
    ctx: Any, rows: Rows, order: Order, columns: int, column: Any
) -> tuple[jax.Array, jax.Array]:
    tile_row, q_len = jnp.arange(WGMMA_M, dtype=jnp.int32), jnp.int32(ctx.shape.q_len)
    member = jnp.minimum(lax.div(tile_row, jnp.int32(rows.head_rows)), rows.group - 1)
    row = jnp.maximum(lax.rem(tile_row, jnp.int32(rows.head_rows)), rows.begin)
    row = rows.first + jnp.minimum(row, rows.end - 1)
    row = jnp.clip(row, 0, ctx.operands.query.shape[0] - 1)
    candidate = order.interpreted(lax.div(row, q_len))
    if order.has_queries:
        row = candidate * q_len + lax.rem(row, q_len)

    def taken(ref: Any, row: Any, head: Any) -> jax.Array:
        values = ref[...].astype(jnp.float32)
        _, heads, width = values.shape
        return jnp.take(values.reshape(-1, width), row * heads + head, axis=0, mode="clip")

    query = taken(ctx.operands.query, row, rows.head + member)
    key, value = (
        taken(x, candidate, rows.kv_head) for x in (ctx.operands.self_key, ctx.operands.self_value)
    )
    value = lax.dynamic_slice_in_dim(value, column, columns, axis=1)
    return jnp.sum(query * key, axis=1), value
