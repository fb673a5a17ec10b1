"""Stores an item's rows, and hands a consumer's part of an item to the other consumer.

Both consumers hold a tile in the same fragment layout, so a thread reads what the thread of the
same number wrote, in vectors of 16 bytes without bank conflicts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.pallas.few_queries import listing
from ikbo_jax.pallas.few_queries.context import Context, Part
from ikbo_jax.pallas.flash.softmax import LN_2, inverse_sums
from ikbo_jax.pallas.hopper import inline, stores
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.hopper.row_order import RowOrder
from ikbo_jax.pallas.hopper.stores import ROW_LAYOUT
from ikbo_jax.problems.hopper import WARPGROUP_SIZE, WGMMA_M

#: Words of a vector that the consumers exchange.
_VECTOR = 4


def store(
    ctx: Context, part: Part, head: Any, acc: jax.Array, maximum: jax.Array, sums: jax.Array
) -> None:
    """Stores the rows of a part, whose first query head is `head`.

    `acc` [64, columns] f32 and `sums` [64] f32 are relative to `maximum` [64] f32, raw scores.
    """
    outputs = ctx.outputs
    if outputs.maximum is not None:
        _store_columns(ctx, outputs.out, acc, part, head)
        _store_rows(ctx, outputs.maximum, maximum, _once(ctx, part), head)
        _store_rows(ctx, outputs.sums, sums, _once(ctx, part), head)
        return
    inverse = inverse_sums(sums, 1.0)
    out = (acc * lax.broadcast_in_dim(inverse, acc.shape, (0,))).astype(outputs.out.dtype)
    _store_columns(ctx, outputs.out, out, part, head)
    if outputs.lse is not None:
        lse = jnp.log(sums) + maximum * jnp.float32(ctx.shape.log2_scale * LN_2)
        lse = jnp.where(sums != 0, lse, -jnp.inf)
        _store_rows(ctx, outputs.lse, lse, _once(ctx, part), head)


def _once(ctx: Context, part: Part) -> Part:
    """Removes the rows of the part where the other consumer stores the same statistics."""
    if not ctx.shares_columns:
        return part
    return part._replace(rows=jnp.where(ctx.consumer == 0, part.rows, 0))


def _store_columns(ctx: Context, output: Any, values: jax.Array, part: Part, head: Any) -> None:
    """Stores rows like `_store_rows`; consumer 0 stores the columns that both consumers have."""
    if not ctx.shares_columns:
        _store_rows(ctx, output, values, part, head)
        return
    width = values.shape[1]
    first = ctx.shape.head_dim - width  # column of consumer 1
    for consumer, begin in ((0, 0), (1, width - first)):
        pl.when(ctx.consumer == consumer)(
            functools.partial(
                _store_rows, ctx, output, values, part, head, consumer * first, begin=begin
            )
        )


def _store_rows(
    ctx: Context,
    output: Any,
    values: jax.Array,
    part: Part,
    head: Any,
    column: Any = 0,
    *,
    begin: int = 0,
) -> None:
    """Stores row j * head_rows + r of `values`, from column `begin` on, to output[target + r, head
    + j].

    Arguments are as for `stores.store_rows`. The values begin at column `column` of the output;
    `begin` is a multiple of 8. Rows of listed candidates are where the queries are.
    """
    order = None
    if ctx.operands.targets is not None:
        order = RowOrder(ctx.operands.targets, ctx.shape.q_len, rows=ctx.shape.rows)
    if ctx.interpret:
        _store_interpreted(ctx, output, values, part, head, (column, begin), order)
        return
    shape = ctx.shape
    group, head_rows = shape.group, shape.head_rows
    _, heads, *widths = output.shape
    width = widths[0] if widths else 1
    is_f32 = output.dtype == jnp.float32
    tables = (ctx.shared.listing,) if shape.listed else ()
    if order is not None:
        tables = order.tables

    @inline.code(
        output, values, part.target, part.rows, head, part.offset, jnp.int32(column), *tables
    )
    def write(output: ir.Value, values: Any, *rest: Any) -> None:
        target, rows, head, offset, column, *table = rest
        thread = stores.thread_number()
        held = stores.HeldRows(values, thread, is_f32=is_f32)
        for half in (0, 1):
            tile_row = stores.thread_row(thread, half)
            row, member = tile_row % head_rows, tile_row // head_rows
            is_wanted = (row < rows) & (member < group)
            if shape.listed:
                row = listing.listed_row(table[0], row + offset, shape.q_len)
            place = target + row, head + member
            if order is not None:
                place = order.place(*place, *table)
            terms = [(place[0], heads * width), (place[1], width)]
            if widths:
                terms.append((column, 1))
            held.store(output, half, terms, is_wanted, begin=begin)


def _store_interpreted(
    ctx: Context,
    output: Any,
    values: jax.Array,
    part: Part,
    head: Any,
    columns_of: tuple[Any, int],
    order: RowOrder | None,
) -> None:
    """Stores rows as `_store_rows` says, under interpretation."""
    shape, shared, (column, begin) = ctx.shape, ctx.shared, columns_of
    has_columns = len(output.shape) == 3
    columns = (slice(begin, values.shape[1]),) if has_columns else ()
    targets = (pl.ds(column + begin, values.shape[1] - begin),) if has_columns else ()

    @pl.loop(0, part.rows)
    def _(r: Any) -> None:
        row = r
        if shape.listed:
            row = part.offset + r
            candidate = shared.listing[lax.div(row, shape.q_len)]
            row = candidate * shape.q_len + lax.rem(row, shape.q_len)
        row = part.target + row
        if order is not None:
            row, _ = order.read(row, head)
        for j in range(shape.group):
            of_row = lax.dynamic_index_in_dim(values, j * shape.head_rows + r, keepdims=False)
            output[row, head + j, *targets] = of_row[*columns] if has_columns else of_row


def _address(memory: ir.Value, thread: Integer, number: int) -> ir.Value:
    """Computes the address of this thread's vector `number`."""
    return inline.address(memory, thread * _VECTOR + number * WARPGROUP_SIZE * _VECTOR)


def _load(address: ir.Value) -> list[ir.Value]:
    ptx = "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];"
    return list(inline.issue(ptx, address, result_types=[ir.F32Type.get()] * _VECTOR))


def give(ctx: Any, acc: jax.Array, maximum: jax.Array, sums: jax.Array) -> None:
    """Writes acc [64, H] f32, and maximum and sums [64] f32, to the exchange memory."""
    shared = ctx.shared
    if ctx.interpret:
        count, *vectors = shared.exchange.shape
        words = lax.bitcast_convert_type(acc, jnp.int32)
        shared.exchange[: count - 1] = words.reshape(-1, *vectors)
        words = lax.bitcast_convert_type(jnp.concatenate([maximum, sums]), jnp.int32)
        shared.exchange[count - 1] = jnp.broadcast_to(words[:, None], vectors)
        return

    @inline.code(shared.exchange, acc, maximum, sums)
    def _(memory: ir.Value, acc: Any, maximum: Any, sums: Any) -> None:
        words = [
            vector.extract(register, [], [i])
            for array, width in ((acc, 2), (maximum, 1), (sums, 1))
            for register in array.registers.flat
            for i in range(width)
        ]
        thread = stores.thread_number()
        for number in range(len(words) // _VECTOR):
            inline.issue(
                "st.shared.v4.f32 [$0], {$1, $2, $3, $4};",
                _address(memory, thread, number),
                *words[number * _VECTOR : (number + 1) * _VECTOR],
            )


def take_statistics(ctx: Any) -> tuple[jax.Array, jax.Array]:
    """Reads maximum [64] and sums [64], f32, that the other consumer wrote."""
    shared = ctx.shared
    last_vector = shared.exchange.shape[0] - 1
    if ctx.interpret:
        words = lax.bitcast_convert_type(shared.exchange[last_vector][:, 0], jnp.float32)
        return words[:WGMMA_M], words[WGMMA_M:]
    row = plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=ROW_LAYOUT)

    @inline.code(shared.exchange, returns=(row, row))
    def read(memory: ir.Value) -> Any:
        words = _load(_address(memory, stores.thread_number(), last_vector))
        return stores.row_array(words[:2]), stores.row_array(words[2:])

    return read


def take_sum(ctx: Any, acc: jax.Array, factor: jax.Array, factor2: jax.Array) -> jax.Array:
    """Computes factor * acc + factor2 * the acc that the other consumer wrote; factors are [64].

    Loads vector by vector: a thread has no registers to hold both at H = 192.
    """
    if ctx.interpret:
        words = ctx.shared.exchange[: ctx.shared.exchange.shape[0] - 1]
        words = lax.bitcast_convert_type(words, jnp.float32)
        return acc * factor[:, None] + words.reshape(acc.shape) * factor2[:, None]

    @inline.code(
        *(ctx.shared.exchange, acc, factor, factor2),
        returns=plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def added(memory: ir.Value, acc: Any, *factors: Any) -> Any:
        thread = stores.thread_number()
        pair = ir.VectorType.get((2,), ir.F32Type.get())
        # A thread's pairs of columns alternate between its two rows.
        of_rows = [[vector.extract(r, [], [0]) for r in f.registers.flat] for f in factors]
        registers = acc.registers.copy()
        for number in range(registers.size // 2):
            words = _load(_address(memory, thread, number))
            for row in (0, 1):
                own = registers.flat[2 * number + row]
                sums = [
                    arith.addf(
                        arith.mulf(vector.extract(own, [], [i]), of_rows[0][row]),
                        arith.mulf(words[2 * row + i], of_rows[1][row]),
                    )
                    for i in (0, 1)
                ]
                registers.flat[2 * number + row] = vector.from_elements(pair, sums)
        return inline.accumulator(registers)

    return added
