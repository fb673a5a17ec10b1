"""The end of an item: normalises its rows, or keeps their statistics, and stores them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from ikbo_jax.pallas.few_queries.context import Context, Part
from ikbo_jax.pallas.flash.softmax import LN_2
from ikbo_jax.pallas.hopper import stores
from ikbo_jax.pallas.hopper.stores import ROW_LAYOUT


def store(
    ctx: Context, part: Part, head: Any, acc: jax.Array, maximum: jax.Array, sums: jax.Array
) -> None:
    """Stores the rows of a part.

    Args:
      ctx: the consumer's context.
      part: the part.
      head: its first query head.
      acc: [64, H] f32, sums of weights times values; weights are relative to `maximum`.
      maximum: [64] f32, raw scores.
      sums: [64] f32, of the weights.
    """
    outputs = ctx.outputs
    if outputs.maximum is not None:
        _store_rows(ctx, outputs.out, acc, part, head)
        _store_rows(ctx, outputs.maximum, maximum, part, head)
        _store_rows(ctx, outputs.sums, sums, part, head)
        return
    inverse = jnp.where(sums > 0, 1 / sums, 0.0)
    # A NaN sum gives a NaN row.
    inverse = jnp.where(sums != sums, sums, inverse)
    out = (acc * lax.broadcast_in_dim(inverse, acc.shape, (0,))).astype(outputs.out.dtype)
    _store_rows(ctx, outputs.out, out, part, head)
    if outputs.lse is not None:
        lse = jnp.log(sums) + maximum * jnp.float32(ctx.shape.log2_scale * LN_2)
        _store_rows(ctx, outputs.lse, jnp.where(sums != 0, lse, -jnp.inf), part, head)


def _store_rows(ctx: Context, output: Any, values: jax.Array, part: Part, head: Any) -> None:
    """output[target + r, head + j] = row j * head_rows + r of `values`, for r < rows.

    Args:
      ctx: the consumer's context.
      output: device memory [rows, heads, width], or [rows, heads] f32.
      values: [64, width] of 16 or 32 bits, or [64] f32, in the output's dtype.
      part: its target and rows.
      head: the first head.
    """
    shape = ctx.shape
    group, head_rows = shape.group, shape.head_rows
    _, heads, *widths = output.shape
    width = widths[0] if widths else 1
    is_f32 = output.dtype == jnp.float32
    if ctx.interpret:
        shared = ctx.shared
        staging = shared.float_staging if is_f32 else shared.staging
        staging = (staging if widths else shared.row_staging).at[ctx.consumer]
        columns = (slice(width),) if widths else ()
        staging[:, *columns] = values

        @pl.loop(0, part.rows)
        def _(r: Any) -> None:
            for j in range(group):
                output[part.target + r, head + j] = staging[j * head_rows + r, *columns]

        return

    scalar = plgpu.Layout.WG_SPLAT(())
    layout: Any = plgpu.Layout.WGMMA if widths else ROW_LAYOUT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, *(scalar,) * 3))
    def write(_: Any, output: ir.Value, values: Any, *scalars: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        target, rows, head = (s.registers.item() for s in scalars)
        thread = stores.thread_number()
        column = arith.muli(arith.remui(thread, mgpu.c(4, i32)), mgpu.c(2, i32))
        if widths:
            bits = 64 if is_f32 else 32
            pair_type = ir.IntegerType.get_signless(bits)
            words = [mgpu.utils.bitcast(pair, pair_type) for pair in values.registers.flat]
            kind, columns = f"b{bits}", [(column, 1)]
        else:  # the four threads of a row write the same value
            words = [vector.extract(register, [], [0]) for register in values.registers.flat]
            bits, kind, columns = 32, "f32", []
        for half in (0, 1):
            tile_row = stores.thread_row(thread, half)
            row = arith.remui(tile_row, mgpu.c(head_rows, i32))
            member = arith.divui(tile_row, mgpu.c(head_rows, i32))
            below = arith.CmpIPredicate.slt
            is_wanted = arith.andi(
                arith.cmpi(below, row, rows), arith.cmpi(below, member, mgpu.c(group, i32))
            )
            terms = [
                (arith.addi(target, row), heads * width),
                (arith.addi(head, member), width),
                *columns,
            ]
            address = stores.device_address(output, terms, 4 if is_f32 else 2)
            for i, word in enumerate(words[half::2]):
                mgpu.utils.inline_ptx(
                    f"st.global.{kind} [$0 + {bits // 2 * i}], $1;",
                    address,
                    word,
                    predicate=is_wanted,
                    has_side_effects=True,
                )

    write(output, values, part.target, part.rows, head)
