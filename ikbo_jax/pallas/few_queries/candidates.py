"""Which candidate, in the caller's order, has a row of an item.

Candidate `number` of an item's order is entry `number` of the table that its CTA lists, or of the
order in which another launch has packed the queries, or the candidate itself.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from ikbo_jax.pallas.few_queries.context import Context
from ikbo_jax.pallas.hopper import inline, warps


def tables(ctx: Context) -> tuple[Any, ...]:
    """References that inline code takes as arguments, for `candidate_of`."""
    if ctx.shape.listed:
        return (ctx.shared.listing,)
    return () if ctx.operands.targets is None else (ctx.operands.targets,)


def candidate_of(ctx: Context, number: ir.Value, tables: Any) -> ir.Value:
    """Finds the candidate in inline code; of a number that no row has, any candidate."""
    last = inline.i32(ctx.shape.batch - 1)
    if ctx.shape.listed:
        number = arith.minui(number, inline.i32(ctx.shape.listed - 1))
        number = warps.load_shared(tables[0], number)
    elif tables:
        number = warps.load(tables[0], arith.minui(number, last))
    return arith.minui(number, last)


def interpreted(ctx: Context, number: jax.Array) -> jax.Array:
    """Finds the candidates of an array of numbers, under interpretation."""
    for table in tables(ctx):
        number = jnp.take(table[...], number, mode="clip")
    return jnp.clip(number, 0, ctx.shape.batch - 1)
