"""Ranges of keys: candidate b sees the keys [ranges[b, 0], ranges[b, 1]) of its user.

The producer narrows an item to the blocks that some row sees, and tells the consumers which of
these all rows see whole. The consumers mask the scores of the other blocks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.few_queries.context import Context, Item, Part, Place
from ikbo_jax.pallas.hopper import inline, per_thread, stores, warps
from ikbo_jax.pallas.hopper.inline import Integer
from ikbo_jax.pallas.hopper.visible import Visible
from ikbo_jax.problems.hopper import WGMMA_M

#: More than any number of keys.
MOST = 2**30
#: Of each of `Bounds`: whether of begins or ends, how it joins those of rows, and that of no row.
_BOUNDS = ((0, "min", MOST), (1, "max", 0), (0, "max", 0), (1, "min", MOST))


class Bounds(NamedTuple):
    """Keys that the rows of an item see; a row that sees nothing has the range [MOST, 0).

    Some row sees a key in [first, end), and every row sees all keys in [all_from, all_to).
    """

    first: Any
    end: Any
    all_from: Any
    all_to: Any


def bounds(ctx: Context, place: Place, target: Any, count: Any, length: Any) -> Bounds:
    """Finds the bounds of `count` rows of an item from `target` on, in the producer warp."""
    shape = ctx.shape
    first = jnp.int32(0) if shape.listed else target - place.split * shape.rows
    if ctx.interpret:
        row = jnp.arange(shape.item_rows, dtype=jnp.int32)
        begin, end = (jnp.clip(x, 0, length) for x in _interpreted(ctx, first + row))
        is_empty = begin >= end
        seen = jnp.where(is_empty, MOST, begin), jnp.where(is_empty, 0, end)
        return Bounds(
            *(
                getattr(jnp, kind)(jnp.where(row < count, seen[i], neutral))
                for i, kind, neutral in _BOUNDS
            )
        )
    tables = _tables(ctx)

    @inline.code(ctx.operands.ranges, first, count, length, *tables, returns=(inline.INTEGER,) * 4)
    def reduced(ranges: Any, first: Integer, count: Any, length: Any, *tables: Any) -> Any:
        q_len, zero, most = (inline.i32(x) for x in (shape.q_len, 0, MOST))
        number = first // q_len
        # The number after the last row's; the first row's without rows.
        last = (first + count + (q_len - 1)) // q_len
        last = (zero < count).select(last, number)
        found = [inline.i32(neutral) for _, _, neutral in _BOUNDS]
        for i in range(0, min(shape.item_rows, shape.item_rows // shape.q_len + 2), warps.LANES):
            place = number + (warps.lane() + i)
            is_row = place < last
            loaded = _load(ctx, ranges, place, tables)
            begin, end = (x.at_least(zero).at_most(length) for x in loaded)
            sees = begin < end
            seen = sees.select(begin, most), sees.select(end, zero)
            for j, (k, kind, neutral) in enumerate(_BOUNDS):
                value = is_row.select(seen[k], neutral)
                found[j] = found[j].at_most(value) if kind == "min" else found[j].at_least(value)
        return tuple(warps.reduced(x, kind) for x, (_, kind, _) in zip(found, _BOUNDS, strict=True))

    return Bounds(*reduced)


def keep_visible(
    ctx: Context, item: Item, part: Part, block: Any, scores: jax.Array, fill: float
) -> jax.Array:
    """Replaces scores [64, block_kv] f32 of keys that their row does not see by `fill`."""
    size = ctx.config.block_kv

    def masked() -> jax.Array:
        # Loaded for each block: two numbers of each of a thread's rows, kept, would be spilled.
        before = item.first_key + block * size
        begin, end = (jnp.clip(x, 0, ctx.shape.kv_len) - before for x in _of_rows(ctx, part))
        end = jnp.minimum(end, item.keys - block * size)
        return Visible(size, end, begin).select(scores, inside=True, fill=fill)

    is_partial = (block < item.whole_from) | (block >= item.whole_to)
    return lax.cond(is_partial, masked, lambda: scores)


def _of_rows(ctx: Context, part: Part) -> tuple[jax.Array, jax.Array]:
    """Loads (begin, end) of the range of each of a consumer's rows, [64] int32, not clamped."""
    shape = ctx.shape
    first = part.offset if shape.listed else lax.rem(part.target, shape.rows)
    if ctx.interpret:
        row = lax.rem(jnp.arange(WGMMA_M, dtype=jnp.int32), jnp.int32(shape.head_rows))
        return _interpreted(ctx, first + row)
    tables = _tables(ctx)
    rows = plgpu.ShapeDtypeStruct((WGMMA_M,), jnp.int32, layout=stores.ROW_LAYOUT)

    @inline.code(ctx.operands.ranges, first, *tables, returns=(rows, rows))
    def loaded(ranges: ir.Value, first: Integer, *tables: ir.Value) -> Any:
        thread, halves = stores.thread_number(), []
        for half in (0, 1):
            row = stores.thread_row(thread, half) % shape.head_rows
            number = (first + row) // shape.q_len
            halves.append(_load(ctx, ranges, number, tables))
        return tuple(stores.row_array(list(words)) for words in zip(*halves, strict=True))

    return loaded


def _tables(ctx: Context) -> tuple[Any, ...]:
    """References to what has an item's candidates by number: its CTA's list, or the order."""
    if ctx.shape.listed:
        return (ctx.shared.listing,)
    return () if ctx.operands.targets is None else (ctx.operands.targets,)


def _load(ctx: Context, ranges: ir.Value, number: Integer, tables: Any) -> list[Integer]:
    """Loads begin and end of candidate `number` of the item's order; of no row, of any."""
    last = inline.i32(ctx.shape.batch - 1)
    if ctx.shape.listed:
        number = Integer(arith.minui(number, inline.i32(ctx.shape.listed - 1)))
        number = warps.load_shared(tables[0], number)
    elif tables:
        number = warps.load(tables[0], arith.minui(number, last))
    number = Integer(arith.minui(number, last)) * 2
    return per_thread.load_words(inline.address(ranges, number), 2, is_early=True)


def _interpreted(ctx: Context, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Loads begins and ends of rows, under interpretation."""
    number = lax.div(row, jnp.int32(ctx.shape.q_len))
    for table in _tables(ctx):
        number = jnp.take(table[...], number, mode="clip")
    number = 2 * jnp.clip(number, 0, ctx.shape.batch - 1)
    ranges = ctx.operands.ranges[...]
    return jnp.take(ranges, number), jnp.take(ranges, number + 1)
